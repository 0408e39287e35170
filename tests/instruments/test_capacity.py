"""The largest batch, found by few estimates, and true by the instrument that would tell."""

import pytest
from factory import make_experiment
from hypothesis import given, settings
from hypothesis import strategies as st

from dpprof.experiments.records.step_costs import Allocator
from dpprof.predict import capacity, tracing
from dpprof.predict import estimate as estimating
from dpprof.predict.capacity import back_off, search
from dpprof.predict.estimate import Traces, _Family, estimate
from dpprof.predict.memory.pattern import Pattern, Sizes
from dpprof.private.errors import UnsupportedError

MODEL = {"vocab_size": 50, "d_model": 16, "layers": 1, "heads": 2}
TARGET = {"memory_bytes": "1GiB", "flops_per_s": 1e12, "bandwidth_bytes_per_s": 1e11}


LINES = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 50)), min_size=1, max_size=4)
BUDGETS = st.lists(st.integers(0, 50_000), min_size=2, max_size=3)


@settings(deadline=None)
@given(LINES, st.integers(1, 20), st.integers(20, 2000), BUDGETS)
def test_the_answer_is_that_of_trying_every_batch(lines, least, most, budgets) -> None:
    """The peak is the highest of a few straight lines; what is known is asked for once."""
    asked, known = [], {}

    def peak(batch: int) -> int:
        return max(at_zero + slope * batch for at_zero, slope in lines)

    for budget in budgets:
        found = search(
            lambda batch: asked.append(batch) or peak(batch), budget, known, least=least, most=most
        )
        fitting = [batch for batch in range(least, most + 1) if peak(batch) <= budget]
        assert found == max(fitting, default=None)
        assert all(known[batch] == peak(batch) for batch in known)
    assert min(asked) == least
    assert len(asked) == len(set(asked)) <= 24 * len(budgets)


@settings(deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(0, 999))
def test_backing_off_ends_between_a_batch_that_holds_and_one_that_does_not(
    data, least, beyond
) -> None:
    most, asked = least + beyond, []
    last = data.draw(st.integers(least - 1, most))
    guess = data.draw(st.none() | st.integers(0, most))
    found = back_off(
        lambda batch: asked.append(batch) or batch <= last,
        most,
        None if guess is None else lambda: guess,
        least=least,
    )

    assert found == (last if last >= least else None)
    assert min(asked) >= least
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize(("guess", "most_asked"), [(16, 3), (17, 3), (14, 5), (22, 7), (None, 7)])
def test_backing_off_asks_few_batches_with_a_good_guess(guess, most_asked) -> None:
    asked = []
    found = back_off(
        lambda batch: asked.append(batch) or batch <= 16, 24, guess and (lambda: guess)
    )
    assert found == 16
    assert len(asked) == len(set(asked)) <= most_asked


@pytest.mark.parametrize(
    "method",
    [
        "flash-bk",
        *(pytest.param(f"opacus-{n}", marks=pytest.mark.slow) for n in ("hooks", "ghost")),
    ],
)
def test_the_answers_batch_runs_in_a_process_of_its_own_and_one_more_does_not(
    method, monkeypatch
) -> None:
    traced = []
    trace = estimating.trace_whole
    monkeypatch.setattr(
        estimating,
        "trace_whole",
        lambda one, *rest, **options: traced.append(one) or trace(one, *rest, **options),
    )
    # With so many tokens, gradients of single samples are large, and few fit.
    fields = {"model": MODEL | {"vocab_size": 2000}, "method": method, "seq_len": 32}
    fields |= {"target": TARGET, "memory_limit_bytes": 24 * 2**20}
    found = capacity.measure(make_experiment(device="cuda", **fields), lambda _: None)
    told = found.capacity

    sizes = told.batch_size, told.batch_size + 1, told.safe_batch_size
    largest, more, safe = (place(size, fields) for size in sizes)
    assert largest.fits
    assert not more.fits
    assert largest.reserved_bytes == told.reserved_bytes
    assert largest.allocated_bytes == told.peak_bytes
    assert (safe.retries, safe.allocated_bytes) == (0, told.safe_peak_bytes)
    assert safe.reserved_bytes <= 24 * 2**20
    assert found.memory.allocator == safe
    assert found.memory.peak_allocated_bytes == told.safe_peak_bytes
    assert found.compute.executed_flops > 0
    assert told.batch_size <= told.unfragmented_batch_size
    assert told.limited_by in {"memory", "fragmentation"}
    assert len(traced) < 30


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [1.4, 0.7])
def test_a_guess_that_is_not_confirmed_changes_no_answer(wrong, monkeypatch) -> None:
    fields = {"model": MODEL | {"layers": 7}, "method": "standard", "seq_len": 32}
    fields |= {"device": "cuda", "target": TARGET, "memory_limit_bytes": 24 * 2**20}
    experiment = make_experiment(**fields)
    right = capacity.measure(experiment, lambda _: None)
    guess = Pattern.guess
    guessed = []

    def guess_wrongly(pattern: Pattern, *given) -> Sizes:
        guessed.append(given)
        return Sizes(*((wrong * one).astype(one.dtype) for one in guess(pattern, *given)))

    monkeypatch.setattr(Pattern, "guess", guess_wrongly)
    found = capacity.measure(experiment, lambda _: None)

    ignored = {"estimates", "next_peak_bytes"}
    told, wanted = found.capacity, right.capacity
    assert guessed
    assert found.memory == right.memory
    assert told.model_dump(exclude=ignored) == wanted.model_dump(exclude=ignored)
    for batch_size in told.estimates.keys() & wanted.estimates.keys():
        assert told.estimates[batch_size] == wanted.estimates[batch_size]


