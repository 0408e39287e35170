"""``PrivateTrainer``: transformers' ``Trainer`` with private steps."""

import copy
import math
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import BatchEncoding, Trainer
from transformers.debug_utils import DebugOption
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dpprof.private.accounting.accountants import import_accountant
from dpprof.private.accounting.budget import (
    Spent,
    find_noise,
    verify_budget,
    warn_of_delta,
)
from dpprof.private.accounting.schedule import Sampling
from dpprof.private.engine.factor import find_factor
from dpprof.private.layers.causal_lm import causal_lm_losses, evaluated, is_same_loss
from dpprof.private.layers.rotary_positions import refuse_positions
from dpprof.private.layers.sample_losses import sample_losses, shift_labels
from dpprof.private.loop.captured_parts import Part, capture_parts, refuse_execution
from dpprof.private.loop.method_choice import FirstBatch
from dpprof.private.loop.part_size import AUTO, find_max_batch_size, read_max_batch_size
from dpprof.private.loop.poisson_batches import PoissonLoader, refuse_related
from dpprof.private.loop.private_optimizer import PrivateOptimizer
from dpprof.private.loop.private_training import METHODS, refuse_truncation
from dpprof.private.loop.public_numbers import find_public_numbers
from dpprof.private.loop.second_moment import correct_second_moment
from dpprof.private.loop.secret_files import (
    find_checkpoints,
    find_secrets,
    join_secrets,
    read_secrets,
    refuse_later_checkpoints,
    refuse_published,
    split_secrets,
    writing_secrets,
)
from dpprof.private.noise.strategies import Strategy, is_correlated_noise, make_strategy
from dpprof.private.number_formats import refuse_loss_scale
from dpprof.private.ranks.ranks import Ranks, is_distributed
from dpprof.private.samples.batches import move
from dpprof.private.samples.random_state import random_state_kept
from dpprof.private.samples.repeated_checks import RepeatedChecks

_QUANTILES = (0.1, 0.5, 0.9)

_PUBLIC_LOGS = {"learning_rate", "epoch", "epsilon", "noise_multiplier"}
"""What training logs that does not follow from samples."""

_OF_PACKING = {
    *("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_q", "cu_seqlens_k", "seq_idx", "seq_lengths"),
}
"""What collators give that pack samples."""

_LOOKED_AT = 64
"""Samples among which one with labels is looked for."""

_UNPACKED = "give each sample a row of its own, padded (packing=False, padding_free=False)"


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
        sampling_generator: Draws the samples; by default the operating system seeds one.
        noise_generator: Draws the noise; likewise.
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


class _Steps:
    """Joins the parts of a batch: a ``Trainer`` takes one step for each element.

    Args:
        loader: Hands out parts. It may be ahead of the steps taken, where a state is not to be
            saved.
        device: None where ranks do not wait for each other; otherwise of the tensor by which they
            agree on the number of parts.
    """

    def __init__(self, loader: PoissonLoader, device: torch.device | None) -> None:
        self.loader = loader
        self.dataset = range(loader.numbers.samples)  # whose length the Trainer asks for
        self._device = device
        self.handed = 0
        """Batches that were handed out; and those before this run."""

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        parts: list[tuple[Any, Part]] = []
        for batch, part in self.loader.parts():
            parts.append((batch, part))
            if part.is_last:
                self.handed += 1
                yield {"parts": parts if self._device is None else self._fill_up(parts)}
                parts = []

    def _fill_up(self, parts: list[tuple[Any, Part]]) -> list[tuple[Any, Part]]:
        """Add parts without samples, until there are as many as on the rank with the most."""
        most = torch.tensor(len(parts), device=self._device)
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        batch, part = parts[-1]
        filled = parts + [(batch, part._replace(is_empty=True))] * (int(most) - len(parts))
        return [(b, p._replace(is_last=at == len(filled))) for at, (b, p) in enumerate(filled, 1)]


