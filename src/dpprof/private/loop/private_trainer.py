"""``PrivateTrainer``: transformers' ``Trainer``, or any subclass of it, with private steps."""

import copy
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import BatchEncoding, Trainer

from dpprof.private.accounting.accountants import import_accountant
from dpprof.private.accounting.budget import Spent, warn_of_delta
from dpprof.private.accounting.schedule import Sampling
from dpprof.private.engine.factor import find_factor
from dpprof.private.layers.rotary_positions import refuse_positions
from dpprof.private.loop.captured_parts import capture_parts
from dpprof.private.loop.part_size import AUTO, read_max_batch_size
from dpprof.private.loop.poisson_batches import PoissonLoader, refuse_related
from dpprof.private.loop.private_optimizer import PrivateOptimizer
from dpprof.private.loop.private_training import METHODS
from dpprof.private.loop.public_numbers import find_public_numbers
from dpprof.private.loop.second_moment import correct_second_moment
from dpprof.private.loop.secret_files import note_steps, refuse_published
from dpprof.private.loop.trainer_arguments import (
    PrivacyArguments,
    refuse_arguments,
    refuse_overrides,
)
from dpprof.private.loop.trainer_batches import JoinedParts
from dpprof.private.loop.trainer_checkpoints import PrivateCheckpoints
from dpprof.private.loop.trainer_logs import PrivateLogs
from dpprof.private.loop.trainer_losses import PrivateLosses
from dpprof.private.noise.noise_keys import make_generator
from dpprof.private.noise.strategies import Strategy, is_correlated_noise, make_strategy
from dpprof.private.ranks.ranks import Ranks, is_distributed
from dpprof.private.samples.random_state import seed_secretly
from dpprof.private.samples.users import read_users

__all__ = ["PrivacyArguments", "PrivateTrainer", "PrivateTrainerMixin"]
_log = logging.getLogger("dpprof")


