"""Which sample each row of a batch belongs to, and what samples contribute of what rows do.

A row is an entry of a tensor's first axis. Samples may have several: one after the other's, or in
blocks with some of each sample, such as all that was chosen and then all that was rejected.

Shape legend: B samples, R rows, k rows of a sample, T tokens of a row.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpprof.private.contributions.contributions import ChunkedProduct, Contribution, Convolution
from dpprof.private.contributions.sample_gradients import SampleGradients
from dpprof.private.graph.owners import FREE, Owners, is_complete
from dpprof.private.norms.tiles import accumulator_of


class _Blocks(NamedTuple):
    """Successive blocks of rows, each with as many of each sample, one sample's after another's."""

    repeats: int
    each: int  # rows of a sample in a block


class Rows:
    """R rows of B samples: blocks, in order, or else the places of each sample's rows.

    The samples that users have in a batch are rows of users in this sense.

    Places are (B, k), -1 beyond a sample's last row.
    """

    def __init__(
        self, samples: int, count: int, blocks: Sequence[_Blocks], places_Bk: Tensor | None = None
    ) -> None:
        self.samples, self.count = samples, count
        self._blocks, self._places_Bk = blocks, places_Bk

    @classmethod
    def in_order(cls, samples: int, count: int) -> "Rows":
        """Make ``count`` rows, as many of each sample, one sample's after another's."""
        return cls(samples, count, [_Blocks(1, count // samples)])

    @classmethod
    def in_segments(cls, sizes: Sequence[int]) -> "Rows":
        """Make rows of which each sample has so many, one sample's after another's."""
        owners_R = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        rows = cls.of(owners_R, len(sizes))
        assert rows is not None
        return rows

    @classmethod
    def of(cls, owners_R: Owners, samples: int) -> "Rows | None":
        """Find the rows of samples by their owners; None where rows are in another order.

        It knows samples one after another, and several such blocks, each with rows of all samples.
        """
        is_free_R = owners_R == FREE
        owned_R = owners_R[~is_free_R]
        if not len(owned_R) or not is_complete(owned_R):
            return None
        # A row that no loss uses may count as any sample's: as that of the one before.
        before_R = np.maximum(np.cumsum(~is_free_R) - 1, 0)
        filled = cls._in_blocks(owned_R[before_R], samples)
        if filled is not None:
            return filled
        # One sample after another, or several times all of them.
        runs = _runs_of(owned_R)
        if len(runs) > 1 and not all(np.bincount(run, minlength=samples).all() for run in runs):
            return None
        # As many rows as all samples could have, but shifted: one sample's into another's place.
        each = np.bincount(owned_R).max()
        places_R = np.arange(len(owners_R)) // each % samples
        is_whole = len(owners_R) == each * samples
        if is_whole and is_free_R.any() and (places_R != owners_R)[~is_free_R].any():
            return None
        return cls(samples, len(owners_R), [], _list_places(owners_R, samples))

    @classmethod
    def _in_blocks(cls, owners_R: Owners, samples: int) -> "Rows | None":
        """Return rows in blocks with as many of each sample; None where they are in no blocks."""
        counts = [np.bincount(run, minlength=samples) for run in _runs_of(owners_R)]
        if not all((count_B == count_B[0]).all() for count_B in counts):
            return None
        blocks: list[_Blocks] = []
        for count_B in counts:
            again = blocks.pop() if blocks and blocks[-1].each == count_B[0] else _Blocks(0, 0)
            blocks.append(_Blocks(again.repeats + 1, int(count_B[0])))
        return cls(samples, len(owners_R), blocks)

    @property
    def is_in_blocks(self) -> bool:
        """Whether rows are known by their blocks, without a list of places."""
        return self._places_Bk is None

    @cached_property
    def _ends(self) -> list[int]:
        """Where each sample's rows begin, and the last one's end; empty if in another order."""
        assert self._places_Bk is not None
        places_Bk = self._places_Bk.cpu()
        is_row_Bk = places_Bk >= 0
        is_in_order = torch.equal(places_Bk[is_row_Bk], torch.arange(self.count))
        return [0, *is_row_Bk.sum(1).cumsum(0).tolist()] if is_in_order else []

    @property
    def each(self) -> int | None:
        """How many rows each sample has, one sample's after another's; None in another order."""
        is_one = len(self._blocks) == 1 and self._blocks[0].repeats == 1
        return self._blocks[0].each if is_one else None

    def group(self, part: Tensor) -> Tensor:
        """Sort (R, ...) by samples; (B, k, ...), zero beyond a sample's last row."""
        if self._places_Bk is not None:
            places_Bk = self._places_Bk = self._places_Bk.to(part.device)  # once for all layers
            is_none = (places_Bk < 0).view(*places_Bk.shape, *(1,) * (part.dim() - 1))
            return part[places_Bk.clamp(min=0)].masked_fill(is_none, 0)
        parts, start = [], 0
        for repeats, each in self._blocks:
            rows = part[start : (start := start + repeats * each * self.samples)]
            blocks = torch.unflatten(rows, 0, (repeats, self.samples, each))
            parts.append(blocks[0] if repeats == 1 else blocks.transpose(0, 1).flatten(1, 2))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def sum(self, part: Tensor) -> Tensor:
        """Add up the rows of each sample; (B, ...)."""
        grouped = self.group(part)
        if grouped.shape[1] == 1:
            return grouped[:, 0]
        return grouped.sum(1, dtype=accumulator_of(grouped.dtype))

    def group_contribution(self, contribution: Contribution) -> Contribution:
        """Turn what rows contribute into what samples contribute, with the tokens of all rows."""
        if isinstance(contribution, ChunkedProduct):
            return self._group_chunks(contribution)
        if isinstance(contribution, Convolution):
            contribution = SampleGradients(contribution.materialise(*contribution))
        if isinstance(contribution, SampleGradients):
            return SampleGradients(self.group(contribution.gradients).sum(1))
        joined: dict[str, Any] = {
            name: self.group(part).flatten(1, 2)
            for name, part in contribution._asdict().items()
            if isinstance(part, Tensor)
        }
        return contribution._replace(**joined)

    def _group_chunks(self, product: ChunkedProduct) -> ChunkedProduct:
        """Do so for a head; rows neither in blocks nor in order stay, and are refused."""
        if not (self.is_in_blocks or self._ends):
            return product
        release = product.release

        def gradients_of(some: slice) -> Tensor:
            parts = [
                own.group(product.gradients_of(rows)).flatten(1, 2)
                for rows, own in self._spans(some)
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

        def release_rows(some: slice) -> None:
            assert release is not None
            for rows, _ in self._spans(some):
                release(rows)

        incoming = product.incoming_BT
        return product._replace(
            x_BTd=self.group(product.x_BTd).flatten(1, 2),
            gradients_of=gradients_of,
            grams_BTT=None,
            incoming_BT=None if incoming is None else self.group(incoming).flatten(1, 2),
            release=None if release is None else release_rows,
        )

    def _spans(self, some: slice) -> Iterator[tuple[slice, "Rows"]]:
        """Yield the rows that some samples have in each block, and which of these are whose."""
        samples = some.stop - some.start
        if self._places_Bk is not None:
            start, stop = self._ends[some.start], self._ends[some.stop]
            yield slice(start, stop), Rows(samples, stop - start, [], self._places_Bk[some] - start)
            return
        start = 0
        for repeats, each in self._blocks:
            for _ in range(repeats):
                rows = slice(start + some.start * each, start + some.stop * each)
                yield rows, Rows.in_order(samples, samples * each)
                start += self.samples * each


def _runs_of(owners_R: Owners) -> list[Owners]:
    """Cut owners where a sample comes after a later one."""
    starts = [0, *(np.flatnonzero(np.diff(owners_R) < 0) + 1), len(owners_R)]
    return [owners_R[a:b] for a, b in itertools.pairwise(starts)]


def _list_places(owners_R: Owners, samples: int) -> Tensor:
    """List the rows of each sample; (B, k), -1 beyond the last."""
    rows = np.flatnonzero(owners_R != FREE)
    rows = rows[np.argsort(owners_R[rows], kind="stable")]
    each_B = np.bincount(owners_R[rows], minlength=samples)
    is_row_Bk = np.arange(each_B.max()) < each_B[:, None]
    places_Bk = np.full(is_row_Bk.shape, -1)
    places_Bk[is_row_Bk] = rows
    return torch.from_numpy(places_Bk)