class PrivateTrainer(Trainer):  # type: ignore[misc]  # transformers has no types here
    """A ``Trainer`` whose steps are private.

    A step draws each sample with the probability
    ``PrivacyArguments.expected_batch_size / samples``, and runs ``per_device_train_batch_size``
    samples at a time. Each sample's loss is the mean over its own
    labelled tokens. Evaluation, callbacks, schedulers and checkpoints are those of ``Trainer``.
    Training logs the learning rate, the noise multiplier and epsilon, the latter as often as its
    computation takes a hundredth of the time, and at the end. ``log_private`` adds what follows
    from the samples, of rank 0 where there are several. Without it the output folder, the state,
    what callbacks are given to log and what ``train`` returns hold nothing of them, but for the
    weights, the optimizer's averages, and the evaluation, whose data are not protected. The times
    of files, the shapes in errors, and whether a run fails, are not hidden.

    Under ``torchrun`` each rank draws samples of its own, and ``DistributedDataParallel`` runs the
    model, unless ``fully_shard`` sharded it before.

    Args:
        privacy: The settings.
        losses_of: Computes from model and inputs one loss for each sample; None for the
            cross-entropy of the task's logits with ``labels``.
        inputs, named: As for ``Trainer``.

    Raises:
        ValueError: An argument makes the guarantee false, or is out of its range.

    Formal guarantees: those of ``make_private``.

    Example:
        >>> privacy = PrivacyArguments(max_grad_norm=1.0, epsilon=3.0, delta=1e-5)
        >>> PrivateTrainer(
        ...     model=model, args=args, train_dataset=data, privacy=privacy
        ... ).train()  # doctest: +SKIP
    """

    optimizer: Any
    args: Any

    def __init__(
        self,
        *inputs: Any,
        privacy: PrivacyArguments,
        losses_of: Callable[[nn.Module, dict[str, Any]], Tensor] | None = None,
        **named: Any,
    ) -> None:
        self.privacy, self.losses_of = privacy, losses_of
        verify_budget(
            *(privacy.noise_multiplier, privacy.epsilon, privacy.delta),
            accountant=privacy.accountant,
        )
        if privacy.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, not {privacy.method!r}")
        find_factor(privacy.clipping, privacy.stability)
        is_correlated_noise(privacy.noise, privacy.bands)
        refuse_truncation(privacy.noise, privacy.truncated_batch_size)
        refuse_execution(privacy.execution)
        read_max_batch_size(privacy.max_batch_size)
        if privacy.head not in ("logits", "chunked", "kept"):
            raise ValueError(f"head must be logits, chunked or kept, and is {privacy.head!r}")
        if privacy.loss_scale is not None:
            refuse_loss_scale(privacy.loss_scale)
        if privacy.resume not in ("fresh", "exact"):
            raise ValueError(f"resume must be fresh or exact, and is {privacy.resume!r}")
        super().__init__(*inputs, **named)
        refuse_positions(self.model)
        self._is_sharded = any(map(is_distributed, self.model.parameters()))
        refuse_arguments(self.args, self, is_sharded=self._is_sharded)
        refuse_related(privacy.sampling_generator, privacy.noise_generator)
        if privacy.secrets_folder is not None:
            refuse_published(privacy.secrets_folder, self.args.output_dir)
        self._draws_anew = self._is_evaluating = False
        self._checkpoints: set[Path] = set()
        self.is_distributed_loading_by_transformers |= self._is_sharded  # accelerate leaves it so
        self._ranks = Ranks()
        if self.args.world_size > 1:
            self._ranks = Ranks([distributed.group.WORLD], self.args.device)
        self._steps: _Steps | None = None
        self._data_loader: DataLoader[Any] | None = None
        self._clipping: Any = None
        self.spent = Spent(Sampling(0.0), privacy.delta, privacy.accountant)
        self._norms: list[Tensor] = []
        self._told_at = self._telling_took_s = 0.0
        """When epsilon was logged last, and how long its computation took."""

        self._flops_of_token: int | None = None
        self._accumulation = self.args.gradient_accumulation_steps
        # A step is one element of the loader, and the loader goes on where a checkpoint was saved.
        self.args = copy.copy(self.args)
        self.args.gradient_accumulation_steps = 1
        self.accelerator.gradient_accumulation_steps = 1
        self.args.ignore_data_skip = True

    @property
    def private_optimizer(self) -> PrivateOptimizer:
        """The optimizer that adds the noise."""
        optimizer: Any = self.optimizer
        while not isinstance(optimizer, PrivateOptimizer):
            optimizer = optimizer.optimizer
        return optimizer

    @property
    def guarantee(self) -> str:
        """What is guaranteed, with the numbers that everybody may know; once training began."""
        if self._steps is None or self._clipping is None:
            raise RuntimeError("nothing is private yet: train() makes clipping, noise and batches")
        return self._steps.loader.numbers.describe(self.private_optimizer)

    def get_train_dataloader(self) -> Any:
        """Return the loader of Poisson batches, each in parts; in training always the same."""
        if self._clipping is not None:
            return self._steps
        dataset, collate = self.train_dataset, self.data_collator
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise ValueError(
                "PrivateTrainer needs a train_dataset with a length and samples by index"
            )
        if hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        part = self.args.per_device_train_batch_size
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=part * self._accumulation * self._ranks.size,
            shuffle=True,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )
        privacy = self.privacy
        numbers = find_public_numbers(
            loader,
            samples=privacy.samples,
            sample_rate=privacy.sample_rate,
            expected_batch_size=privacy.expected_batch_size,
            folds=privacy.folds,
            truncated_batch_size=privacy.truncated_batch_size,
            ranks=self._ranks.size,
        )
        poisson = PoissonLoader(
            loader,
            numbers,
            max_batch_size=read_max_batch_size(privacy.max_batch_size) or part,
            generator=None if self._draws_anew else privacy.sampling_generator,
            rank=self._ranks.rank,
            ranks=self._ranks.size,
        )
        self.spent.sampling = Sampling(1.0) if privacy.noise == "bisr" else numbers.sampling
        warn_of_delta(privacy.delta, numbers.samples)
        self._data_loader = loader
        self._steps = _Steps(poisson, self.args.device if self._is_sharded else None)
        return self._steps

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the optimizer, and put clipping and noise around it.

        Raises:
            RuntimeError: ``train`` was called before.
        """
        if self._clipping is not None:
            raise RuntimeError(
                "this PrivateTrainer trained before, and what it spent would not be counted; make "
                "a new one, which may resume from a checkpoint"
            )
        inner = super().create_optimizer(model)
        assert self._steps is not None
        privacy = self.privacy
        if privacy.delta is not None:
            import_accountant(privacy.accountant)  # epsilon will be logged
        if self._ranks.size > 1 and not self._is_sharded:
            # Here, and not by accelerate, so that the clipping knows it.
            self.model_wrapped: nn.Module = DistributedDataParallel(self.model)
        self._clipping = METHODS[privacy.method](
            self.model_wrapped,
            privacy.max_grad_norm,
            **find_factor(privacy.clipping, privacy.stability),
            loss_scale=privacy.loss_scale or 1.0,
            public_buffers=privacy.public_buffers,
        )
        if self.losses_of is None and privacy.head == "logits":
            self._verify_losses()
            for module in self.model.modules() if self._is_sharded else ():
                if hasattr(module, "reshard"):
                    module.reshard()  # the outermost one stays gathered after forward
        elif privacy.check and self.losses_of is not None and self._ranks.size == 1:
            self._check_losses()
        self._compare_samples()
        self.optimizer = PrivateOptimizer(
            inner,
            self._clipping,
            noise_multiplier=self._find_noise(),
            expected_batch_size=self._steps.loader.numbers.expected_batch_size,
            generator=None if self._draws_anew else privacy.noise_generator,
            strategy=self._make_strategy(self._steps.loader.folds),
            noise_buffers=privacy.noise_buffers,
            bound_quantile=privacy.bound_quantile,
        )
        correct_second_moment(self.optimizer, privacy.second_moment_floor)
        self.optimizer.planned_steps = None if privacy.epsilon is None else self.state.max_steps
        self.optimizer.spent = self.spent
        loader = self._steps.loader
        if privacy.max_batch_size == AUTO:
            self._find_max_batch_size(inner, loader)
        self.optimizer.captured = capture_parts(
            *(self.optimizer, privacy.execution, loader.max_batch_size),
            loader.numbers.largest_of_rank,
        )
        loader.optimizer = self.optimizer
        return self.optimizer

    def _find_noise(self) -> float:
        privacy = self.privacy
        if privacy.noise_multiplier is not None:
            return privacy.noise_multiplier
        assert privacy.epsilon is not None
        assert privacy.delta is not None
        planned = 1 if privacy.noise == "bisr" else self.state.max_steps
        budget = (privacy.epsilon, privacy.delta, planned)
        return find_noise(*budget, self.spent.sampling, privacy.accountant)

    def _make_strategy(self, folds: int) -> Strategy | None:
        noise, bands = self.privacy.noise, self.privacy.bands
        if not is_correlated_noise(noise, bands):
            return None
        return make_strategy(noise, steps=self.state.max_steps, bands=bands, folds=folds)

    def _check_losses(self) -> None:
        """Compare the clipped gradient of the first two samples with those of each alone."""
        assert self._steps is not None
        if self._steps.loader.samples < 2:  # noqa: PLR2004 (one shows nothing)
            return
        with random_state_kept():  # a collator may draw
            inputs = self._prepare_inputs(self._steps.loader.load(range(2)))
        self._clipping.check(partial(self.compute_sample_losses, self.model), inputs)

    def _find_max_batch_size(self, optimizer: Optimizer, loader: PoissonLoader) -> None:
        if self._ranks.size > 1:
            raise ValueError("on several ranks max_batch_size must be a number, and is 'auto'")
        count = min(loader.samples, self.args.per_device_train_batch_size)
        with random_state_kept():  # a collator may draw
            inputs = self._prepare_inputs(loader.load(range(count)))
        first = FirstBatch(partial(self.compute_sample_losses, self.model), [inputs], count)
        expected = loader.numbers.expected_batch_size
        loader.max_batch_size = find_max_batch_size(self._clipping, optimizer, first, expected)

    def _compare_samples(self) -> None:
        """Compare samples alone and in company, now and at random steps."""
        assert self._data_loader is not None
        collate = self._data_loader.collate_fn
        checks = RepeatedChecks(
            self._clipping,
            lambda inputs: self.compute_sample_losses(self.model, inputs),
            self._data_loader.dataset,
            lambda samples: self._prepare_inputs(collate(samples)),
            most=self.args.per_device_train_batch_size,
            every=self.privacy.verify_every,
        )
        if self.privacy.check and not self._is_sharded:
            if not self.model.training:  # as a step does
                self.model.train()
            checks.compare_first()

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Move tensors to the device, also those inside of objects."""
        if isinstance(inputs, Mapping) and not inputs:
            return super()._prepare_inputs(inputs)  # refuses it
        return move(inputs, self.args.device)

    @torch.no_grad()
    def _verify_losses(self) -> None:
        """Compare the loss of the first sample that has one with the model's own, in ``eval()``.

        Raises:
            ValueError: It is another one.
        """
        assert self._steps is not None
        loader = self._steps.loader
        for at in range(min(loader.samples, _LOOKED_AT)):
            inputs = self._prepare_inputs(loader.load(range(at, at + 1)))
            with evaluated(self.model), self._autocast():
                losses = self._losses_of_labels(self.model, dict(inputs), smoothing=0.0)
                expected = getattr(self.model(**inputs), "loss", None) if losses else None
                if not losses:  # nothing is labelled
                    continue
                if expected is None or not is_same_loss(self.model, losses[0], expected):
                    raise ValueError(
                        f"{type(self.model).__name__} computes its loss otherwise than as the "
                        "cross-entropy of its logits with labels; give PrivateTrainer losses_of"
                    )
            return

    def train(self, resume_from_checkpoint: Any = None, *inputs: Any, **named: Any) -> Any:
        """Train, as ``Trainer`` does; afterwards model and optimizer are as they were.

        Returns:
            ``TrainOutput``; without ``log_private`` its loss is NaN, and it has no times.
        """
        self._draws_anew = bool(resume_from_checkpoint) and self.privacy.resume == "fresh"
        self._remove_secrets()
        try:
            done = super().train(resume_from_checkpoint, *inputs, **named)
            self._remove_secrets()
            return done if self.privacy.log_private else done._replace(training_loss=math.nan)
        finally:
            if self._clipping is not None:
                self._clipping.remove()
            if self._steps is not None and self._steps.loader.optimizer is not None:
                self._steps.loader.optimizer.remove()

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Any = None,  # noqa: ARG002 (each sample has its own mean)
    ) -> Tensor:
        """Clip and add up the gradients of a batch, part by part; return the mean loss.

        Without ``log_private`` the loss is 0.
        """
        if not model.training:  # a layer that was frozen in eval() stays so
            model.train()
        optimizer = self.private_optimizer
        total = torch.zeros((), dtype=torch.float32, device=self.args.device)
        samples = 0
        for batch, part in inputs["parts"]:
            optimizer.take_part(part)
            tensors = self._prepare_inputs(batch)
            is_encoding = isinstance(tensors, BatchEncoding)  # of which a graph sees no tensors
            compute = type(self).compute_sample_losses  # unbound: what self counts is no setting
            losses_of = partial(compute, self, model, is_encoding=is_encoding)
            losses = optimizer.backward(losses_of, dict(tensors) if is_encoding else tensors)
            if self.privacy.log_private and not part.is_empty:
                total += losses.sum()
                samples += len(losses)
                norms_B = optimizer.clipping.sample_norms
                if norms_B is not None and self.args.logging_strategy != "no":
                    self._norms.append(norms_B)  # until they are logged
            if not part.is_last:
                optimizer.step()  # which only adds up
                optimizer.zero_grad()
        return total / max(1, samples)

    def compute_sample_losses(
        self, model: nn.Module, inputs: Any, *, is_encoding: bool = False
    ) -> Tensor:
        """Compute one loss for each sample, by autocast where ``bf16`` or a scale is set; (B,)."""
        if is_encoding:
            inputs = BatchEncoding(inputs)
        if isinstance(inputs, Mapping):
            _refuse_packed(inputs)
        with self._autocast():
            if self.losses_of is not None:
                return self.losses_of(model, inputs)
            if not isinstance(inputs, Mapping):
                raise TypeError(
                    f"the inputs are a {type(inputs).__name__}, and no dictionary with labels; "
                    "give PrivateTrainer losses_of"
                )
            _refuse_left_padding(inputs)
            smoothing = self.args.label_smoothing_factor
            return self._losses_of_labels(model, dict(inputs), smoothing).float()

    def _autocast(self) -> torch.autocast:
        scaled = self.privacy.loss_scale is not None
        dtype = torch.float16 if scaled else torch.bfloat16
        return torch.autocast(self.args.device.type, dtype, enabled=scaled or self.args.bf16)

    def _losses_of_labels(
        self, model: nn.Module, inputs: dict[str, Any], smoothing: float
    ) -> Tensor:
        labels = inputs.pop("labels", None)
        if labels is None:
            raise ValueError("the inputs have no labels; give PrivateTrainer losses_of")
        is_causal = _is_causal(self.model)
        if self.privacy.head != "logits":
            if not is_causal:
                raise ValueError(f"head {self.privacy.head} is for causal language models alone")
            keep = self.privacy.head == "kept"
            options = {"keep": keep, "label_smoothing": smoothing, **inputs}
            return causal_lm_losses(model, options.pop("input_ids"), labels, **options)
        if getattr(self.model.config, "is_encoder_decoder", False):
            prepare = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
            if prepare is not None and "decoder_input_ids" not in inputs:
                inputs["decoder_input_ids"] = prepare(labels=labels)
        logits = model(**inputs).logits
        return read_losses(logits, labels, shifts=is_causal, smoothing=smoothing)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Multiply those of one token, which take long to find, by the tokens of all parts.

        Without ``log_private`` they are 0.
        """
        if not self.privacy.log_private:
            return 0
        main = getattr(self.model, "main_input_name", "input_ids")
        if self._flops_of_token is None:
            token = {main: torch.empty(1, device="meta")}
            self._flops_of_token = int(super().floating_point_ops(token))
        parts = [part for part, _ in inputs["parts"] if isinstance(part, Mapping)]
        tokens: int = sum(part[main].numel() for part in parts if main in part)
        return self._flops_of_token * tokens

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        for part, _ in inputs["parts"]:
            super()._track_num_input_tokens(part)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Leave gradients as they are: each sample's was clipped."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Return none: reading it would change the gradients."""

    def evaluate(self, *inputs: Any, **named: Any) -> Any:
        """Evaluate as ``Trainer`` does: what follows from these samples is logged."""
        self._is_evaluating = True
        try:
            return super().evaluate(*inputs, **named)
        finally:
            self._is_evaluating = False

    def log(self, logs: dict[str, float], *inputs: Any, **named: Any) -> None:
        """Log what was spent; in training without ``log_private`` leave out all that is private."""
        if "loss" in logs:
            logs |= self._describe_norms()
            logs["noise_multiplier"] = self.private_optimizer.noise_multiplier
            if self._epsilon_is_due():
                start = time.monotonic()
                epsilon = self.spent.epsilon()
                up = math.ceil(epsilon * 1e4) / 1e4 if math.isfinite(epsilon) else epsilon
                logs["epsilon"] = up
                self._told_at = time.monotonic()
                self._telling_took_s = self._told_at - start
        if self.is_in_train and not (self._is_evaluating or self.privacy.log_private):
            for name in logs.keys() - _PUBLIC_LOGS:  # also from the metrics that train returns
                del logs[name]
        super().log(logs, *inputs, **named)

    def _epsilon_is_due(self) -> bool:
        """Tell whether to compute epsilon: at the end, and before as long as that costs 1 %."""
        if self.privacy.delta is None or not self.spent.history:
            return False
        is_last = self.state.global_step >= self.state.max_steps
        return is_last or time.monotonic() - self._told_at >= 100 * self._telling_took_s

    def _describe_norms(self) -> dict[str, float]:
        if not self._norms:
            return {}
        norms = torch.cat([norms_B.float().cpu() for norms_B in self._norms])
        self._norms.clear()
        finite = norms[norms.isfinite()]
        if not len(finite):
            return {}
        quantiles = torch.quantile(finite, finite.new_tensor(_QUANTILES)).tolist()
        names = (f"sample_norm_{round(100 * share)}%" for share in _QUANTILES)
        described = dict(zip(names, quantiles, strict=True))
        if self.privacy.clipping == "flat":  # normalised clipping scales every sample
            described["clipped_share"] = float((finite > self.privacy.max_grad_norm).float().mean())
        return described

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self._remove_secrets()

    def _remove_secrets(self) -> None:
        """Remove the secrets of checkpoints that were there before, and were removed since."""
        if self.privacy.resume == "exact" and self.args.should_save:
            present = set(find_checkpoints(self.args.output_dir))
            for removed in self._checkpoints - present:
                shutil.rmtree(self._secrets_of(removed), ignore_errors=True)
            self._checkpoints = present

    def _state(self) -> dict[str, Any]:
        """Return what this rank has beside the optimizer's state, with its secrets."""
        assert self._steps is not None
        return {
            "loader": self._steps.loader.state_dict(),
            "privacy": self.private_optimizer.state_dict()["privacy"],
        }

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self._steps is not None
        if self._steps.handed != self.private_optimizer.steps:
            raise RuntimeError(
                "a checkpoint can be saved after a step alone, and here a batch was drawn whose "
                "step was not taken: a resumed run would add its noise to other samples"
            )
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)  # rank 0 may not have come so far
        public, secrets = split_secrets(self._state())
        secrets["name"] = public["name of secrets"] = uuid.uuid4().hex
        torch.save(public, folder / self._name_of_rank("private", "pt"))
        if self.args.should_save:
            inner = self.private_optimizer.original_optimizer
            torch.save(inner.state_dict(), folder / "optimizer.pt")
            torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")
        self._secrets = secrets

    def _secrets_of(self, checkpoint: str | Path) -> Path:
        return find_secrets(checkpoint, self.privacy.secrets_folder)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the states of all generators apart from the checkpoint, if they are needed."""
        if self.privacy.resume == "exact":
            folder = self._secrets_of(output_dir)
            refuse_published(folder, self.args.output_dir)
            with writing_secrets(folder):
                super()._save_rng_state(str(folder))
                torch.save(self._secrets, folder / self._name_of_rank("secrets", "pt"))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self.privacy.resume == "exact":
            super()._load_rng_state(str(self._secrets_of(checkpoint)))
            return
        torch.seed()
        random.seed()
        np.random.seed()  # noqa: NPY002 (the generator that Trainer seeds, too)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load all that a resumed run needs, or refuse: it would repeat noise on other samples."""
        if checkpoint is None:
            return
        logs = set().union(*self.state.log_history)
        if logs & {"loss", "train_loss"} and not self.privacy.log_private:
            raise ValueError(
                f"the trainer_state.json of {checkpoint} has private logs, which later checkpoints "
                "would repeat; give PrivacyArguments(log_private=True), or empty its log_history"
            )
        own = self._name_of_rank("private", "pt")
        for name in (own, "optimizer.pt", "scheduler.pt"):
            if not Path(checkpoint, name).exists():
                raise ValueError(
                    f"{checkpoint} has no {name}: it was saved by another Trainer, or not to the "
                    "end, and to resume from it would draw samples and noise that its accountant "
                    "does not know"
                )
        state, optimizer, scheduler = (
            torch.load(Path(checkpoint, name), map_location="cpu", weights_only=True)
            for name in (own, "optimizer.pt", "scheduler.pt")
        )
        name, exact = state.pop("name of secrets", None), self.privacy.resume == "exact"
        if exact:
            path = self._secrets_of(checkpoint) / self._name_of_rank("secrets", "pt")
            state = join_secrets(state, read_secrets(path, checkpoint, name))
        whole = optimizer | {"privacy": state["privacy"]}
        self.private_optimizer.load_state_dict(whole, exact=exact, with_samples=True)
        self.lr_scheduler.load_state_dict(scheduler)
        assert self._steps is not None
        self._steps.loader.load_state_dict(state["loader"], exact=exact)
        self._steps.handed = self.private_optimizer.steps
        if self.private_optimizer.steps != self.state.global_step:
            raise ValueError(
                f"{checkpoint} is of {self.private_optimizer.steps:,} private steps, and its "
                f"trainer_state.json of {self.state.global_step:,}; resume from another checkpoint"
            )
        if self._draws_anew:
            refuse_later_checkpoints(checkpoint, self.state.global_step)

    def _name_of_rank(self, stem: str, suffix: str) -> str:
        """Name a file that each of several ranks has, as ``Trainer`` does."""
        rank = f"_{self._ranks.rank}" if self._ranks.size > 1 else ""
        return f"{stem}{rank}.{suffix}"


