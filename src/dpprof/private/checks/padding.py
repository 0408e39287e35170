"""Changes the padded tokens of a user's batch.

Shape legend: B samples, T tokens.
"""

import torch
from torch import Tensor

from dpprof.private.checks.batch import TrainingBatch
from dpprof.private.samples.company import is_mask

_WHOLE = (torch.int64, torch.int32)


def change_padding(batch: TrainingBatch, padding: Tensor | None) -> TrainingBatch | str:
    """Return the batch with other ids at padded tokens, or the reason why there is none.

    ``padding`` is (B, T) bool, True at padded tokens, the shape of some tokens (``ValueError``);
    None for the zeros of a mask, a tensor of 0 and 1 whose zeros are at one end of every sample.
    """
    if padding is None:
        padding = next((part == 0 for part in batch.parts if is_mask(part)), None)
        if padding is None:
            return "the batch has no mask of 0 and 1; give the places as padding"
    elif padding.dtype != torch.bool or all(part.shape != padding.shape for part in batch.parts):
        raise ValueError(
            f"padding must be bool and as large as the tokens, and is {padding.dtype} of "
            f"{tuple(padding.shape)}"
        )
    if not padding.any():
        return "no token of the batch is padding"
    # Ids are whole numbers, none of them negative, and no mask.
    whole = (p for p in batch.parts if p.shape == padding.shape and p.dtype in _WHOLE)
    ids = next((part for part in whole if bool((part >= 0).all()) and not is_mask(part)), None)
    if ids is None:
        return "the batch has no ids as large as the mask"
    others = torch.unique(ids[~padding])
    if len(others) < 2:  # noqa: PLR2004 (another id must exist)
        return "the batch has only one id"
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(others), (int(padding.sum()),), generator=draw).to(ids.device)
    same = others[drawn] == ids[padding]
    changed = ids.clone()
    changed[padding] = others[(drawn + same) % len(others)]
    return batch.map(lambda part: changed if part is ids else part)
