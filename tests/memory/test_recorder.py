"""What is recorded, and that recording holds on to nothing."""

import gc
import weakref

import pytest
import torch
from memory_steps import workspaces
from torch import Tensor

from dpprof.predict.memory.events import Op
from dpprof.predict.memory.recorder import Recorder
from dpprof.predict.memory.simulated_cuda import library_workspaces
from dpprof.predict.memory.timeline import MemoryTimeline


def make_recorder(**options) -> Recorder:
    return Recorder(**{"is_there": lambda *_: True} | options)


def births(recorder: Recorder) -> list[int]:
    return [storage.nbytes for storage in recorder.storages]


def alive(recorder: Recorder) -> int:
    """Bytes that were born and have not died."""
    return int(MemoryTimeline(recorder, {}, (0, len(recorder.events))).totals[-1])


def test_views_and_in_place_operators_bear_nothing_and_the_last_view_ends_a_storage() -> None:
    with make_recorder() as recorder:
        x = torch.ones(8, 4)
        x.view(2, 16).t()[0].add_(1)
        view = x.reshape(4, 8).detach().mul_(2)
        del x
        assert alive(recorder) == 8 * 4 * 4
        del view

    assert births(recorder) == [8 * 4 * 4]
    assert alive(recorder) == 0


def test_a_storage_that_is_emptied_dies_and_one_that_is_filled_is_born() -> None:
    with make_recorder() as recorder:
        x = torch.ones(8)
        x.untyped_storage().resize_(0)
        assert (alive(recorder), recorder.find(x)) == (0, None)
        x.untyped_storage().resize_(32)
        assert (alive(recorder), recorder.find(x)) == (32, 1)
        x.untyped_storage().resize_(16)
        assert alive(recorder) == 16
        del x

    assert (births(recorder), alive(recorder)) == ([32, 32, 16], 0)


def test_no_tensor_is_kept_alive() -> None:
    with make_recorder() as recorder:
        recorder.counting = recorder.describing = True
        x = torch.ones(100)
        y = x * 2 + torch.rand(100)
        seen = [weakref.ref(tensor.untyped_storage()) for tensor in (x, y)]
        del x, y
        gc.collect()

    assert [ref() for ref in seen] == [None, None]
    assert alive(recorder) == 0


def test_sizes_are_rounded_up_to_blocks_and_what_lives_elsewhere_does_not_count() -> None:
    with make_recorder(block_bytes=512, is_there=lambda tensor, _: tensor.dim() > 0) as recorder:
        held = [torch.ones(1), torch.tensor(1.0), torch.ones(128), torch.ones(129)]

    assert births(recorder) == [512, 512, 1024]
    assert len(held) == 4


def test_workspace_is_taken_and_given_back_in_one_operator() -> None:
    taken = {torch.ops.aten.mm: lambda a, b: (a.shape[0] * b.shape[1], 0, 4)}
    with make_recorder(workspaces=taken) as recorder:
        torch.ones(3, 4) @ torch.ones(4, 5)

    assert workspaces(recorder) == workspaces(recorder, "mm") == [15, 4]
    assert alive(recorder) == 0


def test_calls_are_described_only_where_they_are_asked_for() -> None:
    with make_recorder() as recorder:
        recorder.counting = True
        torch.ones(2) + 1
        recorder.describing = True
        torch.ones(3) + 1

    calls = [event.call for event in recorder.events if isinstance(event, Op)]
    assert [bool(call) for call in calls] == [False, False, True, True]
    assert '"aten.add.Tensor"' in calls[-1]


def test_cublas_takes_its_workspaces_with_a_threads_first_product_for_good() -> None:
    names = [
        "cuBLAS workspace, forward",
        "cuBLAS workspace, backward",
        "cuBLASLt workspace, forward",
    ]
    with make_recorder() as recorder:
        recorder.handles = dict(zip(names, (100, 200, 10), strict=True))
        x = torch.ones(3, 3, requires_grad=True)
        loss = x.sum()
        assert len(recorder.storages) == 2
        loss = (x @ x).sum()
        loss.backward()
        (x @ x).sum().backward()
        torch.addmm(torch.ones(3, 3), x, x)
        assert len(recorder.handles) == 1
        torch.addmm(torch.ones(3), x, x)

    taken = [(s.nbytes, s.phase, s.op) for s in recorder.storages if "workspace" in s.roles]
    assert taken == list(zip((100, 200, 10), ["setup"] * 3, names, strict=True))
    assert alive(recorder) >= 310


@pytest.mark.parametrize(("shared", "sizes"), [(True, [2**25]), (False, [2**25, 2**20])])
def test_cublaslt_shares_its_workspace_where_pytorch_is_new(shared, sizes, monkeypatch) -> None:
    if shared:
        monkeypatch.setattr(torch.backends.cuda, "blas_workspace_size", None, raising=False)
    else:
        monkeypatch.delattr(torch.backends.cuda, "blas_workspace_size", raising=False)

    assert list(library_workspaces("9.0", "forward").values()) == sizes
    assert library_workspaces("8.0", "forward")["cuBLAS workspace, forward"] == 8320 * 2**10


def test_the_function_is_the_innermost_that_is_no_plumbing() -> None:
    def inner() -> list[Tensor]:
        return [torch.nn.functional.gelu(torch.ones(4)) for _ in range(1)]

    with make_recorder() as recorder:
        inner()

    # A nested function counts as the one that it is written in.
    assert {storage.function for storage in recorder.storages} == {
        f"{__name__}:test_the_function_is_the_innermost_that_is_no_plumbing"
    }
