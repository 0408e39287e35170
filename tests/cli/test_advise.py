"""``dpprof advise``: what it says of invented results, and of real ones."""

import functools
import json

import pytest
from factory import make_capacity, make_experiment, write_synthetic, write_synthetic_verdict
from scripts import ASKED, HERE, MODEL, ROOT, call

from dpprof.cli.advise import explain_batches, format_advice, list_smallest_ranks
from dpprof.instruments.estimate import estimate
from dpprof.planning.code_digest import verdict_digest
from dpprof.records.advice import Advice, Option
from dpprof.records.result import read_result
from dpprof.spec import registry

WHERE = "64 tokens, bfloat16, on h100"
SIZES = "largest batch   peak  safe batch"
NUMBERS = f"{SIZES}  tokens/s   90 % interval  FLOPs x"
NARROW = "largest batch  peak  safe batch  tokens/s  90 % interval  FLOPs x"
SURE = {"sure_of_memory": "by sums", "sure_of_time": "by bounds"}
MEMORY = ["Memory: 9 MiB; by sums.", "Time: by bounds."]


def make(*options: Option, **others) -> Advice:
    named = {"model": "hf-m", "seq_len": 64, "dtype": "bfloat16", "target": "h100"}
    return Advice(**named, budget_bytes=9 * 2**20, options=options, **SURE, **others)


def option(method: str, verdict: str, batch: int | None = None, **others) -> Option:
    numbers = {"largest_batch_size": batch, "safe_batch_size": batch, "verified": True}
    tokens = 1000.0 * (batch or 0)
    speed = {"tokens_per_s": tokens, "dp_flop_multiplier": 1.5, "largest_peak_bytes": 2**21}
    speed |= {"tokens_per_s_low": 0.9 * tokens, "tokens_per_s_high": 1.1 * tokens}
    fits = numbers | speed if batch else {"verified": True}
    return Option(method=method, verdict=verdict, private=method != "standard", **fits | others)


def test_one_table_says_what_fits() -> None:
    searched = option("standard", "baseline", 9, limited_by="search")
    lines = format_advice(make(option("flash-bk", "first", 8), searched)).splitlines()

    assert lines == [
        f"Use flash-bk with batches of 8: hf-m, {WHERE}.",
        f"method    verdict   {NUMBERS}",
        "flash-bk  first                 8  2 MiB           8     8,000  7,200 to 8,800     1.50",
        "standard  baseline             9+  2 MiB           9     9,000  8,100 to 9,900     1.50",
        *MEMORY,
    ]


def test_adapters_and_whole_training_stand_side_by_side() -> None:
    whole = make(
        option("standard", "does not fit", message="standard needs more"),
        option("flash-bk", "does not fit", message="flash-bk needs more"),
    )
    adapted = make(
        option("flash-bk", "first", 8),
        option("standard", "baseline", 9),
        lora="rank 16, alpha 32",
        whole=whole,
    )
    lines = format_advice(adapted).splitlines()

    assert lines[:2] == [
        f"Use flash-bk with batches of 8: hf-m with LoRA (rank 16, alpha 32), {WHERE}.",
        f"No private method safely fits: hf-m, {WHERE}.",
    ]
    assert lines[2].split() == ["LoRA", "whole"]
    assert lines[3] == f"method    verdict   {NUMBERS}  verdict       {NARROW}"
    assert lines[3].index("verdict", 20) == lines[2].index("whole")
    assert lines[4].endswith("1.50  does not fit")
    assert lines[6:] == [
        "standard (whole): standard needs more",
        "flash-bk (whole): flash-bk needs more",
        *MEMORY,
    ]


def test_reasons_are_given_once_and_with_the_smallest_batch() -> None:
    refused = {"message": "use reentrant"}
    lines = format_advice(
        make(
            option("opacus-ghost", "first", 8, smallest_batch_size=1),
            option("opacus-adaptive", "close", 8, smallest_batch_size=11),
            option("opacus-hooks", "failed", **refused),
            option("opacus-ew", "failed", **refused),
        )
    ).splitlines()

    assert lines[1] == "No difference predicted between it and: opacus-adaptive."
    assert lines[-4:-2] == [
        "opacus-adaptive: takes at least 11 samples",
        "opacus-hooks, opacus-ew: use reentrant",
    ]


def test_free_memory_in_pieces_is_explained(tmp_path) -> None:
    pieces = {"limited_by": "fragmentation", "unfragmented_batch_size": 12}
    found = make_capacity(safe_share=None, **pieces)
    experiment = make_experiment(method="flash")

    assert explain_batches(
        [write_synthetic(tmp_path, experiment, instrument="capacity", recorded=found)]
    ) == [
        "Safe: the allocator never has to release its cache to find room.",
        (
            "flash: free memory is in pieces too small for 11 samples; by size 12 fit, with "
            "PYTORCH_ALLOC_CONF=expandable_segments:True 0"
        ),
    ]


def test_the_smallest_number_of_gpus_is_listed(tmp_path) -> None:
    outcomes = {("standard", 1): "oom", ("standard", 4): "ok", ("flash", 1): "oom"}
    results = [
        write_synthetic(
            tmp_path,
            make_experiment(
                method=method, parallel=None if size == 1 else f"kind=fsdp,world_size={size}"
            ),
            instrument="capacity",
            recorded=make_capacity(),
            outcome=outcome,
        )
        for (method, size), outcome in (outcomes | {("flash", 4): "unsupported"}).items()
    ]

    assert list_smallest_ranks(results) == [
        "smallest number of GPUs: standard 4",
        "on none of 1, 4: flash",
    ]
    assert list_smallest_ranks(results[::2]) == []


