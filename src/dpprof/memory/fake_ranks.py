"""Rank 0 of a process group that has no other processes, for predictions."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed
from torch._C._distributed_c10d import Reducer

from dpprof.system.substitutes import substitute


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Be rank 0 of so many ranks within; collectives return at once and move nothing.

    DDP keeps the buckets that it makes at first. Once it knows in which order gradients come, it
    would compare new ones with other ranks, which needs elements; they have as many bytes.
    """
    if world_size == 1:
        yield
        return
    # Importing it registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    distributed.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        with substitute(Reducer, "_rebuild_buckets", lambda _: False):
            yield
    finally:
        distributed.destroy_process_group()
