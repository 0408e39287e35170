"""The simulated caching allocator: placement worked out by hand, and what must always hold."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpprof.predict.memory.caching_allocator import (
    MIB,
    CachingAllocator,
    OutOfMemoryError,
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


def play(allocator: CachingAllocator, steps: str) -> CachingAllocator:
    """Allocate MiB under keys, as ``a 40``, and free keys, as ``-a``."""
    for step in steps.split(", "):
        if step.startswith("-"):
            allocator.free(step[1:])
        else:
            key, size = step.split()
            allocator.allocate(key, int(size) * MIB)
    return allocator


def test_a_graph_has_a_pool_of_its_own() -> None:
    allocator = play(
        CachingAllocator(limit_bytes=100 * MIB), "weights 30, activations 40, -activations"
    )
    assert allocator.reserved_bytes == 70 * MIB
    allocator.begin_graph()

    assert allocator.reserved_bytes == 30 * MIB  # the cache was released
    play(allocator, "captured 50, sums 12, -captured, more 45")
    assert allocator.reserved_bytes == (30 + 50 + 12) * MIB
    play(allocator, "-weights, -more")
    with pytest.raises(OutOfMemoryError):  # no release takes what a replay writes to
        play(allocator, "other 60")
    assert allocator.reserved_bytes == (50 + 12) * MIB  # only the weights' segment went


@pytest.mark.parametrize(
    ("steps", "reserved", "blocks"),
    [
        # A large block keeps a remainder of up to a MiB, so max_memory_allocated counts more than
        # sizes rounded to 512 bytes.
        ("gradient 25", 26, {"gradient": 26}),
        # The smallest block that is large enough is taken. Of the 20 MiB are 5 left, which fit 4;
        # what is left of those stays in the block.
        (
            "a 40, b 12, c 20, -a, -b, -c, d 15, e 4, f 40",
            40 + 12 + 20,
            {"d": 15, "e": 5, "f": 40},
        ),
        # Free neighbours merge.
        ("a 5, b 5, c 5, d 5, -a, -c, -b, -d, e 20", 20, {"e": 20}),
        # Fragments that do not lie together are of no use to a large request.
        ("a 5, b 5, c 5, d 5, -a, -c, e 9", 2 * 20, {"b": 5, "d": 5, "e": 9}),
    ],
)
def test_placements_by_hand(steps, reserved, blocks) -> None:
    allocator = play(CachingAllocator(), steps)

    assert allocator.reserved_bytes == reserved * MIB
    assert {key: block.size for key, (block, _) in allocator._live.items()} == {
        key: size * MIB for key, size in blocks.items()
    }


def test_expandable_segments_grow_where_default_ones_strand_memory() -> None:
    """Ever larger requests, each freed before the next: the worst that segments of a size meet."""
    steps = ", ".join(f"a {size}, -a" for size in range(20, 220, 20))
    reserved = {
        expandable: play(CachingAllocator(expandable=expandable), steps).reserved_bytes
        for expandable in (False, True)
    }
    assert reserved == {False: sum(range(20, 220, 20)) * MIB, True: 200 * MIB}


def test_a_full_device_releases_its_cache_and_tries_once_more() -> None:
    allocator = play(CachingAllocator(100 * MIB), "a 60, -a, b 80")
    assert allocator.retries == 1
    assert allocator.reserved_bytes == 80 * MIB
    with pytest.raises(OutOfMemoryError, match=r"31,457,280 bytes; 83,886,080 are allocated"):
        play(allocator, "c 30")


def test_a_segment_that_is_partly_used_cannot_be_released() -> None:
    # "small" lies within what "large" left behind.
    steps = "a 20, b 20, c 20, large 40, -large, small 5, more 30"
    assert play(CachingAllocator(100 * MIB, expandable=True), steps).allocated_bytes == 95 * MIB
    with pytest.raises(OutOfMemoryError):
        play(CachingAllocator(100 * MIB), f"{steps}, -a, most 25")


def test_nothing_takes_no_memory() -> None:
    assert play(CachingAllocator(), "empty 0, -empty").reserved_bytes == 0


SIZES = st.one_of(st.integers(1, 2 * MIB), st.integers(MIB, 64 * MIB))
STEPS = st.lists(st.tuples(st.booleans(), SIZES), max_size=60)


@given(steps=STEPS, expandable=st.booleans(), limit=st.sampled_from([None, 96 * MIB, 300 * MIB]))
@settings(max_examples=150, deadline=None)
def test_blocks_tile_segments_whatever_is_asked(
    steps: list[tuple[bool, int]], expandable: bool, limit: int | None
) -> None:
    """Counters equal the sum of blocks, free neighbours are merged, the limit holds."""
    allocator = CachingAllocator(limit, expandable=expandable)
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
