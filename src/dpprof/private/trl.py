"""TRL's trainers with private steps: supervised fine-tuning, and preferences."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from trl import DPOTrainer, SFTTrainer
from trl.trainer.utils import use_adapter

from dpprof.private.layers.sample_losses import UNLABELLED
from dpprof.private.loop.private_trainer import PrivateTrainerMixin
from dpprof.private.loop.trainer_arguments import PrivacyArguments, refuse
from dpprof.private.samples.random_state import random_state_kept

_PAIRS: dict[str, Callable[..., Tensor]] = {
    "sigmoid": lambda chosen, rejected, _, beta: -logsigmoid(beta * (chosen - rejected)),
    "hinge": lambda chosen, rejected, _, beta: torch.relu(1 - beta * (chosen - rejected)),
    "ipo": lambda chosen, rejected, lengths, beta: (
        chosen / lengths[0] - rejected / lengths[1] - 1 / (2 * beta)
    ).square(),
}
"""The losses of pairs, of log ratios (B,), lengths (2, B) and beta, by TRL's names."""

_PACKS = "support_avx512bf16_for_cpu"  # by which a layer of 4 bits packs its weight, for inference


class _TrlMixin(PrivateTrainerMixin):
    """What TRL's trainers have alike: what they log of a batch, and what is refused."""

    _metrics: dict[str, Any]

    def __init__(self, *inputs: Any, **named: Any) -> None:
        super().__init__(*inputs, **named)
        packs = "it joins samples in a row, which would count as one"
        refused = {
            "packing": (getattr(self.args, "packing", False), packs),
            "padding_free": (self.args.padding_free, packs),
            "activation_offloading": (self.args.activation_offloading, "it is not supported"),
            "router_aux_loss_coef": (
                self.aux_loss_enabled,
                "the loss of a router joins samples; give router_aux_loss_coef=0.0",
            ),
            "a data set of images": (self._is_vision_dataset, "it is not supported"),
            "shuffle_dataset": (
                getattr(self.args, "shuffle_dataset", False)
                and (self.privacy.folds > 1 or self.privacy.unit == "user"),
                "folds and users go by the place of a sample in the data",
            ),
        }
        refuse(refused)

    def compute_batch_loss(self, inputs: dict[str, Any]) -> Any:
        """Compute the mean loss of a batch as TRL does."""
        try:
            return super().compute_batch_loss(inputs)
        finally:
            self._metrics["eval"].clear()  # else they would be logged with those of an evaluation

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *others: Any) -> Tensor:
        """Take a private step; with ``log_private`` add up what TRL logs, in a pass of its own."""
        loss = super().training_step(model, inputs, *others)
        if self.privacy.log_private and self._ranks.size == 1:  # ranks have other numbers of parts
            with torch.no_grad(), random_state_kept(), self._autocast():
                for batch, part in inputs["parts"]:
                    if not part.is_empty:
                        self.compute_batch_loss(dict(self._prepare_inputs(batch)))
        return loss


class PrivateSFTTrainer(_TrlMixin, SFTTrainer):  # type: ignore[misc]  # TRL has no types here
    """TRL's ``SFTTrainer`` with private steps: supervised fine-tuning of a language model.

    Each sample's loss is the mean over its own labelled tokens: those of its completion, of the
    assistant, or all, as ``SFTConfig`` says. TRL prepares the data, adapters and bases of 4 bits.
    Entropy and accuracy are not logged in training, unless ``log_private`` asks for them in one
    process.

    Args:
        privacy: The settings.
        inputs, named: As for ``SFTTrainer``, and ``losses_of`` as for ``PrivateTrainer``.

    Raises:
        ValueError: An argument makes the guarantee false, or is out of its range.

    Formal guarantees: those of ``make_private``; a row of the prepared data set is one sample.

    Example:
        >>> privacy = PrivacyArguments(max_grad_norm=1.0, epsilon=3.0, delta=1e-5)
        >>> PrivateSFTTrainer(
        ...     model, SFTConfig("out"), train_dataset=data, privacy=privacy
        ... ).train()  # doctest: +SKIP
    """

    def __init__(self, *inputs: Any, **named: Any) -> None:
        super().__init__(*inputs, **named)
        refuse({"loss_type": (self.args.loss_type != "nll", "nll alone is supported")})


