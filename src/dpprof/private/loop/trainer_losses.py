"""The losses of a private ``Trainer``: one for each sample, which is the trainer's own."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import BatchEncoding
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dpprof.private.layers.causal_lm import causal_lm_losses, evaluated, is_same_loss
from dpprof.private.layers.sample_losses import UNLABELLED, sample_losses, shift_labels
from dpprof.private.loop.method_choice import FirstBatch
from dpprof.private.loop.part_size import find_max_batch_size
from dpprof.private.loop.poisson_batches import PoissonLoader
from dpprof.private.loop.trainer_base import PrivateBase
from dpprof.private.samples.batches import move
from dpprof.private.samples.random_state import random_state_kept
from dpprof.private.samples.repeated_checks import RepeatedChecks

_OF_PACKING = {
    *("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_q", "cu_seqlens_k", "seq_idx", "seq_lengths"),
}
"""What collators give that pack samples."""

_LOOKED_AT = 64  # samples among which one with labels is looked for

_UNPACKED = "give each sample a row of its own, padded (packing=False, padding_free=False)"


class PrivateLosses(PrivateBase):
    """The part of a private ``Trainer`` that computes losses, and checks them."""

    losses_of: Callable[[nn.Module, dict[str, Any]], Tensor] | None
    _data_loader: DataLoader[Any] | None

    def compute_sample_losses(
        self, model: nn.Module, inputs: Any, *, is_encoding: bool = False
    ) -> Tensor:
        """Compute one loss for each sample, by autocast where ``bf16`` or a scale is set; (B,)."""
        if is_encoding:
            inputs = BatchEncoding(inputs)
        with self._autocast():
            if self.losses_of is not None:
                if isinstance(inputs, Mapping):
                    _refuse_packed(inputs)
                return self.losses_of(model, inputs)
            if not isinstance(inputs, Mapping):
                raise TypeError(
                    f"the inputs are a {type(inputs).__name__}, and no dictionary with labels; "
                    "give PrivateTrainer losses_of"
                )
            return self._losses_of_batch(model, dict(inputs)).float()

    def _autocast(self) -> torch.autocast:
        scaled = self.privacy.loss_scale is not None
        dtype = torch.float16 if scaled else torch.bfloat16
        return torch.autocast(self.args.device.type, dtype, enabled=scaled or self.args.bf16)

    def _losses_of_batch(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Compute the loss of each sample with which the trainer trains; (B,)."""
        _refuse_packed(inputs)
        is_compared = self.privacy.check and not self._is_sharded
        inputs = _number_positions(self.model, inputs, is_compared=is_compared)
        labels, smoothing = inputs.pop("labels", None), self.args.label_smoothing_factor
        if labels is None:
            raise ValueError("the inputs have no labels; give PrivateTrainer losses_of")
        is_causal = is_causal_lm(self.model)
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
        outputs = model(**inputs)
        logits = outputs.logits if hasattr(outputs, "logits") else outputs[0]
        if _is_prompted(self.model) and labels.dim() == 2:  # noqa: PLR2004 (B, T)
            more = logits.shape[1] - labels.shape[1]
            labels = functional.pad(labels, (max(0, more), 0), value=UNLABELLED)
        return read_losses(logits, labels, shifts=is_causal, smoothing=smoothing)

    def compute_batch_loss(self, inputs: dict[str, Any]) -> Any:
        """Compute the mean loss of a batch as the ``Trainer`` does that is made private."""
        return self.compute_loss(self.model, inputs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Move tensors to the device, also those inside of objects, and prepare them as ever."""
        moved = move(inputs, self.args.device)
        is_own = super()._prepare_inputs.__func__ is not transformers.Trainer._prepare_inputs  # noqa: SLF001
        if is_own or (isinstance(inputs, Mapping) and not inputs):
            return super()._prepare_inputs(moved)  # refuses it if it is empty
        return moved

    @torch.no_grad()
    def _verify_losses(self) -> None:
        """Compare losses with ``compute_loss``, in eval(): of a sample, and of two in one batch."""
        assert self._steps is not None
        loader, first, labels = self._steps.loader, None, set()
        for at in range(min(loader.samples, _LOOKED_AT)):
            inputs = self._prepare_inputs(loader.load([at]))
            own = set(inputs["labels"].flatten().tolist()) if "labels" in inputs else set()
            if first is None and self._compare_loss(inputs):
                first, labels = at, own
            elif first is not None and (not own or not own <= labels):  # it may have other weights
                self._compare_loss(self._prepare_inputs(loader.load([first, at])))
                return

    def _compare_loss(self, inputs: Any) -> bool:
        """Compare a batch's loss with the mean of its samples', or of their labelled tokens'.

        Returns whether anything is labelled.
        """
        with evaluated(self.model), self._autocast():
            losses_B = self._losses_of_batch(self.model, dict(inputs))
            if not losses_B.any():
                return False
            expected = self.compute_batch_loss(dict(inputs))
        labels = inputs.get("labels")
        counts_B = torch.ones_like(losses_B)
        if labels is not None and labels.dim() == 2:  # noqa: PLR2004 (B, T)
            shifts = is_causal_lm(self.model) and not _is_prompted(self.model)
            own = shift_labels(labels) if shifts else labels
            counts_B = (own != UNLABELLED).sum(1).to(losses_B)
        means = losses_B.mean(), losses_B @ (counts_B / counts_B.sum())
        if not any(is_same_loss(self.model, mean, expected) for mean in means):
            raise ValueError(
                f"{type(self.model).__name__} computes its loss otherwise than as the "
                "cross-entropy of its logits with labels, each of the same weight, or "
                f"compute_loss of {type(self).__name__} does; give it losses_of"
            )
        return True

    def _check_losses(self) -> None:
        """Compare the clipped gradient of the first two samples with those of each alone."""
        assert self._steps is not None
        if self._steps.loader.samples < 2:  # noqa: PLR2004 (one shows nothing)
            return
        with random_state_kept():  # a collator may draw
            inputs = self._prepare_inputs(self._steps.loader.load(range(2)))
        self._clipping.check(partial(self.compute_sample_losses, self.model), inputs)

    def _compare_samples(self) -> None:
        assert self._data_loader is not None
        collate = self._data_loader.collate_fn
        checks = RepeatedChecks(
            self._clipping,
            lambda inputs: self.compute_sample_losses(self.model, inputs),
            self._data_loader.dataset,
            lambda samples: self._prepare_inputs(collate(samples)),
            most=self.args.per_device_train_batch_size,
            every=self.privacy.verify_every,
            keeps_order=self.privacy.unit == "user",
        )
        if self.privacy.check and not self._is_sharded:
            if not self.model.training:  # as a step does
                self.model.train()
            checks.compare_first()

    def _find_max_batch_size(self, optimizer: Optimizer, loader: PoissonLoader) -> None:
        if self._ranks.size > 1:
            raise ValueError("on several ranks max_batch_size must be a number, and is 'auto'")
        count = min(loader.samples, self.args.per_device_train_batch_size)
        with random_state_kept():  # a collator may draw
            inputs = self._prepare_inputs(loader.load(range(count)))
        first = FirstBatch(partial(self.compute_sample_losses, self.model), [inputs], count)
        expected = loader.numbers.expected_batch_size
        loader.max_batch_size = find_max_batch_size(self._clipping, optimizer, first, expected)


def read_losses(logits: Tensor, labels: Tensor, *, shifts: bool, smoothing: float = 0.0) -> Tensor:
    """Compute each sample's mean cross-entropy over its own labelled tokens; (B,).

    Logits are (B, V) or (B, T, V); labels ids (``ValueError``), (B,) or (B, T), -100 for tokens
    without a loss. ``shifts`` says that a token's logits predict the next one.
    """
    is_other = labels.shape != logits.shape[:-1] or labels.is_floating_point()
    if is_other or logits.shape[-1] == 1:  # one output is a regression's
        raise ValueError(
            f"labels must be ids of shape {tuple(logits.shape[:-1])}, and are "
            f"{tuple(labels.shape)} {labels.dtype}; give PrivateTrainer losses_of"
        )
    labels = shift_labels(labels) if shifts else labels
    return sample_losses(logits.float(), labels, label_smoothing=smoothing)


def _inside(model: nn.Module) -> nn.Module:
    base = getattr(model, "get_base_model", None)
    return model if base is None else base()


def _is_prompted(model: nn.Module) -> bool:
    """Tell whether trained tokens come before those of a sample, as in prompt tuning of peft."""
    return getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)


def is_causal_lm(model: nn.Module) -> bool:
    """Tell whether a model, maybe with adapters, is a causal language model of transformers."""
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(kind.__name__ in causal for kind in type(_inside(model)).__mro__)


def _number_positions(
    model: nn.Module, inputs: dict[str, Any], *, is_compared: bool
) -> dict[str, Any]:
    """Number a causal model's tokens after padding on the left from 0, as generation does.

    Otherwise positions would begin after the padding, which is as long as the longest sample says.
    A model that takes none may have relative ones; where samples are compared alone and in company,
    that tells, and otherwise it is refused.
    """
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or "position_ids" in inputs:  # noqa: PLR2004
        return inputs
    if not (mask[:, :1] == 0).any():
        return inputs
    if is_causal_lm(model) and "position_ids" in signature(_inside(model).forward).parameters:
        return inputs | {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    if is_compared:
        return inputs
    raise ValueError(
        "attention_mask begins with padding, so that a sample's positions may depend on the "
        "longest one beside it; pad on the right, give position_ids, or leave out check=False"
    )


def _refuse_packed(inputs: Mapping[str, Any]) -> None:
    """Refuse rows that hold several samples: a row would count as one, and share its bound."""
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
