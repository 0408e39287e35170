"""Finds the padded tokens of a user's batch, and changes them.

Shape legend: B samples, T tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dpprof.verification.training.loop import TrainingBatch

_UNLABELLED = -100


class PaddedTokens(NamedTuple):
    """Where tokens are padding; (B, T) bool."""

    places: Tensor
    is_certain: bool
    """Whether a mask or the user said so, and not labels alone."""


def find_padding(batch: TrainingBatch, given: Tensor | None) -> PaddedTokens | str:
    """Return where tokens are padding, or why that is unknown.

    A mask is a tensor of 0 and 1 whose zeros are at one end of every sample. Without a mask,
    padding is a run of one id at the end of samples whose labels are -100: labels may leave out
    tokens that matter, such as a prompt.

    Raises:
        ValueError: What is given has another shape than any tokens of the batch.
    """
    if given is not None:
        if not any(part.shape == given.shape for part in batch.parts) or given.dtype != torch.bool:
            raise ValueError(
                f"padding must be bool and as large as the tokens, and is {given.dtype} of "
                f"{tuple(given.shape)}"
            )
        return (
            PaddedTokens(given, is_certain=True)
            if given.any()
            else "no token of the batch is padding"
        )
    masks = [part for part in batch.parts if _is_mask(part)]
    if masks:
        padded = masks[0] == 0
        return (
            PaddedTokens(padded, is_certain=True)
            if padded.any()
            else "the mask leaves no token out"
        )
    for labels in batch.parts:
        if labels.dim() == 2 and (labels == _UNLABELLED).any():  # noqa: PLR2004 (B, T)
            for tokens in _find_tokens(batch, labels):
                return _find_run(tokens, labels == _UNLABELLED)
    return "the batch has no mask and no labels of -100"


def change_padding(batch: TrainingBatch, padding: Tensor) -> TrainingBatch | str:
    """Return the batch with other ids at padded tokens, or the reason why there is none."""
    places = _find_tokens(batch, padding)
    if not places:
        return "the batch has no ids as large as the mask"
    changed = places[0].clone()
    ids = places[0][~padding]
    ids = torch.unique(ids)
    if len(ids) < 2:  # noqa: PLR2004 (another id must exist)
        return "the batch has only one id"
    draw = torch.Generator().manual_seed(0)
    at = torch.randint(len(ids), (int(padding.sum()),), generator=draw).to(ids.device)
    new = ids[at]
    new = torch.where(new == changed[padding], ids[(at + 1) % len(ids)], new)
    changed[padding] = new
    return batch._replace(
        parts=tuple(changed if part is places[0] else part for part in batch.parts)
    )


def _is_mask(part: Tensor) -> bool:
    if part.dim() != 2 or not bool(((part == 0) | (part == 1)).all()):  # noqa: PLR2004 (B, T)
        return False
    changes = (part[:, 1:] != part[:, :-1]).sum(1)
    ends = (part[:, 0] == 1) | (part[:, -1] == 1)
    return bool((changes <= 1).all() and ends.all())


def _find_tokens(batch: TrainingBatch, like: Tensor) -> list[Tensor]:
    """Find ids: integers of a shape, without negative ones, that are no mask."""
    return [
        part
        for part in batch.parts
        if part.shape == like.shape
        and part.dtype in (torch.int64, torch.int32)
        and bool((part >= 0).all())
        and not _is_mask(part)
    ]


def _find_run(tokens: Tensor, unlabelled: Tensor) -> PaddedTokens | str:
    """Find the run of one id at the end of samples, the same id for all."""
    runs = unlabelled.flip(1).long().cumprod(1).flip(1).bool()
    longest = int(runs.sum(1).argmax())
    pad = tokens[longest, -1]
    padded: Tensor = (runs & (tokens == pad)).flip(1).long().cumprod(1).flip(1).bool()
    few = int(padded.sum(1).max()) < 2  # noqa: PLR2004 (one may be a token that ends a sample)
    if few:
        return "labels of -100 are not at the end of samples"
    return PaddedTokens(padded, is_certain=False)