class PrivateDPOTrainer(_TrlMixin, DPOTrainer):  # type: ignore[misc]  # TRL has no types here
    """TRL's ``DPOTrainer`` with private steps: a pair of completions is one sample.

    Losses are ``sigmoid``, ``hinge`` and ``ipo``. What the reference model says of a pair follows
    from that pair alone. Rewards, accuracies and entropy are not logged in training, unless
    ``log_private`` asks for them. Steps are not run as CUDA graphs.

    Args:
        privacy: The settings.
        inputs, named: As for ``DPOTrainer``, and ``losses_of`` as for ``PrivateTrainer``, which
            gets ``input_ids`` of (B, 2, T): chosen and rejected.

    Raises:
        ValueError: An argument makes the guarantee false, or is out of its range.

    Formal guarantees: those of ``make_private``, for pairs.

    Example:
        >>> privacy = PrivacyArguments(max_grad_norm=1.0, epsilon=3.0, delta=1e-5)
        >>> PrivateDPOTrainer(
        ...     model, args=DPOConfig("out"), train_dataset=pairs, privacy=privacy
        ... ).train()  # doctest: +SKIP
    """

    def __init__(self, *inputs: Any, privacy: PrivacyArguments, **named: Any) -> None:
        super().__init__(*inputs, privacy=replace(privacy, execution="eager"), **named)
        for layer in self.model.modules():  # a reference that packs its weights takes the base's
            if hasattr(layer, _PACKS):
                setattr(layer, _PACKS, False)
        args = self.args
        joins = len(args.loss_type) > 1 or args.loss_type[0] not in _PAIRS
        refused = {
            "loss_type": (joins, f"one of {', '.join(_PAIRS)} alone is supported"),
            "f_divergence_type": (args.f_divergence_type != "reverse_kl", "it is not supported"),
            "ld_alpha": (args.ld_alpha is not None, "it is not supported"),
            "use_weighting": (args.use_weighting, "it is not supported"),
            "loss_weights": (args.loss_weights is not None, "it is not supported"),
            "label_smoothing_factor": (args.label_smoothing_factor, "a pair has no labels"),
            "sync_ref_model": (args.sync_ref_model, "a resumed run would have another reference"),
            "several ranks": (args.world_size > 1, "train in one process"),
        }
        refuse(refused)

    def get_sample_collator(self) -> Callable[[list[Any]], dict[str, Any]]:
        """Return what makes a batch of pairs: each is a row of every tensor."""
        collate = super().get_sample_collator()

        def collate_pairs(samples: list[Any]) -> dict[str, Any]:
            # (2B, T), chosen before rejected, becomes (B, 2, T).
            return {
                name: value if name.startswith("ref_") else torch.stack(value.chunk(2), 1)
                for name, value in collate(samples).items()
            }

        return collate_pairs

    def compute_batch_loss(self, inputs: dict[str, Any]) -> Any:
        """Compute the mean loss of pairs, of (B, 2, T), as TRL does of (2B, T)."""
        rows = {
            name: value if name.startswith("ref_") else torch.cat(value.unbind(1))
            for name, value in inputs.items()
        }
        return super().compute_batch_loss(rows)

    def _losses_of_batch(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        names = [name for name in inputs if not name.startswith("ref_")]
        pair = [{name: inputs[name][:, at] for name in names} for at in (0, 1)]
        if self.precompute_ref_logps:
            references = [inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]]
        else:
            with torch.no_grad(), self._reference() as reference:
                references = [self._log_probability(reference, half) for half in pair]
        ratios = [
            self._log_probability(model, half) - before
            for half, before in zip(pair, references, strict=True)
        ]
        lengths = inputs["completion_mask"].sum(2).clamp(min=1).T
        return _PAIRS[self.loss_types[0]](*ratios, lengths, self.beta)

    def _log_probability(self, model: nn.Module, half: dict[str, Any]) -> Tensor:
        """Compute the log probability of each completion; (B,)."""
        rest = dict(half)
        labels: Tensor = rest["input_ids"].masked_fill(rest.pop("completion_mask") == 0, UNLABELLED)
        mean_B = super()._losses_of_batch(model, rest | {"labels": labels})
        return -mean_B * (labels[:, 1:] != UNLABELLED).sum(1)

    @contextmanager
    def _reference(self) -> Iterator[nn.Module]:
        """Yield the reference: a model of its own, or this one without its adapters."""
        if self.ref_model is not None:
            yield self.ref_model
            return
        before = "ref" if "ref" in self.model.peft_config else None
        with use_adapter(self.model, before):
            yield self.model