@pytest.mark.slow
def test_ranks_are_searched_one_number_after_the_other(tmp_path) -> None:
    # Weights, gradients and AdamW's state take 97 MiB, and on each of four ranks 24 MiB.
    model = "{vocab_size: 16, d_model: 256, layers: 8, heads: 1}"
    fields = ["--model", model, "--seq-len=2", "--target=cpu", "--memory-limit-bytes=60MiB"]
    ranks = ["--methods", "standard", "microbatch", "--world-sizes", "4", "1", "--json=ranks.json"]
    done = call("advise", *fields, *ranks, cwd=tmp_path)
    alone, four = json.loads((tmp_path / "ranks.json").read_text())

    assert (alone["parallel"], four["parallel"]) == (None, "fsdp x4")
    for advice, standard in ((alone, "does not fit"), (four, "baseline")):
        verdicts = {one["method"]: one["verdict"] for one in advice["options"]}
        assert verdicts["standard"] == standard
        assert verdicts["microbatch"] in ("does not fit", "failed")
    assert "smallest number of GPUs: standard 4\non none of 1, 4: microbatch" in done.stdout


def test_what_does_not_fit_says_how_much_it_needs_and_is_kept(tmp_path) -> None:
    target = "{memory_bytes: 1MiB, flops_per_s: 1e12, bandwidth_bytes_per_s: 1e11}"
    options = ["--target", target, "--methods", "standard", "--json=c.json"]
    done = call("advise", "--model", MODEL, "--seq-len=8", *options, cwd=tmp_path)

    assert done.returncode == 1  # libraries alone take more than 1 MiB
    [found] = json.loads((tmp_path / "c.json").read_text())["options"]
    assert found["verdict"] == "does not fit"
    assert "custom with standard needs" in found["message"]
    assert "and there are 1 MiB" in found["message"]
    [kept] = (tmp_path / "results" / "capacity").glob("*.r0.json")
    assert read_result(kept).error.message == found["message"]


def test_advice_rests_on_results_that_are_kept(asked) -> None:
    advice, said = json.loads((asked / "advice.json").read_text()), (asked / "said").read_text()

    assert [option["method"] for option in advice["options"]] == ["flash-bk", "standard"]
    assert [option["verdict"] for option in advice["options"]] == ["first", "baseline"]
    for one in advice["options"]:
        assert (one["safe_batch_size"], one["largest_batch_size"]) == (8, 10)
        assert (one["safe_peak_bytes"], one["largest_peak_bytes"]) == (890, 990)
    assert said.startswith("Use flash-bk with batches of 8: custom, 8 tokens")
    assert "flash-bk\N{DAGGER}  first" in said
    assert "\N{DAGGER} Not verified here to compute the right gradient" in said


VERDICTS = {
    "another mechanism": (
        {"mechanism": "hooked clipping"},
        ["flash-bk\N{DOUBLE DAGGER}  first", "\N{DOUBLE DAGGER} Another mechanism than flat clip"],
    ),
    "a wrong gradient": (
        {"passed": False, "reason": "it differs"},
        ["No private method can be advised: ", "flash-bk: its gradient is wrong: it differs"],
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_a_verdict_is_respected(case, asked) -> None:
    told, sentences = VERDICTS[case]
    digest = verdict_digest("built-in", "flash-bk")
    write_synthetic_verdict(asked, make_experiment(method="flash-bk"), **told, code_digest=digest)
    said = call("advise", *ASKED[:-2], "flash-bk", *HERE, cwd=asked).stdout
    (asked / "results" / "verify" / "built-in-flash-bk.json").unlink()

    for sentence in sentences:
        assert sentence in said


BAD = {
    "unknown target": (["--target=h300"], "--target: 'h300' is not allowed; did you mean 'h200'"),
    "no target": ([], "--target: missing; a target's name"),
    "half a target": (
        ["--target={memory_bytes: 1GiB}"],
        "--target: missing flops_per_s, bandwidth_bytes_per_s",
    ),
    "no memory": (
        ["--target=h200", "--memory-limit-bytes=0"],
        "--memory-limit-bytes: '0' is not allowed; it must be a number of bytes above 0",
    ),
    "unknown method": (
        ["--target=h200", "--methods", "opacus-gost"],
        "--methods: 'opacus-gost' is not allowed; did you mean 'opacus-ghost'",
    ),
    "two numbers of ranks": (
        ["--target=l4", "--world-sizes=2", "--parallel=kind=ddp,world_size=4"],
        "--parallel: 'kind=ddp,world_size=4' is not allowed; --world-sizes says how many ranks; ",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case, tmp_path) -> None:
    options, sentence = BAD[case]
    done = call("advise", "--model", MODEL, "--seq-len=8", *options, cwd=tmp_path)

    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {sentence}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_another_packages_target_is_as_good_as_our_own(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "plugin"))
    monkeypatch.setattr(registry, "_entries", functools.cache(registry._entries.__wrapped__))
    experiment = make_experiment(target="test-board", device="cuda")
    compute = estimate(experiment, lambda _: None).compute

    assert (compute.peak_source, compute.peak_flops_per_s) == ("a board", 1e9)