def read_losses(logits: Tensor, labels: Tensor, *, shifts: bool, smoothing: float = 0.0) -> Tensor:
    """Compute each sample's mean cross-entropy over its own labelled tokens; (B,).

    Args:
        logits: (B, V), or (B, T, V).
        labels: (B,) or (B, T) ids, -100 for tokens without a loss.
        shifts: Whether a token's logits predict the next one.
        smoothing: The share of the target that all ids have alike.

    Raises:
        ValueError: The labels are no ids, or their shape is another one.
    """
    is_other = labels.shape != logits.shape[:-1] or labels.is_floating_point()
    if is_other or logits.shape[-1] == 1:  # one output is a regression's
        raise ValueError(
            f"labels must be ids of shape {tuple(logits.shape[:-1])}, and are "
            f"{tuple(labels.shape)} {labels.dtype}; give PrivateTrainer losses_of"
        )
    labels = shift_labels(labels) if shifts else labels
    return sample_losses(logits.float(), labels, label_smoothing=smoothing)


def _is_causal(model: nn.Module) -> bool:
    base = getattr(model, "get_base_model", None)
    inner = model if base is None else base()
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(kind.__name__ in causal for kind in type(inner).__mro__)


def _refuse_left_padding(inputs: Mapping[str, Any]) -> None:
    """Refuse samples whose positions would begin after the padding, as long as the longest says.

    Raises:
        ValueError: There are some.
    """
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or "position_ids" in inputs:  # noqa: PLR2004
        return
    if (mask[:, :1] == 0).any():
        raise ValueError(
            "attention_mask begins with padding, so that a sample's positions depend on the "
            "longest one beside it; pad on the right, or give position_ids"
        )


