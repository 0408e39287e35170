"""How many samples to clip at a time, by tries that leave nothing behind."""

import logging

import pytest
import torch
from one_call import Model, load, prepare, train, weights

from dpprof.private.loop import part_size
from dpprof.private.loop.part_size import choose_fastest, choose_largest
from dpprof.private.norms.placement import as_if_on_cuda


@pytest.mark.parametrize(
    ("each_s", "most", "expected"),
    [
        (lambda size: 1 + 1 / size, 12, 12),  # the more, the faster
        (lambda size: 1 + size, 12, 1),
        (lambda size: abs(size - 4) + 1, 100, 4),
        (lambda _: 1.0, 64, 1),  # alike: the least memory
        (lambda size: 1.0 if size > 1 else 1.01, 64, 1),
    ],
)
def test_the_fastest_size_has_the_least_time_for_each_sample(each_s, most, expected) -> None:
    assert choose_fastest(lambda size: size * each_s(size), most) == expected


def test_no_size_is_tried_after_the_time_is_over(monkeypatch) -> None:
    tried = []
    monkeypatch.setattr(part_size, "_MOST_S", -1.0)
    assert choose_fastest(lambda size: tried.append(size) or 1.0, 64) == 1
    assert tried == [1]


@pytest.mark.parametrize(
    ("room", "most", "expected"),
    [(1000, 64, 8), (1000, 5, 5), (10_000, 64, 64), (300, 64, 1)],
)
def test_the_largest_size_fits_by_the_peaks_of_one_and_two(room, most, expected) -> None:
    """100 bytes are held, and each sample takes another 100: at most 900 of 1,000 are used."""
    tried = []

    def measure(size: int) -> int:
        tried.append(size)
        return 100 + 100 * size

    assert choose_largest(measure, room, most) == expected
    assert tried == [1, 2, expected]


def test_a_size_that_does_not_fit_is_halved_once_and_says_so(caplog) -> None:
    def measure(size: int) -> int:
        if size > 2:
            raise torch.OutOfMemoryError("out of memory")
        return 100 + 100 * size

    with caplog.at_level(logging.WARNING, "dpprof"):
        assert choose_largest(measure, 1000, 64) == 4
    assert "max_batch_size 4: 8 were predicted to fit, and do not" in caplog.text


@pytest.mark.parametrize("method", ["flash-bk", "flash"])
def test_tries_leave_nothing_behind(method, monkeypatch) -> None:
    """The training is that of the number that was found, to the bit."""
    best = lambda run, size: run(size) or (1 + abs(size - 4)) * size  # noqa: E731
    monkeypatch.setattr(part_size, "_measure_s", best)
    trained = []
    for most in ("auto", 4):
        torch.manual_seed(5)
        model = Model().double()
        private = prepare(model, max_batch_size=most, method=method)
        assert private.data_loader.max_batch_size == 4
        assert private.optimizer.clipping.batches == 0
        assert not private.optimizer.is_within_a_batch
        assert all(parameter.grad is None for parameter in model.parameters())
        train(private, model)
        trained.append((weights(model), torch.get_rng_state()))
    assert torch.equal(trained[0][0], trained[1][0])
    assert torch.equal(trained[0][1], trained[1][1])


def test_a_resumed_run_has_parts_of_the_same_size(monkeypatch) -> None:
    found = iter([2, 5])
    monkeypatch.setattr(part_size, "choose_fastest", lambda *_: next(found))
    first, again = (prepare(Model().double(), max_batch_size="auto") for _ in range(2))
    again.load_state_dict(first.state_dict(exact=True), exact=True)
    assert again.data_loader.max_batch_size == 2


def test_memory_of_a_gpu_is_asked_for_beside_what_is_held(monkeypatch) -> None:
    """1,000 bytes are free, 300 reserved; AdamW will need 16 for each of 50 parameters."""
    asked = {}
    names = ("mem_get_info", "memory_reserved", "reset_peak_memory_stats", "max_memory_allocated")
    values = ((1000, 2000), 300, None, 7)
    for name, value in zip(names, values, strict=True):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    choose = lambda peak, room, most: asked.update(room=room, peak=peak(3)) or most  # noqa: E731
    monkeypatch.setattr(part_size, "choose_largest", choose)
    model = Model().double()
    adamw = torch.optim.AdamW(model.parameters())
    with as_if_on_cuda():
        private = prepare(
            model, optimizer=adamw, max_batch_size="auto", data_loader=load(batch_size=4)
        )
    assert asked == {"room": 1000 + 300 - 2 * 8 * 50, "peak": 7}
    assert private.data_loader.max_batch_size == 4 + 4 * 2