@pytest.mark.slow
def test_a_large_batch_with_steps_of_its_own_needs_few_traces(monkeypatch) -> None:
    """From 513 samples the norm of a lookup takes its columns in four parts."""
    fields = {"model": MODEL | {"d_model": 64, "layers": 7}, "method": "flash-bk", "seq_len": 512}
    fields |= {"device": "cuda", "target": TARGET, "memory_limit_bytes": 13 * 2**30}
    experiment, traced = make_experiment(**fields), []
    trace = Traces._trace
    monkeypatch.setattr(
        Traces,
        "_trace",
        lambda traces, *key: traced.append(key) or trace(traces, *key),
    )
    told = capacity.measure(experiment, lambda _: None).capacity
    assert told.safe_batch_size > 512
    assert len(set(traced)) <= 10

    monkeypatch.setattr(_Family, "reaches", lambda family, batch: family.has_measured(batch))
    wanted = capacity.measure(experiment, lambda _: None).capacity
    ignored = {"estimates", "next_peak_bytes"}
    assert told.model_dump(exclude=ignored) == wanted.model_dump(exclude=ignored)


def test_on_a_cpu_a_safe_batch_leaves_a_tenth_of_the_memory() -> None:
    fields = {"model": MODEL, "method": "standard", "seq_len": 32}
    told = capacity.measure(
        make_experiment(**fields, target="cpu", memory_limit_bytes=2**18), lambda _: None
    ).capacity

    def predict(batch_size: int) -> int:
        experiment = make_experiment(**fields, target="cpu", batch_size=batch_size)
        return estimate(experiment, lambda _: None).memory.peak_allocated_bytes

    assert predict(told.batch_size) == told.peak_bytes <= 2**18
    assert predict(told.batch_size + 1) == told.next_peak_bytes > 2**18
    assert predict(told.safe_batch_size) == told.safe_peak_bytes <= 0.9 * 2**18
    assert (told.safe_share, told.reserved_bytes, told.limited_by) == (0.9, None, "memory")


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(
            {"device": "cuda", "target": TARGET, "memory_limit_bytes": 80 * 2**20},
            marks=pytest.mark.slow,
        ),
        {"target": "cpu", "memory_limit_bytes": 3 * 2**18},
    ],
)
def test_adaptive_clipping_starts_at_the_smallest_batch_that_pays_for_its_count(fields) -> None:
    fields = fields | {"model": MODEL, "method": "opacus-adaptive", "seq_len": 32}
    fields |= {"noise_multiplier": 0.55}
    found = capacity.measure(make_experiment(**fields), lambda _: None).capacity

    assert found.smallest_batch_size == 6 <= min(found.estimates) < found.safe_batch_size
    largest = make_experiment(**fields, batch_size=found.batch_size)
    predicted = estimate(largest, lambda _: None)
    assert predicted.memory.peak_allocated_bytes == found.peak_bytes
    with pytest.raises(UnsupportedError, match=r"more than 10 x noise_multiplier = 5.5 samples"):
        estimate(make_experiment(**fields, batch_size=5), lambda _: None)


def test_a_smallest_batch_that_does_not_fit_says_what_it_needs() -> None:
    fields = {"model": MODEL, "method": "opacus-adaptive", "seq_len": 32, "device": "cuda"}
    needed = estimate(
        make_experiment(**fields, target=TARGET, batch_size=11), lambda _: None
    ).memory.peak_allocated_bytes
    with pytest.raises(
        MemoryError,
        match=f"needs {needed / 2**20:,.0f} MiB for its smallest batch, 11 samples of 32 tokens",
    ):
        capacity.measure(
            make_experiment(**fields, target=TARGET, memory_limit_bytes=needed - 1), lambda _: None
        )


@pytest.mark.parametrize("noise_multiplier", [6553.6, 1e308])
def test_a_smallest_batch_beyond_what_is_tried_is_refused(noise_multiplier) -> None:
    experiment = make_experiment(
        method="opacus-adaptive", target="cpu", noise_multiplier=noise_multiplier
    )
    with pytest.raises(UnsupportedError, match=r"and none of more than 65,536 is tried"):
        capacity.measure(experiment, lambda _: None)


