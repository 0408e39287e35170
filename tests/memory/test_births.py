"""Functions are known by themselves: what they allocate is found under whatever name."""

from collections.abc import Callable

import pytest
import torch
from memory_steps import keep, keep_once
from torch import Tensor, nn

from dpprof.experiments.config import registry
from dpprof.experiments.records.terms import COMPONENTS
from dpprof.predict.memory.recorder import Recorder
from dpprof.private.allocation_marks import MARKED, allocates, codes_of, components_by_code
from dpprof.private.contributions.contributions import AT_ONCE_BYTES
from dpprof.private.contributions.sample_gradients import SampleGradients
from dpprof.private.engine.batch import sum_whole
from dpprof.private.engine.book_keeping import BookKeeping
from dpprof.private.layers.head import _Kept
from dpprof.private.noise import noise_keys
from dpprof.private.noise.digest import LANES, hash_rows
from dpprof.private.noise.noise import NoiseOfStep, draw_secure_noise
from dpprof.private.noise.noise_keys import NoiseKeys
from dpprof.private.norms.placement import as_if_on_cuda
from dpprof.private.ranks import ranks
from dpprof.private.ranks.shards import make_buffer


@pytest.fixture
def marked(monkeypatch) -> None:
    """Forget the marks of a test."""
    monkeypatch.setattr("dpprof.private.allocation_marks.MARKED", dict(MARKED))


def test_everything_that_is_marked_or_declared_is_seen_in_a_step() -> None:
    """Whatever Opacus or this repository stops calling would be attributed to others."""
    methods = registry.names("methods")
    declared = {one for name in methods for one in registry.load("methods", name).births}
    # Few tokens have flash clipping multiply Gram matrices.
    steps = [*(keep_once(name) for name in methods), keep("flash", seq_len=4)]
    steps += [keep("flash-bk", head=head) for head in ("chunked", "kept")]
    steps.append(keep("flash-bk", noise_strategy="banded-2"))
    seen = {storage.code for step in steps for storage in step._storages}
    with Recorder(is_there=lambda *_: True) as recorder:  # no method has a secure mode
        draw_secure_noise(1.0, torch.zeros(2), None)
        keys, long_sum = NoiseKeys(), torch.zeros(2**20 + 1)  # as a large model has
        keys.begin(1, [long_sum], 1.0)
        NoiseOfStep(1.0, 1, keys.bind([long_sum])).add_to(long_sum)
        hash_rows(torch.zeros(8, dtype=torch.int32), torch.zeros(2, LANES, dtype=torch.int64))
        sum_whole(SampleGradients(torch.ones(2, 3)), torch.ones(2))  # ranks with shards do
        make_buffer(torch.ones(2), 2, 3)
        kept = _Kept(torch.zeros(2, 1, 3), AT_ONCE_BYTES)  # of samples that came in two parts
        for _ in range(2):
            kept.make(torch.zeros(1, 3), torch.zeros(4, 3))
        kept.of(slice(0, 2))
        with as_if_on_cuda():  # where small sums are joined
            noise_keys._as_words([torch.zeros(2), torch.zeros(3)])
        ranks._add_noise_together([torch.zeros(2), torch.zeros(3)], lambda flat: flat.add_(1))
        convolution = nn.Conv2d(64, 64, 3)  # no method's model has one
        convolution.register_buffer("offset", torch.ones(2))  # nor what must not change
        clipping = BookKeeping(convolution, 1.0)
        clipping.backward(convolution(torch.ones(2, 64, 4, 4)).sum((1, 2, 3)))
    seen |= {storage.code for storage in recorder.storages}
    own = {function for function in MARKED if function.__module__.startswith("dpprof.")}

    assert len(own) >= 6
    assert len(declared) >= 4
    assert [one for one in own | declared if seen.isdisjoint(codes_of(one))] == []


def test_components_of_marks_exist() -> None:
    of_methods = [registry.load("methods", name).births for name in registry.names("methods")]

    assert {c for births in (MARKED, *of_methods) for c in births.values()} <= set(COMPONENTS)


def owners_of(run: Callable[[], object], births: dict) -> list[str | None]:
    with Recorder(is_there=lambda *_: True) as recorder:
        run()
    codes = components_by_code(births)
    return [codes.get(storage.code) for storage in recorder.storages]


def draw() -> list[Tensor]:
    return [torch.ones(2) for _ in range(2)]


def test_births_follow_the_code_of_functions(marked) -> None:
    """Under any name, through a wrapper, and within; but not into functions that are called."""
    renamed = draw
    renamed.__name__ = renamed.__qualname__ = "made_otherwise"

    @allocates("noise")
    @torch.no_grad()
    def outer() -> list[Tensor]:
        def inner() -> Tensor:
            return torch.ones(2)

        return [inner(), *draw()]

    assert owners_of(renamed, {renamed: "noise"}) == ["noise", "noise"]
    assert owners_of(draw, {}) == [None, None]
    assert owners_of(outer, {}) == ["noise", None, None]
    # What a method declares comes before marks.
    assert owners_of(outer, {outer: "norm_samples"}) == ["norm_samples", None, None]


@pytest.mark.parametrize("name", ["dpprof.private.noise.noise:draw_noise", len, None])
def test_what_is_no_function_of_python_is_an_error(name) -> None:
    with pytest.raises(TypeError, match="births must name functions written in Python"):
        components_by_code({name: "noise"})
