"""Hashes clipped sums with PyTorch's operators, in one pass over memory (``noise_keys``)."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from dpprof.norms.tiles import spans
from dpprof.records.births import allocates

LANES = 2**14
"""Numbers of 64 bits that are hashed to one: they stay in a core's cache."""

_PART = 2**20
"""Words of 32 bits that one thread hashes at a time."""


_ROWS = 256
"""What a GPU without Triton's kernels hashes at a time, in rows of ``LANES``."""


def hash_words(sums: Sequence[Tensor], table: Tensor) -> Tensor:
    """Hash sums; on a CPU in several threads.

    Args:
        sums: Words of 32 bits, (n,) int32 each.
        table: Secret numbers, (2, LANES) int64.

    Returns:
        Two numbers of 64 bits for each ``2 LANES`` words of each sum, (N, 2) int64.
    """
    if table.is_cpu:
        parts = [part for one in sums for part in torch.split(one, _PART)]
        found: Tensor = hash_in_threads_(_make_room(len(parts), table), parts, table)
        return found
    rows = (part for one in sums for part in torch.split(one, _ROWS * 2 * LANES))
    return torch.cat([_hash_rows(one, table) for one in rows])


@allocates("noise")
def _hash_rows(words: Tensor, table: Tensor) -> Tensor:
    rows = torch.nn.functional.pad(words, (0, -len(words) % (2 * LANES))).view(-1, 2 * LANES)
    lanes = rows.view(torch.int64)
    return torch.stack([(lanes * table[0]).sum(1), ((lanes >> 32) * table[1]).sum(1)], dim=1)


@allocates("noise")
def _make_room(parts: int, table: Tensor) -> Tensor:
    return table.new_empty(parts, LANES)


@torch.library.custom_op("dpprof::hash_in_threads_", mutates_args={"room"}, device_types="cpu")
def hash_in_threads_(room: Tensor, parts: list[Tensor], table: Tensor) -> Tensor:
    """Hash parts, in as many threads as PyTorch uses.

    Args:
        room: A row for each part, (parts, LANES) int64.
        parts: Words of 32 bits, (n,) int32 each.
        table: Secret numbers, (2, LANES) int64.

    Returns:
        Two numbers for each ``2 LANES`` words, (N, 2) int64.
    """
    is_inference = torch.is_inference_mode_enabled()  # other threads have modes of their own

    def hash_part(given: tuple[Tensor, Tensor]) -> list[Tensor]:
        part, row = given
        with torch.inference_mode(is_inference), torch.no_grad():
            return [_hash(part[some], table, row) for some in spans(len(part), 2 * LANES)]

    given = zip(parts, room.data, strict=True)  # the operator counts as one change of it
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        found = [one for each in threads.map(hash_part, given) for one in each]
    return torch.stack(found) if found else table.new_empty(0, 2)


@hash_in_threads_.register_fake
def _hashed(_room: Tensor, parts: list[Tensor], table: Tensor) -> Tensor:
    return table.new_empty(sum(-(-len(one) // (2 * LANES)) for one in parts), 2)


def _hash(words: Tensor, table: Tensor, room: Tensor) -> Tensor:
    """Hash words, two to a number; and the higher ones again, whose low bits the first may miss."""
    if len(words) % 2 or words.storage_offset() % 2:
        words = torch.cat([words, words.new_zeros(len(words) % 2)])
    lanes = words.view(torch.int64)
    n = len(lanes)
    higher = torch.bitwise_right_shift(lanes, 32, out=room[:n])
    return torch.stack([torch.dot(lanes, table[0, :n]), torch.dot(higher, table[1, :n])])