def test_one_at_a_time_needs_three_estimates() -> None:
    fields = {"model": MODEL, "method": "microbatch", "seq_len": 64, "target": TARGET}
    fields |= {"device": "cuda"}
    found = capacity.measure(make_experiment(**fields), lambda _: None).capacity
    five = estimate(make_experiment(**fields, batch_size=5), lambda _: None)
    three = estimate(make_experiment(**fields, batch_size=3), lambda _: None)

    assert found.extrapolated
    assert found.limited_by == "search"
    few, more = three.memory.peak_allocated_bytes, five.memory.peak_allocated_bytes
    grown = (more - few) / 2 * (capacity.MOST - 3)
    assert found.peak_bytes == pytest.approx(few + grown, rel=0.01)
    # Segments grow in steps, of which three samples may show none; the peak grows in any case.
    assert five.memory.peak_reserved_bytes == three.memory.peak_reserved_bytes
    assert found.reserved_bytes == pytest.approx(three.memory.peak_reserved_bytes + grown, rel=0.01)


NF4 = {"model": "hf:tiny-llama", "method": "flash-bk", "quantization": "nf4"}
NF4 |= {"lora": {"rank": 4, "target_modules": ["q_proj"]}}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"method": "microbatch", "target": "cpu", "memory_limit_bytes": "10KiB"},
            "with microbatch needs 0 MiB for one sample",
        ),
        (
            {"model": "small", "target": TARGET, "device": "cuda", "memory_limit_bytes": "100MiB"},
            r"small with standard needs \d+ MiB for one sample of 64",
        ),
        (
            {**NF4, "device": "cuda", "target": "l4", "memory_limit_bytes": "4KiB", "seq_len": 8},
            r"needs .* for one sample .* its parameters alone take .*, or take a larger card",
        ),
    ],
)
def test_too_little_memory_for_one_sample_says_what_it_needs(fields, sentence) -> None:
    with pytest.raises(MemoryError, match=sentence):
        capacity.measure(
            make_experiment(**{"model": MODEL, "seq_len": 64} | fields), lambda _: None
        )


@pytest.mark.parametrize(
    ("limit", "batches"), [("100MiB", {1}), ("115MiB", {11, 1})], ids=["parameters", "one sample"]
)
def test_where_parameters_alone_are_too_large_one_batch_is_traced(
    monkeypatch, limit, batches
) -> None:
    traced = set()

    def trace(experiment, *given, **named) -> tracing.Traced:
        traced.add(experiment.batch_size)
        return tracing.trace_whole(experiment, *given, **named)

    monkeypatch.setattr(estimating, "trace_whole", trace)
    fields = {"model": "small", "seq_len": 64, "target": TARGET, "device": "cuda"}
    with pytest.raises(MemoryError, match="needs"):
        capacity.measure(make_experiment(**fields, memory_limit_bytes=limit), lambda _: None)
    assert traced == batches


def test_a_gpu_that_nobody_knows_needs_a_target(monkeypatch) -> None:
    monkeypatch.setattr(tracing, "visible_gpus", list)
    with pytest.raises(UnsupportedError, match="give a target"):
        capacity.measure(make_experiment(device="cuda"), lambda _: None)


GPT2 = {"vocab_size": 50257, "d_model": 768, "layers": 12, "heads": 12}
LONG = {"model": "1b", "seq_len": 2048, "dtype": "bfloat16"}
STRANDED = {"model": GPT2, "method": "opacus-hooks", "seq_len": 512, "target": "l4"}
CASES = [pytest.param(STRANDED, id="l4")]
CASES += [
    pytest.param(LONG | {"method": method, "target": target}, id=f"{target}-{method}")
    for target in ("h200", "h100")
    for method in ("standard", "opacus-ghost", "flash-bk")
]


def place(batch_size: int, fields: dict[str, object]) -> Allocator:
    experiment = make_experiment(device="cuda", batch_size=batch_size, **fields)
    return estimate(experiment, lambda _: None).memory.allocator


@pytest.mark.slow
@pytest.mark.parametrize("fields", CASES)
def test_the_largest_batch_runs_and_one_sample_more_does_not(fields: dict[str, object]) -> None:
    told = capacity.measure(make_experiment(device="cuda", **fields), lambda _: None).capacity

    assert place(told.batch_size, fields).fits
    assert not place(told.batch_size + 1, fields).fits
    assert place(told.safe_batch_size, fields).retries == 0


@pytest.mark.slow
def test_gpt2_small_with_hooks_strands_gigabytes_on_an_l4() -> None:
    """By size alone 24 samples fit; the allocator runs out of memory from 17 on."""
    found = {batch_size: place(batch_size, STRANDED) for batch_size in (16, 17)}
    assert found[16].fits
    assert found[16].retries == 0
    assert not found[17].fits
    assert found[17].allocated_bytes < found[17].limit_bytes - 5 * 2**30
    assert found[17].expandable_reserved_bytes < found[17].limit_bytes