def _refuse_packed(inputs: Mapping[str, Any]) -> None:
    """Refuse rows that hold several samples: a row would count as one, and share its bound.

    Raises:
        ValueError: There are some.
    """
    names = _OF_PACKING & set(inputs)
    if names:
        raise ValueError(f"{min(names)} is of packed samples; {_UNPACKED}")
    positions = inputs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() < 2:  # noqa: PLR2004
        return
    positions = positions.reshape(-1, *positions.shape[-2:])[0]  # (3, B, T) for images among text
    mask = inputs.get("attention_mask")
    is_token = torch.ones_like(positions) if mask is None or mask.dim() != 2 else mask  # noqa: PLR2004
    is_pair = (is_token[:, 1:] != 0) & (is_token[:, :-1] != 0)
    if (is_pair & (positions[:, 1:] <= positions[:, :-1])).any():
        raise ValueError(f"position_ids begin again within a row of packed samples; {_UNPACKED}")


def refuse_arguments(args: Any, trainer: Any, *, is_sharded: bool) -> None:
    """Refuse what ``Trainer`` offers and a private step cannot have.

    Raises:
        ValueError: The first such argument, by name.
    """
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
        "compute_loss": (
            type(trainer).compute_loss is not Trainer.compute_loss,
            "training does not call it; use losses_of",
        ),
    }
    kept = {"create_optimizer": PrivateTrainer, "get_train_dataloader": PrivateTrainer}
    for name, owner in {**kept, "_get_train_sampler": Trainer}.items():
        is_other = getattr(type(trainer), name) is not getattr(owner, name)
        refused[name] = (is_other, "a subclass overrides it, and PrivateTrainer has its own")
    for name, (is_set, why) in refused.items():
        if is_set:
            raise ValueError(f"{name} is not allowed in private training: {why}")
