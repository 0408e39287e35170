"""``PrivacyArguments`` of a private ``Trainer``, and what of ``Trainer``'s arguments is refused."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Trainer
from transformers.debug_utils import DebugOption

from dpprof.private.accounting.budget import verify_budget
from dpprof.private.engine.factor import find_factor
from dpprof.private.loop.captured_parts import refuse_execution
from dpprof.private.loop.part_size import read_max_batch_size
from dpprof.private.loop.private_training import METHODS, refuse_truncation
from dpprof.private.noise.strategies import is_correlated_noise
from dpprof.private.number_formats import refuse_loss_scale


@dataclass(frozen=True)
class PrivacyArguments:
    """What makes a ``Trainer``'s training private.

    Args:
        max_grad_norm: Bound C of each sample's gradient.
        noise_multiplier: Standard deviation of the noise over C; or give ``epsilon``.
        epsilon: The budget of the whole training, which needs ``delta``.
        delta: Of the guarantee, less than one over the number of samples.
        samples: As of ``make_private``, and so are the next two.
        sample_rate: In place of ``samples``.
        expected_batch_size: By default ``per_device_train_batch_size *
            gradient_accumulation_steps * world_size``.
        folds: As of ``make_private``, and so is the next one.
        truncated_batch_size: The most samples of a step.
        unit: As of ``make_private``, and so are the next three: with ``user`` the default
            ``expected_batch_size`` counts users, and ``max_batch_size`` samples.
        users: (samples,) the id of the user of each sample of ``train_dataset``.
        samples_of_user: The most samples of a user in a step.
        user_gradient: ``mean`` or ``sum``.
        max_batch_size: Samples at a time, by default ``per_device_train_batch_size``; or ``auto``,
            as of ``make_private``.
        method: ``flash-bk`` (``auto``) or ``flash``, which needs less memory.
        clipping: ``flat``, ``normalised`` or ``psac``, as of ``make_private``.
        stability: As of ``make_private``.
        execution: ``auto`` or ``eager``, as of ``make_private``.
        accountant: ``prv``, ``rdp``, ``pld`` or ``tightest``, as of ``make_private``.
        head: Of causal language models: ``logits``, or ``chunked`` or ``kept`` for
            ``causal_lm_losses``.
        noise: As of ``make_private``, and so are the next two; ``max_steps`` are planned.
        bands: Of correlated noise, at most as many as ``folds``.
        noise_buffers: ``device`` or ``cpu``.
        bound_quantile: As of ``make_private``, and so is the next one.
        second_moment_floor: Of DP-AdamBC.
        loss_scale: Runs the model in float16 by autocast, for GPUs without units for bfloat16, and
            multiplies losses with this power of two for backward (``Clipping``). Samples that
            overflow are left out, and counted in ``Clipping.nonfinite_samples``. Evaluation stays
            in the arguments' dtype.
        public_buffers: As of ``make_private``.
        check: Whether ``losses_of`` is checked on two samples (``Clipping.check``), in one process,
            and the losses of some samples alone compared with those beside others (``company``).
        verify_every: As of ``make_private``.
        sampling_generator: As of ``make_private``.
        noise_generator: As of ``make_private``.
        log_private: Logs what follows from the drawn samples, has no noise, and must not be
            published: losses, quantiles of their gradients' norms, the share that was clipped,
            counts of tokens and operations, times, memory.
        resume: How a run goes on from a checkpoint. ``fresh`` draws samples, noise and dropout
            anew, whatever generators are given. ``exact`` ends with the same bits as a run that was
            not stopped: it needs the secrets of the stopped one, and so writes its own.
        secrets_folder: Of these secrets, not within the output folder; by default beside that, as
            ``<output_dir>_secrets``. From them and a published model the sums of samples follow
            without noise: publish none.
    """

    max_grad_norm: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    samples: int | None = None
    sample_rate: float | None = None
    expected_batch_size: float | None = None
    folds: int = 1
    truncated_batch_size: int | None = None
    unit: str = "sample"
    users: Sequence[int] | None = None
    samples_of_user: int | None = None
    user_gradient: str = "mean"
    max_batch_size: int | Literal["auto"] | None = None
    method: str = "auto"
    clipping: str = "flat"
    stability: float | None = None
    execution: str = "auto"
    accountant: str = "prv"
    head: str = "logits"
    noise: str = "independent"
    bands: int = 1
    noise_buffers: str = "device"
    bound_quantile: float | None = None
    second_moment_floor: float | None = None
    loss_scale: float | None = None
    public_buffers: Collection[str] = ()
    check: bool = True
    verify_every: int | None = None
    sampling_generator: torch.Generator | None = None
    noise_generator: torch.Generator | None = None
    log_private: bool = False
    resume: str = "fresh"
    secrets_folder: str | Path | None = None

    def verify(self) -> None:
        """Refuse settings that are out of their range, or contradict each other.

        Raises:
            ValueError: The first such setting, by name.
        """
        budget = self.noise_multiplier, self.epsilon, self.delta
        verify_budget(*budget, accountant=self.accountant)
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, not {self.method!r}")
        find_factor(self.clipping, self.stability)
        is_correlated_noise(self.noise, self.bands)
        refuse_truncation(self.noise, self.truncated_batch_size)
        refuse_execution(self.execution)
        read_max_batch_size(self.max_batch_size, self.unit)
        if self.head not in ("logits", "chunked", "kept"):
            raise ValueError(f"head must be logits, chunked or kept, and is {self.head!r}")
        if self.loss_scale is not None:
            refuse_loss_scale(self.loss_scale)
        if self.resume not in ("fresh", "exact"):
            raise ValueError(f"resume must be fresh or exact, and is {self.resume!r}")


def refuse_arguments(args: Any, trainer: Any, *, is_sharded: bool) -> None:
    """Refuse what ``Trainer`` offers and a private step cannot have (``ValueError``)."""
    refused = {
        "max_grad_norm": (args.max_grad_norm not in (0.0, 1.0), "PrivacyArguments has the bound"),
        "dataloader_drop_last": (args.dataloader_drop_last, "it leaves samples out"),
        "train_sampling_strategy": (
            args.train_sampling_strategy != "random",
            "samples are drawn by chance alone, not by length or in order",
        ),
        "fp16": (
            args.fp16,
            "its GradScaler skips steps; PrivacyArguments(loss_scale=65536) runs in float16",
        ),
        "bf16": (
            args.bf16 and trainer.privacy.loss_scale is not None,
            "PrivacyArguments.loss_scale runs the model in float16; leave one of them out",
        ),
        "use_liger_kernel": (
            args.use_liger_kernel,
            "its loss joins samples; use PrivacyArguments(head='chunked')",
        ),
        "auto_find_batch_size": (args.auto_find_batch_size, "it repeats steps"),
        "enable_jit_checkpoint": (
            getattr(args, "enable_jit_checkpoint", False),
            "it saves within a batch; save_steps saves after one",
        ),
        "neftune_noise_alpha": (
            args.neftune_noise_alpha is not None,
            "its noise depends on the longest sample of a batch",
        ),
        "deepspeed": (trainer.is_deepspeed_enabled, "it is not supported"),
        "fsdp": (
            bool(args.fsdp) or trainer.is_fsdp_enabled,
            "accelerate would shard the model after it is clipped; call fully_shard before",
        ),
        "save_strategy": (
            is_sharded and args.save_strategy != "no",
            "a sharded model has no checkpoints yet",
        ),
        "PrivacyArguments.head": (
            is_sharded and trainer.privacy.head != "logits",
            "a sharded model computes its logits",
        ),
        "parallelism_config": (args.parallelism_config is not None, "it is not supported"),
        "include_num_input_tokens_seen": (
            args.include_num_input_tokens_seen != "no"
            and (args.world_size > 1 or not trainer.privacy.log_private),
            "it counts drawn tokens; PrivacyArguments(log_private=True) allows it in one process",
        ),
        "debug": (
            DebugOption.UNDERFLOW_OVERFLOW in args.debug and not trainer.privacy.log_private,
            "it prints activations of samples; PrivacyArguments(log_private=True) allows it",
        ),
        "WANDB_WATCH": (
            os.environ.get("WANDB_WATCH") in ("all", "gradients")
            and not trainer.privacy.log_private,
            "it uploads gradients of samples; PrivacyArguments(log_private=True) allows it",
        ),
        "n_gpu": (args.n_gpu > 1, "DataParallel copies the model; show one GPU"),
        "compute_loss_func": (
            trainer.compute_loss_func is not None,
            "it gets sums over the batch; use losses_of",
        ),
    }
    refuse(refused)


def refuse_overrides(kind: Any, mixin: Any) -> None:
    """Refuse methods of a trainer's class that private training would not call (``ValueError``)."""
    why = "training does not call it; use losses_of"
    base: Any = super(mixin, kind)
    is_lost = base.training_step is not Trainer.training_step
    refused = {
        "compute_loss": (kind.compute_loss is not base.compute_loss, why),
        "training_step": (
            is_lost and kind.training_step is mixin.training_step,
            "the class after the mixin overrides it, and training would not call it",
        ),
    }
    kept = {"create_optimizer": mixin, "get_train_dataloader": mixin}
    for name, owner in {**kept, "_get_train_sampler": Trainer}.items():
        is_other = getattr(kind, name) is not getattr(owner, name)
        refused[name] = (is_other, "a subclass overrides it, and a private trainer has its own")
    refuse(refused)


def refuse(refused: dict[str, tuple[Any, str]]) -> None:
    """Refuse the first argument that is set (``ValueError``), by why it may not be."""
    for name, (is_set, why) in refused.items():
        if is_set:
            raise ValueError(f"{name} is not allowed in private training: {why}")
