"""PyTorch's CUDA caching allocator, simulated: how many bytes it would allocate and reserve.

The simulation follows c10/cuda/CUDACachingAllocator.cpp (native backend, one stream). Requests are
rounded up to 512 bytes. Small requests (at most 1 MiB) and large ones have a pool each. The
allocator takes the smallest free block that is large enough and splits it; neighbouring free blocks
merge. Where no block fits, it reserves a segment. Where that exceeds the device's memory, it
releases the segments that nothing uses, and tries once more: a retry.

Not simulated: ``max_split_size_mb``, ``roundup_power2_divisions``,
``garbage_collection_threshold``, several streams.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable
from typing import NamedTuple

MIB = 2**20
MIN_BLOCK = 512
MAX_SMALL = MIB
"""The largest request of the small pool."""

SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE = 10 * MIB
"""A request of this size or more gets a segment of its own size, in multiples of 2 MiB."""

ROUND_LARGE = 2 * MIB
_ADDRESSES = 2**50
"""The addresses of an expandable segment, where the device's memory is not known."""


class OutOfMemoryError(MemoryError):
    """The request does not fit, even after the cache was released."""


class SimulatedPeaks(NamedTuple):
    """The largest values of the allocator's counters since ``reset_peaks``; bytes."""

    requested_bytes: int
    """Sizes as requested (``requested_bytes.all.peak`` of ``torch.cuda.memory_stats``)."""

    allocated_bytes: int  # whole blocks (``torch.cuda.max_memory_allocated``)
    reserved_bytes: int  # segments (``torch.cuda.max_memory_reserved``)


