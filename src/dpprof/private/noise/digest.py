"""Hashes clipped sums without Triton's kernels, in one pass over memory (``noise_keys``)."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from dpprof.private.allocation_marks import allocates
from dpprof.private.norms.tiles import spans

LANES = 2**14
"""Numbers of 64 bits that are hashed to one."""

_AT_ONCE = 8 * LANES
"""Numbers of 64 bits that are hashed at a time: they stay in a core's cache."""

_PART = 2**20
"""Words of 32 bits that one thread hashes at a time."""

_ROWS = 256
"""What a GPU without Triton's kernels hashes at a time, in rows of ``LANES``."""


def hash_words(sums: Sequence[Tensor], table: Tensor) -> list[int]:
    """Hash sums; on a CPU in as many threads as PyTorch uses.

    Args:
        sums: Words of 32 bits, (n,) int32 each.
        table: Secret numbers, (2, LANES) int64.

    Returns:
        Two numbers of 64 bits for each ``2 LANES`` words, small sums joined; none of fake tensors.
    """
    if isinstance(table, FakeTensor):
        return []
    if not table.is_cpu:
        parts = (part for words in sums for part in torch.split(words, _ROWS * 2 * LANES))
        return [value for part in parts for value in hash_rows(part, table).flatten().tolist()]
    with _disable_current_modes():
        small = [words.numpy() for words in sums if len(words) < LANES]
        large = [words for words in sums if len(words) >= LANES]
        arrays = [part.numpy() for words in large for part in torch.split(words, _PART)]
        if small:
            joined = np.concatenate(small)
            arrays += [joined[some] for some in spans(len(joined), _PART)]
        hash_part, count = partial(_hash_part, table.numpy()), torch.get_num_threads()
        if count == 1 or sum(map(len, arrays)) <= _PART:  # a thread takes as long to begin
            return [value for array in arrays for value in hash_part(array)]
        with ThreadPoolExecutor(count) as threads:
            return [value for digest in threads.map(hash_part, arrays) for value in digest]


@allocates("noise")
def hash_rows(words: Tensor, table: Tensor) -> Tensor:
    """Hash words on any device, (n,) int32, with a table as of ``hash_words``; (N, 2) int64."""
    rows = torch.nn.functional.pad(words, (0, -len(words) % (2 * LANES))).view(-1, 2 * LANES)
    lanes = rows.view(torch.int64)
    return torch.stack([(lanes * table[0]).sum(1), ((lanes >> 32) * table[1]).sum(1)], dim=1)


def _hash_part(table: NDArray[np.int64], words: NDArray[np.int32]) -> list[int]:
    """Hash words, two to a number; and the higher ones again, whose low bits the first may miss."""
    room = np.empty(_AT_ONCE, np.int64)
    digest: list[int] = []
    if len(words) % 2:
        words = np.append(words, np.int32(0))
    lanes = words.view(np.int64)
    for some in spans(len(lanes), _AT_ONCE):
        few = lanes[some]
        higher = np.right_shift(few, 32, out=room[: len(few)])
        whole = len(few) // LANES * LANES
        for numbers, keys in ((few, table[0]), (higher, table[1])):
            # Faster than np.dot, and other threads run meanwhile.
            digest += np.einsum("ij,j->i", numbers[:whole].reshape(-1, LANES), keys).tolist()
            digest.append(int(np.dot(numbers[whole:], keys[: len(few) - whole])))
    return digest
