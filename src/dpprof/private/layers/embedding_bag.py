"""The rule of embedding bags: a lookup, and the sum, mean or maximum of each bag.

Memory beyond PyTorch's: the rows that are looked up, (B, T, d); bags of other lengths are padded.

Shape legend: B samples, which are bags, T entries of the longest bag, d width.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpprof.private.contributions.contributions import Receive
from dpprof.private.layers.layers import run_embedding


class _Bags(NamedTuple):
    ids_BT: Tensor
    is_entry_BT: Tensor
    weights_BT: Tensor | None


def run_embedding_bag(
    layer: nn.EmbeddingBag,
    receive: Receive,
    input: Tensor,  # noqa: A002 (torch's)
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """Run embedding bags of equal length, (B, T), or joined to one axis, with offsets."""
    if per_sample_weights is not None and (
        layer.mode != "sum" or per_sample_weights.shape != input.shape
    ):
        raise ValueError("per_sample_weights need mode='sum', and one weight for each entry")
    if input.dim() == 2:  # noqa: PLR2004
        if offsets is not None:
            raise ValueError("an embedding bag of two axes takes no offsets")
        bags = _Bags(input, torch.ones_like(input, dtype=torch.bool), per_sample_weights)
    else:
        bags = _pad(layer, input, offsets, per_sample_weights)
    counted_BT1 = bags.is_entry_BT[:, :, None]
    if layer.padding_idx is not None:
        counted_BT1 = counted_BT1 & (bags.ids_BT != layer.padding_idx)[:, :, None]
    rows_BTd = run_embedding(layer, receive, bags.ids_BT)  # type: ignore[arg-type]
    if layer.mode == "max":
        largest_Bd = rows_BTd.masked_fill(~counted_BT1, -torch.inf).max(1).values
        return largest_Bd.masked_fill(~counted_BT1.any(1), 0)
    if bags.weights_BT is not None:
        rows_BTd = rows_BTd * bags.weights_BT[:, :, None]
    summed_Bd = rows_BTd.masked_fill(~counted_BT1, 0).sum(1)
    return summed_Bd if layer.mode == "sum" else summed_Bd / counted_BT1.sum(1).clamp(min=1)


def _pad(
    layer: nn.EmbeddingBag, ids: Tensor, offsets: Tensor | None, weights: Tensor | None
) -> _Bags:
    """Turn bags that are joined to one axis into rows of the longest one's length."""
    if ids.dim() != 1 or offsets is None or offsets.dim() != 1:
        raise ValueError("an embedding bag gets two axes, or one axis and its offsets")
    ends = offsets
    if not layer.include_last_offset:
        ends = torch.cat([offsets, offsets.new_tensor([len(ids)])])
    starts, lengths = ends[:-1], ends.diff()
    is_wrong = bool((lengths < 0).any()) or not 0 <= int(ends[-1]) <= len(ids)
    if is_wrong or (len(starts) and int(starts[0])):
        raise ValueError("the offsets of an embedding bag must begin at 0, rise, and end within it")
    places_T = torch.arange(max(1, int(lengths.amax()) if len(lengths) else 1), device=ids.device)
    is_entry_BT = places_T < lengths[:, None]
    # What is no entry has row 0 and weight 0, and counts for nothing.
    places_BT = (starts[:, None] + places_T).masked_fill(~is_entry_BT, len(ids))
    of_entries = None if weights is None else functional.pad(weights, (0, 1))[places_BT]
    return _Bags(functional.pad(ids, (0, 1))[places_BT], is_entry_BT, of_entries)
