"""The simulated caching allocator: placement worked out by hand, and what must always hold."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpprof.memory.caching_allocator import (
    DEFAULT,
    EXPANDABLE,
    MIB,
    CachingAllocator,
    OutOfMemoryError,
    Settings,
    round_size,
    segment_size,
)


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (25 * MIB, 25 * MIB, 26 * MIB),
    ],
)
def test_requests_and_segments_are_rounded_up(requested: int, block: int, segment: int) -> None:
    assert round_size(requested) == block
    assert segment_size(block) == segment


def test_a_large_block_keeps_a_remainder_of_up_to_a_mebibyte() -> None:
    """So ``max_memory_allocated`` counts more than sizes rounded to 512 bytes."""
    allocator = CachingAllocator()
    allocator.allocate("gradient", 25 * MIB)
    assert allocator.allocated_bytes == allocator.reserved_bytes == 26 * MIB
    assert allocator.requested_bytes == 25 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    for key, size in {"a": 40, "b": 12, "c": 20}.items():
        allocator.allocate(key, size * MIB)
    for key in "abc":
        allocator.free(key)
    allocator.allocate("d", 15 * MIB)
    assert allocator.reserved_bytes == (40 + 12 + 20) * MIB
    # Of the 20 MiB are 5 left, which fit 4; what is left of those stays in the block.
    allocator.allocate("e", 4 * MIB)
    allocator.allocate("f", 40 * MIB)
    assert allocator.reserved_bytes == 72 * MIB
    assert {key: block.size for key, (block, _) in allocator._live.items()} == {
        "d": 15 * MIB,
        "e": 5 * MIB,
        "f": 40 * MIB,
    }


def test_free_neighbours_merge() -> None:
    allocator = CachingAllocator()
    for key in "abcd":
        allocator.allocate(key, 5 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    for key in "acbd":
        allocator.free(key)
    allocator.allocate("e", 20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_fragments_that_do_not_lie_together_are_of_no_use_to_a_large_request() -> None:
    allocator = CachingAllocator()
    for key in "abcd":
        allocator.allocate(key, 5 * MIB)
    allocator.free("a")
    allocator.free("c")
    allocator.allocate("e", 9 * MIB)
    assert allocator.reserved_bytes == 2 * 20 * MIB


def test_expandable_segments_grow_where_default_ones_strand_memory() -> None:
    """Ever larger requests, each freed before the next: the worst that segments of a size meet."""
    reserved = {}
    for setting in (DEFAULT, EXPANDABLE):
        allocator = CachingAllocator(settings=setting)
        for size in range(20, 220, 20):
            allocator.allocate(size, size * MIB)
            allocator.free(size)
        reserved[setting] = allocator.reserved_bytes
    assert reserved == {DEFAULT: sum(range(20, 220, 20)) * MIB, EXPANDABLE: 200 * MIB}


def test_a_full_device_releases_its_cache_and_tries_once_more() -> None:
    allocator = CachingAllocator(100 * MIB)
    allocator.allocate("a", 60 * MIB)
    allocator.free("a")
    allocator.allocate("b", 80 * MIB)
    assert allocator.retries == 1
    assert allocator.reserved_bytes == 80 * MIB
    with pytest.raises(OutOfMemoryError, match=r"31,457,280 bytes; 83,886,080 are allocated"):
        allocator.allocate("c", 30 * MIB)


def test_a_segment_that_is_partly_used_cannot_be_released() -> None:
    for setting, fits in ((DEFAULT, False), (EXPANDABLE, True)):
        allocator = CachingAllocator(100 * MIB, setting)
        for key in "abc":
            allocator.allocate(key, 20 * MIB)
        allocator.allocate("large", 40 * MIB)
        allocator.free("large")
        allocator.allocate("small", 5 * MIB)  # within what "large" left behind
        if fits:
            allocator.allocate("more", 30 * MIB)
            assert allocator.allocated_bytes == 95 * MIB
        else:
            allocator.allocate("more", 30 * MIB)
            allocator.free("a")
            with pytest.raises(OutOfMemoryError):
                allocator.allocate("most", 25 * MIB)


def test_a_key_is_allocated_once_and_nothing_is_nothing() -> None:
    allocator = CachingAllocator()
    allocator.allocate("empty", 0)
    allocator.free("empty")
    allocator.allocate("a", 1)
    with pytest.raises(ValueError, match="'a' is allocated already"):
        allocator.allocate("a", 1)
    assert allocator.reserved_bytes == 2 * MIB


SIZES = st.one_of(st.integers(1, 2 * MIB), st.integers(MIB, 64 * MIB))
STEPS = st.lists(st.tuples(st.booleans(), SIZES), max_size=60)


@given(steps=STEPS, expandable=st.booleans(), limit=st.sampled_from([None, 96 * MIB, 300 * MIB]))
@settings(max_examples=150, deadline=None)
def test_blocks_tile_segments_whatever_is_asked(
    steps: list[tuple[bool, int]], expandable: bool, limit: int | None
) -> None:
    """Counters equal the sum of blocks, free neighbours are merged, the limit holds."""
    allocator = CachingAllocator(limit, Settings(expandable_segments=expandable))
    live: list[int] = []
    for number, (frees, nbytes) in enumerate(steps):
        if frees and live:
            allocator.free(live.pop(nbytes % len(live)))
            continue
        try:
            allocator.allocate(number, nbytes)
            live.append(number)
        except OutOfMemoryError:
            assert limit is not None
            assert allocator.reserved_bytes + segment_size(round_size(nbytes)) > limit or expandable
    blocks = [(key, nbytes, block.size) for key, (block, nbytes) in allocator._live.items()]
    assert {key for key, _, _ in blocks} == set(live)
    assert allocator.allocated_bytes == sum(block for _, _, block in blocks)
    assert all(nbytes <= block <= round_size(nbytes) + MIB for _, nbytes, block in blocks)
    free = [one for pool in (allocator._small, allocator._large) for one in pool.free]
    assert allocator.reserved_bytes == allocator.allocated_bytes + sum(size for size, _, _ in free)
    assert limit is None or allocator.peaks.reserved_bytes <= limit
    for _, _, block in free:
        assert block.next is None or not (block.next.free and block.next.mapped)
    for pool in (allocator._small, allocator._large):
        assert all(first < second for first, second in pairwise(one[:2] for one in pool.free))