def round_size(nbytes: int) -> int:
    """Return the least size of the block that holds a request; bytes."""
    return -(-nbytes // MIN_BLOCK) * MIN_BLOCK or MIN_BLOCK


def segment_size(size: int) -> int:
    """Return the size of the segment that is reserved for a rounded request; bytes."""
    if size <= MAX_SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE else _round_up(size, ROUND_LARGE)


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


class _Block:
    """A range of addresses, and its neighbours in the segment."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "previous", "size")

    def __init__(self, pool: "_Pool", address: int, size: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.mapped = mapped
        """Whether memory backs it; only expandable segments have unmapped blocks."""

        self.free = True
        self.previous: _Block | None = None
        self.next: _Block | None = None

    @property
    def room(self) -> int:
        """How large it can grow."""
        grows = self.next is not None and not self.next.mapped
        return self.size + (self.next.size if grows and self.next else 0)

    def cut(self, size: int) -> "_Block":
        """Cut the block to a size; return the rest as the next block."""
        rest = _Block(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest


class _Pool:
    """The free blocks of small or of large requests, by size and address."""

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.page = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        self.free: list[tuple[int, int, _Block]] = []
        self.unmapped: list[tuple[int, _Block]] = []

    def insert(self, block: _Block) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: _Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def take(self, size: int) -> _Block | None:
        """Remove and return the best fit among the free blocks."""
        index = bisect_left(self.free, (size,))
        if index == len(self.free):
            return None
        best = self.free[index][2]
        if best.next is not None and best.room > best.size:
            for _, _, other in self.free[index + 1 :]:
                # A block that can grow counts as large as it can become.
                if other.room >= best.room:
                    break
                best = other
                index += 1
        del self.free[index]
        return best


class CachingAllocator:
    """Allocates and frees as PyTorch does on a CUDA device.

    Args:
        limit_bytes: What the device can give; None for no limit.
        expandable: Whether ``PYTORCH_ALLOC_CONF`` has ``expandable_segments``: each pool gets one
            range of addresses, and memory page by page.

    Example:
        >>> allocator = CachingAllocator()
        >>> allocator.allocate("weights", 25_000_000)
        >>> allocator.allocated_bytes, allocator.reserved_bytes
        (25165824, 25165824)
        >>> allocator.free("weights")
        >>> allocator.allocated_bytes, allocator.reserved_bytes
        (0, 25165824)
    """

    def __init__(self, limit_bytes: int | None = None, *, expandable: bool = False) -> None:
        self.requested_bytes = 0
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.retries = 0
        """How often the cache was released to make room (``num_alloc_retries``)."""

        self._most_requested = self._most_allocated = self._most_reserved = 0
        self._limit = limit_bytes
        self._expandable = expandable
        self._small, self._large = _Pool(is_small=True), _Pool(is_small=False)
        self._releasable = (self._large, self._small)
        self._live: dict[Hashable, tuple[_Block, int]] = {}
        self._top = LARGE_SEGMENT

    def allocate(self, key: Hashable, nbytes: int) -> None:
        """Allocate bytes under a key; zero bytes allocate nothing.

        Raises:
            OutOfMemoryError: They do not fit.
        """
        assert key not in self._live
        if nbytes == 0:
            return
        size = round_size(nbytes)
        pool = self._small if size <= MAX_SMALL else self._large
        block = pool.take(size) or self._reserve(pool, size)
        if block is None:
            self.retries += 1
            self.release_cache()
            block = self._reserve(pool, size)
        if block is None:
            raise OutOfMemoryError(
                f"tried to allocate {nbytes:,} bytes; {self.allocated_bytes:,} are allocated and "
                f"{self.reserved_bytes:,} reserved of {self._limit:,}"
            )
        splits_all = block.pool.is_small or self._expandable
        if block.size - size >= (MIN_BLOCK if splits_all else MAX_SMALL + 1):
            pool.insert(block.cut(size))
        block.free = False
        self._live[key] = block, nbytes
        self.allocated_bytes += block.size
        self.requested_bytes += nbytes
        self._most_requested = max(self._most_requested, self.requested_bytes)
        self._most_allocated = max(self._most_allocated, self.allocated_bytes)
        self._most_reserved = max(self._most_reserved, self.reserved_bytes)

    def free(self, key: Hashable) -> None:
        """Free the block of a key, if it has one.

        The block is kept for later requests, so the reserved bytes stay the same.
        """
        if key not in self._live:
            return
        block, nbytes = self._live.pop(key)
        self.allocated_bytes -= block.size
        self.requested_bytes -= nbytes
        block.free = True
        self._insert_merged(block)

    def release_cache(self) -> None:
        """Give unused memory back to the device, as ``torch.cuda.empty_cache`` does."""
        for pool in self._releasable:
            for _, _, block in list(pool.free):
                if self._expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def begin_graph(self) -> None:
        """Release the cache, and take all further requests from the pool of a CUDA graph.

        What that pool has reserved stays, because a replay writes there.
        """
        self.release_cache()
        self._small, self._large = _Pool(is_small=True), _Pool(is_small=False)

    @property
    def peaks(self) -> SimulatedPeaks:
        """The largest values since ``reset_peaks``."""
        return SimulatedPeaks(self._most_requested, self._most_allocated, self._most_reserved)

    def reset_peaks(self) -> None:
        """Let peaks start from what is allocated now."""
        self._most_requested = self.requested_bytes
        self._most_allocated = self.allocated_bytes
        self._most_reserved = self.reserved_bytes

    def _fits(self, nbytes: int) -> bool:
        return self._limit is None or self.reserved_bytes + nbytes <= self._limit

    def _reserve(self, pool: _Pool, size: int) -> _Block | None:
        if self._expandable:
            return self._expand(pool, size)
        total = segment_size(size)
        if not self._fits(total):
            return None
        self.reserved_bytes += total
        return _Block(pool, self._take_addresses(total), total)

    def _take_addresses(self, nbytes: int) -> int:
        """Return the address of a new segment: aligned to pages, and next to no other."""
        address = self._top
        self._top += _round_up(nbytes + 1, LARGE_SEGMENT)
        return address

    @staticmethod
    def _insert_merged(block: _Block) -> _Block:
        """Insert a free block, merged with free neighbours that are mapped as it is."""
        for neighbour in (block.previous, block.next):
            if neighbour is None or not neighbour.free or neighbour.mapped != block.mapped:
                continue
            block.pool.remove(neighbour)
            before = neighbour.address < block.address
            first, second = (neighbour, block) if before else (block, neighbour)
            first.size += second.size
            first.next = second.next
            if second.next is not None:
                second.next.previous = first
            block = first
        block.pool.insert(block)
        return block

    def _expand(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages after a free block until it is large enough; None where memory ends."""
        block = self._find_expandable(pool, size)
        while not block.mapped or block.size < size:
            unmapped = block.next if block.mapped else block
            assert unmapped is not None
            missing = size - block.size if block.mapped else size
            mapped = self._map(unmapped, min(missing, unmapped.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _find_expandable(self, pool: _Pool, size: int) -> _Block:
        """Return the first block of a run, free or unmapped, that can hold a request."""
        for _, block in pool.unmapped:
            before = block.previous
            first = before if before is not None and before.free else block
            room, member = 0, first
            while member is not None and member.free and room < size:
                room += member.size
                member = member.next  # type: ignore[assignment]
            if room >= size:
                return first
        addresses = _ADDRESSES if self._limit is None else self._limit + self._limit // 8
        total = _round_up(max(addresses, size), pool.page)
        block = _Block(pool, self._take_addresses(total), total, mapped=False)
        pool.insert(block)
        return block

    def _map(self, block: _Block, nbytes: int) -> _Block | None:
        """Back the start of an unmapped block with whole pages; return the free block there."""
        size = _round_up(nbytes, block.pool.page)
        if not self._fits(size):
            return None
        block.pool.remove(block)
        if size < block.size:
            block.pool.insert(block.cut(size))
        block.mapped = True
        self.reserved_bytes += size
        return self._insert_merged(block)

    def _unmap(self, block: _Block) -> None:
        """Take the whole pages of a free block away."""
        pool = block.pool
        start = _round_up(block.address, pool.page)
        end = (block.address + block.size) // pool.page * pool.page
        if start >= end:
            return
        pool.remove(block)
        if end < block.address + block.size:
            pool.insert(block.cut(end - block.address))
        if block.address < start:
            head, block = block, block.cut(start - block.address)
            pool.insert(head)
        block.mapped = False
        self.reserved_bytes -= block.size
        self._insert_merged(block)
