"""Records of few blocks nest, or are refused; another batch lies on a line, or is traced."""

import functools

import pytest
from factory import make_experiment

from dpprof.predict.estimate import Traces
from dpprof.predict.memory.allocator_replay import Footprint
from dpprof.predict.memory.events import Allocated, Freed
from dpprof.predict.memory.pattern import Pattern
from dpprof.predict.tracing import trace_whole
from dpprof.subjects.models.blocks import Blocks, NotAlikeError, with_blocks
from dpprof.subjects.setup import import_method

DIMENSIONS = {"vocab_size": 50, "d_model": 16, "layers": 9, "heads": 2}
BLOCKS = Blocks("blocks", 1)


def ignore(_phase) -> None:
    pass


@pytest.fixture(scope="module")
def experiment():
    fields = {"model": DIMENSIONS, "method": "flash-bk", "device": "cuda", "target": "h100"}
    return make_experiment(**fields, batch_size=8)


@pytest.fixture(scope="module")
def trace(experiment):
    """Trace a batch with some blocks, once for all tests."""
    import_method(experiment)

    @functools.cache
    def trace(batch_size: int, blocks: int):
        batch = experiment.model_copy(update={"batch_size": batch_size})
        return trace_whole(with_blocks(batch, blocks), ignore)

    return trace


@pytest.fixture
def recordings(trace):
    return [trace(8, blocks).recording for blocks in (1, 2, 3)]


@pytest.fixture
def traces(experiment, trace):
    traces = Traces(experiment, ignore)
    traces._trace = trace
    return traces


def list_allocated(recording) -> list[tuple]:
    """Name each storage in the order of allocation; those of kernels may have other numbers."""
    numbers = [event.number for event in recording.events if isinstance(event, Allocated)]
    allocated = [recording.storages[number] for number in numbers]
    return [(s.op, s.module, s.phase, s.nbytes, s.shape) for s in allocated]


def test_a_record_that_was_traced_follows_from_smaller_ones(trace, recordings) -> None:
    pattern = Pattern(recordings, BLOCKS)
    for blocks in (1, 3, 9):
        traced = trace(8, blocks).recording
        found = pattern.assemble(blocks, pattern.sizes)
        assert found.marks == traced.marks
        assert len(found.events) == len(traced.events)
        assert list_allocated(found) == list_allocated(traced)
        assert pattern.footprint(blocks, pattern.sizes).peak_bytes == (
            Footprint.of(traced).peak_bytes
        )


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_record_with_an_event_less_does_not_nest(recordings, which) -> None:
    changed = list(recordings)
    events = list(changed[which].events)
    at = next(at for at, event in enumerate(events) if isinstance(event, Freed))
    del events[at]
    marks = tuple(mark - (mark > at) for mark in changed[which].marks)
    launches = [(place - (place > at), one) for place, one in changed[which].launches]
    changed[which] = changed[which]._replace(events=events, marks=marks, launches=launches)

    with pytest.raises(NotAlikeError, match=r"with one more block|comes next"):
        Pattern(changed, BLOCKS)


def test_a_size_that_is_not_affine_in_the_blocks_is_refused(recordings) -> None:
    largest = recordings[2]
    storages = list(largest.storages)
    outside = next(at for at, one in enumerate(storages) if one.layer == "head")
    kept = storages[outside].requested
    storages[outside].requested += 1
    try:
        with pytest.raises(NotAlikeError, match="not affine in the number of blocks"):
            Pattern([*recordings[:2], largest._replace(storages=storages)], BLOCKS)
    finally:
        storages[outside].requested = kept


def test_a_batch_between_others_follows_and_a_third_confirms_it(traces, trace) -> None:
    traced: list[int] = []

    def note(batch_size: int, blocks: int):
        traced.append(batch_size)
        return trace(batch_size, blocks)

    traces._trace = note
    for batch_size in (8, 32, 13):
        found = traces.footprint(batch_size)
    assert set(traced) == {8, 32}

    whole = trace(13, DIMENSIONS["layers"]).recording
    assert found.peak_bytes == Footprint.of(whole).peak_bytes
    assert found.place(None) == Footprint.of(whole).place(None)
    assert traces.confirms(8)  # it does not lie between, so that another one must
    assert set(traced) == {8, 32, 20}
    assert traces.confirms(13)


def test_two_batches_next_to_each_other_confirm_nothing(traces) -> None:
    for batch_size in (8, 9):
        traces.footprint(batch_size)
    [family] = traces._families
    family.followed.add(8)

    assert not traces.confirms(8)


def test_a_batch_a_little_below_others_follows_until_it_is_confirmed(traces, trace) -> None:
    traced: list[int] = []

    def note(batch_size: int, blocks: int):
        traced.append(batch_size)
        return trace(batch_size, blocks)

    traces._trace = note
    told = {batch_size: traces.footprint(batch_size) for batch_size in (20, 32, 13)}
    assert set(traced) == {20, 32}

    assert told[13].peak_bytes == Footprint.of(trace(13, DIMENSIONS["layers"]).recording).peak_bytes
    assert traces.confirms(20)
    assert set(traced) == {20, 32, 13}
    traces.footprint(5)
    assert set(traced) == {20, 32, 13, 5}  # too far below


def test_a_batch_beside_the_line_is_not_confirmed(traces) -> None:
    for batch_size in (8, 32, 13):
        traces.footprint(batch_size)
    [family] = traces._families
    family.sizes[32] = family.sizes[32]._replace(least=family.sizes[32].least + 512)
    traces._footprints.clear()
    assert not traces.confirms(13)