class PrivateTrainerMixin(PrivateLosses, PrivateLogs, PrivateCheckpoints):
    """Makes the steps of transformers' ``Trainer``, or of a subclass of it, private.

    A step draws each sample with the probability ``PrivacyArguments.expected_batch_size /
    samples``, and runs ``per_device_train_batch_size`` samples at a time. Each sample's loss is the
    mean over its own labelled tokens. Evaluation, callbacks, schedulers and checkpoints are those
    of ``Trainer``. Training logs the learning rate, the noise multiplier and epsilon, the latter as
    often as its computation takes a hundredth of the time, and at the end. ``log_private`` adds
    what follows from the samples, of rank 0 where there are several. Without it the output folder,
    the state, what callbacks are given to log and what ``train`` returns hold nothing of them, but
    for the weights, the optimizer's averages, and the evaluation, whose data are not protected. The
    times of files, the shapes in errors, and whether a run fails, are not hidden.

    Under ``torchrun`` each rank draws samples of its own, and ``DistributedDataParallel`` runs the
    model, unless ``fully_shard`` sharded it before.

    Args:
        privacy: The settings.
        losses_of: Computes from model and inputs one loss for each sample; None for the
            cross-entropy of the task's logits with ``labels``, if that is ``compute_loss`` of the
            subclass on a batch of one sample.
        inputs, named: As for ``Trainer``.

    Raises:
        ValueError: An argument makes the guarantee false, or is out of its range.

    Formal guarantees: those of ``make_private``.

    Example:
        >>> class PrivateOwnTrainer(PrivateTrainerMixin, OwnTrainer):  # doctest: +SKIP
        ...     pass
    """

    def __init__(
        self,
        *inputs: Any,
        privacy: PrivacyArguments,
        losses_of: Callable[[nn.Module, dict[str, Any]], Tensor] | None = None,
        **named: Any,
    ) -> None:
        self.privacy, self.losses_of = privacy, losses_of
        privacy.verify()
        super().__init__(*inputs, **named)
        refuse_positions(self.model)
        self._is_sharded = any(map(is_distributed, self.model.parameters()))
        refuse_arguments(self.args, self, is_sharded=self._is_sharded)
        refuse_overrides(type(self), PrivateTrainerMixin)
        refuse_related(privacy.sampling_generator, privacy.noise_generator)
        if privacy.secrets_folder is not None:
            refuse_published(privacy.secrets_folder, self.args.output_dir)
        self.is_distributed_loading_by_transformers |= self._is_sharded  # accelerate leaves it so
        self._ranks = Ranks()
        if self.args.world_size > 1:
            self._ranks = Ranks([distributed.group.WORLD], self.args.device)
        self._data_loader: DataLoader[Any] | None = None
        self.spent = Spent(Sampling(0.0), privacy.delta, privacy.accountant)
        self._norms: list[Tensor] = []
        self._accumulation = self.args.gradient_accumulation_steps
        # A step is one element of the loader, and the loader goes on where a checkpoint was saved.
        self.args = copy.copy(self.args)
        self.args.gradient_accumulation_steps = 1
        self.accelerator.gradient_accumulation_steps = 1
        self.args.ignore_data_skip = True

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
        dataset, collate = self.train_dataset, self.get_sample_collator()
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
        owners = read_users(
            *(privacy.unit, privacy.users, privacy.samples_of_user, privacy.user_gradient), dataset
        )
        numbers = find_public_numbers(
            loader,
            samples=privacy.samples,
            sample_rate=privacy.sample_rate,
            expected_batch_size=privacy.expected_batch_size,
            folds=privacy.folds,
            truncated_batch_size=privacy.truncated_batch_size,
            ranks=self._ranks.size,
            users=owners,
        )
        poisson = PoissonLoader(
            loader,
            numbers,
            max_batch_size=read_max_batch_size(privacy.max_batch_size) or part,
            generator=None if self._draws_anew else privacy.sampling_generator,
            rank=self._ranks.rank,
            ranks=self._ranks.size,
            users=owners,
        )
        is_bisr = privacy.noise == "bisr"
        self.spent.sampling = Sampling(1.0, unit=numbers.unit) if is_bisr else numbers.sampling
        warn_of_delta(privacy.delta, numbers.samples, numbers.unit)
        self._data_loader = loader
        self._steps = JoinedParts(poisson, self.args.device if self._is_sharded else None)
        return self._steps

    def get_sample_collator(self) -> Callable[..., Any]:
        """Return what makes a batch of samples: each is a row of every tensor."""
        return self.data_collator  # type: ignore[no-any-return]

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
        if self._steps is None:
            raise RuntimeError(
                "train() makes the optimizer of a private trainer, with clipping and noise around "
                "it; give your own as optimizers=, or optimizer_cls_and_kwargs="
            )
        inner = super().create_optimizer(model)
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
        self._verify_before()
        self.optimizer = PrivateOptimizer(
            inner,
            self._clipping,
            noise_multiplier=self._find_noise(),
            expected_batch_size=self._steps.loader.numbers.expected_batch_size,
            generator=None if self._draws_anew else privacy.noise_generator,
            users=self._steps.loader.users,
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
            self.optimizer, privacy.execution, loader.max_batch_size, loader.numbers
        )
        loader.optimizer = self.optimizer
        self._steps.most = self.state.max_steps
        # Trainer seeded all generators with a number that it saves: dropout would be known.
        generator = None if self._draws_anew else privacy.sampling_generator
        seed_secretly(make_generator(generator, self._ranks.rank))
        return self.optimizer

    def _verify_before(self) -> None:
        """Verify losses, and samples alone and in company, before anything is trained."""
        has_own_loss = super().compute_loss.__func__ is not Trainer.compute_loss
        if self.losses_of is None and (self.privacy.head == "logits" or has_own_loss):
            self._verify_losses()
            for module in self.model.modules() if self._is_sharded else ():
                if hasattr(module, "reshard"):
                    module.reshard()  # the outermost one stays gathered after forward
        elif self.privacy.check and self.losses_of is not None and self._ranks.size == 1:
            self._check_losses()
        self._compare_samples()

    def _find_noise(self) -> float:
        privacy = self.privacy
        if privacy.noise_multiplier is not None:
            return privacy.noise_multiplier
        assert privacy.epsilon is not None
        planned = 1 if privacy.noise == "bisr" else self.state.max_steps
        return self.spent.find_noise(privacy.epsilon, planned)

    def _make_strategy(self, folds: int) -> Strategy | None:
        noise, bands = self.privacy.noise, self.privacy.bands
        if not is_correlated_noise(noise, bands):
            return None
        return make_strategy(noise, steps=self.state.max_steps, bands=bands, folds=folds)

    def train(self, resume_from_checkpoint: Any = None, *inputs: Any, **named: Any) -> Any:
        """Train, as ``Trainer`` does; afterwards model and optimizer are as they were.

        Returns:
            ``TrainOutput``; without ``log_private`` its loss is NaN, and it has no times.
        """
        if self.privacy.log_private:
            _log.warning(
                "log_private logs losses, norms and counts of the drawn samples, without noise: do "
                "not publish them"
            )
        self._draws_anew = bool(resume_from_checkpoint) and self.privacy.resume == "fresh"
        self._remove_secrets()
        try:
            with self._logging_quietly():
                done = super().train(resume_from_checkpoint, *inputs, **named)
            self._remove_secrets()
            note_steps(self.args, self._run, self.state.global_step)
            if self.privacy.log_private:
                return done
            self._leave_out_private(done.metrics)
            return done._replace(training_loss=math.nan)
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
        if hasattr(optimizer, "train"):  # one without a schedule has a mode, as a model has
            optimizer.train()
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

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Leave gradients as they are: each sample's was clipped."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Return none: reading it would change the gradients."""


class PrivateTrainer(PrivateTrainerMixin, Trainer):  # type: ignore[misc]  # it has no types here
    """transformers' ``Trainer`` with private steps: ``PrivateTrainerMixin`` says how.

    Example:
        >>> privacy = PrivacyArguments(max_grad_norm=1.0, epsilon=3.0, delta=1e-5)
        >>> PrivateTrainer(
        ...     model=model, args=args, train_dataset=data, privacy=privacy
        ... ).train()  # doctest: +SKIP
    """
