"""Hashes clipped sums without Triton's kernels, in one pass over memory (``noise_keys``).

A processor with units for matrices of bytes hashes as fast as it reads; another takes four times as
long for products of 64 bits. PyTorch's products of bytes are exact, whichever unit makes them:
where two are added up in 16 bits first, as AVX2 does, keys of 7 bits leave room for both.
"""

from collections.abc import Iterator, Sequence
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

LANES = 2**14  # numbers of 64 bits that are hashed to one
_AT_ONCE = 16 * LANES  # numbers of 64 bits that are hashed at a time: they stay in a core's cache
_PART = 2**22  # words of 32 bits that one thread hashes at a time
_KEYS = 8  # numbers of 32 bits to which each row of bytes is hashed
_JOINED = 2**18  # words of small sums that are hashed together: they stay in a core's cache
_ROWS = 256  # what a GPU without Triton's kernels hashes at a time, in rows of ``LANES``


def hash_words(sums: Sequence[Tensor], table: Tensor) -> list[int]:
    """Hash sums, (n,) int32 each; on a CPU in as many threads as PyTorch uses.

    Returns numbers of 64 bits, for each ``2 LANES`` words two, or eight of products of bytes;
    none of fake tensors. The ``table`` has secret numbers, (2, LANES) int64.
    """
    if isinstance(table, FakeTensor):
        return []
    if not table.is_cpu:
        parts = (part for words in sums for part in torch.split(words, _ROWS * 2 * LANES))
        return [value for part in parts for value in hash_rows(part, table).flatten().tolist()]
    with _disable_current_modes():
        if has_byte_products():
            return _hash_bytes(sums, table)
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


def has_byte_products() -> bool:
    """Tell whether this processor multiplies matrices of bytes as fast as it reads them."""
    return bool(torch.cpu._is_amx_tile_supported())  # noqa: SLF001 (there is no public name)


def _hash_bytes(sums: Sequence[Tensor], table: Tensor) -> list[int]:
    """Hash rows of bytes, each to its products with secret numbers of 7 bits."""
    keys = (table.view(torch.int8).view(_KEYS, -1) >> 1).t()
    parts = _gather_rows(sums, len(keys) // 4)
    multiply = torch._int_mm  # noqa: SLF001 (the only product of bytes that is exact)
    hashes = (multiply(part.view(torch.int8).view(-1, len(keys)), keys) for part in parts)
    return [value for made in hashes for value in made.view(torch.int64).flatten().tolist()]


def _gather_rows(sums: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    """Yield the words of sums in whole rows: a large sum's as they lie, others' joined."""
    room = np.empty(2 * _JOINED, np.int32)
    filled = 0
    for place, words in enumerate(sums, 1):
        end = len(words) // size * size if len(words) > _JOINED else 0
        if end:
            yield words[:end]
        rest = len(words) - end
        room[filled : filled + rest] = words[end:].numpy()
        filled += rest
        if filled >= _JOINED or (filled and place == len(sums)):
            rows = -(-filled // size) * size
            room[filled:rows] = 0
            yield torch.from_numpy(room[:rows])
            filled = 0


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
