"""``dpprof advise``: what it says of invented results, and of real ones."""

import contextlib
import functools
import io
import json

import pytest
from factory import (
    make_capacity,
    make_experiment,
    make_memory,
    make_parts,
    write_synthetic,
    write_synthetic_verdict,
)
from scripts import ASKED, HERE, MODEL, ROOT, call
from snapshots import assert_reviewed, assert_sentences

from dpprof.ask.advice_details import detail_advice
from dpprof.ask.advice_text import (
    compare_ways,
    format_advice,
    format_winners,
    list_smallest_ranks,
)
from dpprof.ask.advise import list_questions
from dpprof.ask.capacity import explain_batches, explain_safety
from dpprof.ask.commands.main import main
from dpprof.ask.layout import name_adapters
from dpprof.ask.remedies import list_remedies
from dpprof.experiments.config import registry
from dpprof.experiments.planning.code_digest import verdict_digest
from dpprof.experiments.records import answers
from dpprof.experiments.records.advice import Advice, Option
from dpprof.experiments.records.result import read_result
from dpprof.predict.estimate import estimate
from dpprof.results.analysis.advice.ratios import compare
from dpprof.results.analysis.tables.frames import read_table

SURE = {"sure_of_memory": "by sums", "sure_of_time": "by bounds"}


def make(*options: Option, **others) -> Advice:
    named = {"model": "hf-m", "seq_len": 64, "dtype": "bfloat16", "target": "h100"}
    named |= {"budget_bytes": 9 * 2**20, **SURE}
    return Advice(options=options, **named | others)


def option(method: str, verdict: str, batch: int | None = None, **others) -> Option:
    numbers = {"largest_batch_size": batch, "safe_batch_size": batch, "verified": True}
    tokens = 1000.0 * (batch or 0)
    speed = {"tokens_per_s": tokens, "dp_flop_multiplier": 1.5, "largest_peak_bytes": 2**21}
    speed |= {"tokens_per_s_low": 0.9 * tokens, "tokens_per_s_high": 1.1 * tokens}
    fits = numbers | speed if batch else {"verified": True}
    return Option(method=method, verdict=verdict, private=method != "standard", **fits | others)


FLASH_BK = option("flash-bk", "first", 8)
REFUSED = {"message": "use reentrant"}
WAYS = (
    option("flash", "slower", 7, checkpointing="reentrant"),
    option("per-layer", "does not fit", checkpointing="reentrant"),
)
NO_PLACE = make(
    option("standard", "does not fit", message="standard needs more"),
    option("flash-bk", "does not fit", message="flash-bk needs more"),
)
ADVICES = {
    "one table": make(FLASH_BK, option("standard", "baseline", 9, limited_by="search")),
    "plain training alone": make(option("standard", "baseline", 9)),
    "a card without units": make(FLASH_BK, target="t4"),
    "adapters and whole": make(
        FLASH_BK, option("standard", "baseline", 9), lora="rank 16, alpha 32", whole=NO_PLACE
    ),
    "reasons": make(
        option("opacus-ghost", "first", 8, smallest_batch_size=1),
        option("opacus-adaptive", "close", 8, smallest_batch_size=11),
        option("opacus-hooks", "failed", **REFUSED),
        option("opacus-ew", "failed", **REFUSED),
    ),
    "ways of checkpointing": make(
        option("flash-bk", "first", 8, checkpointing="none"), *WAYS, checkpointing="best"
    ),
    "no way of checkpointing": make(*WAYS, checkpointing="best"),
    "images": make(FLASH_BK, seq_len=1, image_size=224),
    "executions by method": make(
        option("flash-bk", "first", 8, execution="graph"),
        option("opacus-ghost", "slower", 7, execution="eager"),
        execution="default",
    ),
}
SHARES = {
    "a sample of one large part": (1234 * 2**20, {"saved_activations": 0.61, "inputs": 0.09}),
    "a sample of two large parts": (5, {"logits_and_loss": 0.7, "workspace": 0.3}),
    "a sample of no large part": (0, {"parameters": 0.09, "inputs": 0.08}),
}
ADVICES |= {
    name: make(
        FLASH_BK, one_more_sample={"phase": "clip", "sample_bytes": size, "peak_shares": shares}
    )
    for name, (size, shares) in SHARES.items()
}


@pytest.mark.parametrize("name", ADVICES)
def test_advice_reads_as_it_was_reviewed(name) -> None:
    advice = ADVICES[name]
    details = "\n".join(detail_advice([advice]))
    assert_reviewed(f"cli/{name}", f"{format_advice(advice)}\n\n{details}\n")


FITS = {"safe_peak_bytes": 3 * 2**29, "checkpointing": "none"}
UNTIMED = FITS | {"tokens_per_s": None}
REENTRANT = option("flash", "first", 4, safe_peak_bytes=2**30, checkpointing="reentrant")
CLOSE = option("flash-bk", "close", 3)
LORA = {"checkpointing": "best", "lora": "rank 16"}
SAMPLE = {"sample_bytes": 2**20, "phase": "backward", "peak_shares": {"parameters": 1.0}}
WINNERS = {
    "rows": [
        make(
            option("flash-bk", "first", 8, **FITS),
            option("flash", "close", 7),
            option("per-layer", "close", 6),
            option("standard", "baseline", 99),
            one_more_sample=SAMPLE,
        ),
        make(
            option("flash", "first", 4, mechanism="per-layer clipping", **FITS), CLOSE, seq_len=1024
        ),
        make(option("flash", "does not fit"), seq_len=4096),
        make(
            option("flash", "unranked", 3, **UNTIMED),
            option("flash-bk", "unranked", 5, **UNTIMED),
            option("opacus-ew", "wrong", 9),
            dtype="float32",
        ),
    ],
    "rows on a card without units": [make(FLASH_BK, target="t4")] * 2,
    "rows without times": [
        make(option("flash", "does not fit"), sure_of_time="not predicted: here"),
        make(option("flash", "does not fit"), seq_len=9, sure_of_time="not predicted: there"),
    ],
    "rows that differ otherwise": [
        make(
            REENTRANT,
            CLOSE,
            **LORA,
            parallel="fsdp x2",
            whole=make(REENTRANT, CLOSE, sure_of_time="by the clock"),
        ),
        make(REENTRANT, CLOSE, **LORA, seq_len=128),
    ],
    "rows of images": [make(FLASH_BK, seq_len=1, image_size=size) for size in (224, 384)],
}


@pytest.mark.parametrize("name", WINNERS)
def test_rows_read_as_they_were_reviewed(name) -> None:
    assert_reviewed(f"cli/{name}", format_winners(WINNERS[name]) + "\n")


@pytest.mark.parametrize(("of_logits", "sure"), [(4.0, ""), (2.02, ": no difference is predicted")])
def test_the_speed_that_a_head_brings_has_an_interval(of_logits, sure) -> None:
    logits, kept = (make_parts({"gemm": seconds}) for seconds in (of_logits, 2.0))
    found = [
        make(option("flash-bk", "first", 6, parts=logits)),
        make(option("flash-bk", "first", 12, parts=kept), head="kept"),
    ]

    [line] = compare_ways(found)
    ratio = compare(logits, kept)
    assert line.endswith(f"speed (90 % interval {ratio.low:.2f} to {ratio.high:.2f}{sure}).")


def ways() -> list[Advice]:
    """Where a head without logits, checkpointing and a graph bring twice the batch, or nothing."""
    none, non_reentrant = (
        option("flash", "first", batch, checkpointing=way)
        for batch, way in ((6, "none"), (12, "non-reentrant"))
    )
    return [
        make(option("flash-bk", "first", 6)),
        make(option("flash-bk", "first", 12), head="kept"),
        make(option("flash-bk", "first", 9), head="chunked"),
        make(option("flash-bk", "first", 6), seq_len=128),
        make(option("flash-bk", "does not fit"), head="kept", seq_len=128),
        make(non_reentrant, without_checkpointing=none, seq_len=256),
        make(none, without_checkpointing=none, seq_len=512),
        make(option("flash", "first", 3, execution="eager"), execution="eager", seq_len=1024),
        make(option("flash", "first", 6, execution="graph"), execution="graph", seq_len=1024),
    ]


def test_what_a_head_checkpointing_and_a_graph_bring_reads_as_it_was_reviewed() -> None:
    assert_reviewed("cli/ways", "\n".join(compare_ways(ways())) + "\n")


@pytest.mark.parametrize("given", [["best"], ["logits", "chunked", "kept"]])
def test_the_best_head_is_looked_for_among_all(given) -> None:
    sizes = {"model": "tiny", "seq_len": 8, "target": "l4", "head": given}
    asked = list_questions(sizes, ["flash-bk"])
    assert [one.head for one in asked] == ["logits", "chunked", "kept"]


GRID = ["--model", MODEL, *HERE, "--methods", "standard", "flash-bk", "flash", "--seq-len", "8"]
GRID += ["16", "32", "--dtype", "float32", "bfloat16", "--checkpointing", "best"]


def find_by_hand(experiment):
    """Invent a capacity: flash-bk is fastest where it fits, with non-reentrant checkpointing."""
    method, tokens = experiment.method, experiment.seq_len
    if tokens == 32 and method != "standard":
        return None if method == "flash-bk" else make_capacity(9.0, safe_batch_size=None)
    step_s = {"standard": 1.0, "flash": 4.0, "flash-bk": 2.0}[method]
    step_s /= 1.2 if experiment.checkpointing == "non-reentrant" else 1.0
    return make_capacity(step_s) | {"memory": make_memory({"parameters": 890})["memory"]}


@pytest.fixture(scope="module")
def grid(tmp_path_factory, keep_capacities):
    """Ask about two dtypes, three lengths and every way of checkpointing, all of them known."""
    path = tmp_path_factory.mktemp("grid")
    keep_capacities(path, GRID, find_by_hand)
    return path


def test_a_larger_question_is_one_call(grid) -> None:
    done = call("advise", *GRID, "--json=rows.json", "--figure=rows.svg", cwd=grid)
    advices = [Advice.model_validate(one) for one in json.loads((grid / "rows.json").read_text())]

    assert done.returncode == 0, done.stderr
    asked = [(dtype, length) for dtype in ("float32", "bfloat16") for length in (8, 16, 32)]
    assert [(one.dtype, one.seq_len) for one in advices] == asked
    for one in advices:
        assert one.checkpointing == "best"
        assert {option.method for option in one.options} == {"standard", "flash-bk", "flash"}
        if one.seq_len == 32:
            assert one.best is None
            continue
        assert (one.best.method, one.best.checkpointing) == ("flash-bk", "non-reentrant")
        assert list(one.best.tokens_per_s_by_checkpointing) == [
            "none",
            "non-reentrant",
            "reentrant",
        ]
        assert one.one_more_sample.sample_bytes == 50  # from 890 to 990 bytes by two samples
    table = [line.split() for line in done.stdout.splitlines()[2:9]]
    assert table[0][:2] == ["dtype", "tokens"]
    assert table[1][:5] == ["float32", "8", "graph", "flash-bk\N{DAGGER}", "non-reentrant"]
    assert table[3] == ["float32", "32", "default", "none"]
    assert (grid / "rows.svg").read_text().startswith("<?xml")


class Terminal(io.StringIO):
    """What stands on a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_of_a_terminal_that_goes_when_the_answer_comes(
    grid, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(grid)
    terminal = Terminal()
    with contextlib.redirect_stderr(terminal), pytest.raises(SystemExit):
        main(["advise", *GRID])
    begin, first, *others, last = terminal.getvalue().split("\r\x1b[2K")

    assert (begin, first, last) == ("", "dpprof: 0 of 54 found", "")
    assert [line.split()[1] for line in others] == [str(one) for one in range(1, 55)]
    assert any(line.endswith(": flash-bk on custom, floa...") for line in others)
    assert max(map(len, others)) == 59


def test_without_a_terminal_there_is_no_progress(grid) -> None:
    assert call("advise", *GRID, cwd=grid).stderr == ""


def test_one_row_is_as_before_and_says_which_checkpointing(grid) -> None:
    one = [*GRID[: GRID.index("16")], "--checkpointing", "best", "--json=one.json"]
    done = call("advise", *one, cwd=grid)
    advice = json.loads((grid / "one.json").read_text())

    assert advice["options"][0]["checkpointing"] == "non-reentrant"
    assert done.stdout.startswith(
        "Use flash-bk, 8 samples at once with non-reentrant checkpointing (bfloat16, adamw-fused,"
    )
    [header] = [line.split() for line in done.stdout.splitlines() if line.startswith("method")]
    assert header[:4] == ["method", "verdict", "execution", "checkpointing"]


def keep_capacity(tmp_path, recorded=None, outcome="ok", **fields):
    """Write a capacity of an experiment with these fields."""
    told = {"instrument": "capacity", "recorded": recorded, "outcome": outcome}
    return write_synthetic(tmp_path, make_experiment(**fields), **told)


def test_free_memory_in_pieces_is_explained(tmp_path) -> None:
    pieces = {"limited_by": "fragmentation", "unfragmented_batch_size": 12}
    capacity = make_capacity(safe_share=None, **pieces)

    assert explain_batches([keep_capacity(tmp_path, capacity, method="flash")]) == [
        "Safe: the allocator never has to release its cache to find room.",
        (
            "flash: free memory is in pieces too small for 11 samples; by size 12 fit, with "
            "PYTORCH_ALLOC_CONF=expandable_segments:True 0"
        ),
    ]


def test_what_safe_means_for_some_methods_alone_is_said_of_these(tmp_path) -> None:
    shares = {"microbatch": 0.9, "flash": None, "flash-bk": None}
    results = [
        keep_capacity(tmp_path, make_capacity(safe_share=share), method=method)
        for method, share in shares.items()
    ]

    (line,) = explain_safety(results)

    assert line == (
        "Safe: the allocator never has to release its cache to find room; for microbatch: a tenth "
        "of the memory is left."
    )


def test_the_smallest_number_of_gpus_is_listed(tmp_path) -> None:
    outcomes = {("standard", 1): "oom", ("standard", 4): "ok", ("flash", 1): "oom"}
    outcomes["flash", 4] = "unsupported"
    ranks = {1: None, 4: "kind=fsdp,world_size=4"}
    results = [
        keep_capacity(tmp_path, make_capacity(), outcome, method=method, parallel=ranks[size])
        for (method, size), outcome in outcomes.items()
    ]

    assert list_smallest_ranks(results) == [
        "smallest number of GPUs: standard 4",
        "on none of 1, 4: flash",
    ]
    assert list_smallest_ranks(results[::2]) == []


LLAMA = {"model": "hf:tiny-llama", "target": "h100", "seq_len": 8, "methods": ["flash-bk"]}
LORA = {"lora": "rank=2", "dtype": "bfloat16"}
PLAIN = {"model": {"vocab_size": 16, "d_model": 8, "layers": 1, "heads": 2}}
STATED = {
    "hf": "tiny-llama",
    "quantization_config": {"load_in_8bit": True, "llm_int8_threshold": 0},
}
LACKING = {
    "whole": (LLAMA, "checkpointing best, head best, lora rank=16, world_sizes 2 4 8"),
    "in float32": (
        LLAMA | {"dtype": "float32"},
        "dtype bfloat16, checkpointing best, head best, lora rank=16, world_sizes 2 4 8",
    ),
    "adapters": (
        LLAMA | LORA | {"checkpointing": "reentrant"},
        "dtype bfloat16 parameters_dtype bfloat16, head best, quantization nf4, world_sizes 2 4 8",
    ),
    "quantised by its config": (
        LLAMA | LORA | {"model": STATED, "parameters_dtype": "bfloat16"},
        "checkpointing best, head best",
    ),
    "on ranks": (LLAMA | {"world_sizes": [2]}, "checkpointing best, lora rank=16"),
    "Opacus's": (
        LLAMA | {"methods": ["opacus-hooks"], "dtype": "bfloat16"},
        "checkpointing best, lora rank=16, world_sizes 2 4 8",
    ),
    "as a graph": (
        LLAMA | PLAIN | {"execution": "graph"},
        "checkpointing best, head best, world_sizes 2 4 8",
    ),
    "a processor": (
        LLAMA | PLAIN | {"target": "cpu"},
        "dtype bfloat16, checkpointing best, head best",
    ),
    "images": ({**LLAMA, "model": "vit-b16", "seq_len": None}, "world_sizes 2 4 8"),
}


@pytest.mark.parametrize("case", LACKING)
def test_where_nothing_fits_what_may_take_less_memory_is_named(case, tmp_path) -> None:
    asked, remedies = LACKING[case]
    fields = {name: value for name, value in asked.items() if value is not None}
    ranks = {name: fields.pop(name, None) for name in ("methods", "world_sizes")}
    results = [
        write_synthetic(tmp_path, one, instrument="capacity", outcome="oom")
        for one in list_questions(fields, **ranks)
    ]

    assert list_remedies(results) == [f"What may take less memory: {remedies}."]


def test_where_memory_is_not_lacking_no_remedy_is_named(tmp_path) -> None:
    for method, kept in (
        ("flash-bk", {"recorded": make_capacity()}),
        ("standard", {"recorded": make_capacity()}),
        ("flash-bk", {"outcome": "unsupported"}),
    ):
        assert list_remedies([keep_capacity(tmp_path, **kept, method=method)]) == []


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

    assert "What may take less memory: --checkpointing best, --head best" in done.stdout
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
    assert said.startswith(
        "Use flash-bk, 8 samples at once (bfloat16, adamw-fused, CUDA graph): custom, 8 tokens"
    )
    assert "flash-bk\N{DAGGER}  first" in said
    assert "\N{DAGGER} Not verified to compute the right gradient" in said


def test_details_and_files_have_what_a_screen_has_no_room_for(asked) -> None:
    done = call("advise", *ASKED, *HERE, "--details", "--csv=advice.csv", cwd=asked)
    screen, _, details = done.stdout.partition("\n\n")

    assert screen + "\n" == (asked / "said").read_text()
    assert "FLOPs x  largest batch  its peak, MiB" in details
    assert "\nTime: tokens per second are predicted, with 90 % intervals" in details
    table = read_table(asked / "advice.csv")
    assert list(table["method"]) == ["flash-bk", "standard"]
    assert list(table["largest_batch_size"]) == [10, 10]


def test_a_table_that_cannot_be_written_is_refused_before_anything_is_found(asked) -> None:
    done = call("advise", *ASKED, *HERE, "--csv=results", cwd=asked)  # a folder

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert "results" in done.stderr


VERDICTS = {
    "another mechanism": (
        {"mechanism": "hooked clipping"},
        ["flash-bk\N{DOUBLE DAGGER}  first", "\N{DOUBLE DAGGER} Another mechanism than flat clip"],
    ),
    "a wrong gradient": (
        {"passed": False, "reason": "it differs"},
        ["No private method can be advised (", "flash-bk: its gradient is wrong: it differs"],
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


def test_a_verdict_that_comes_with_the_package_counts_for_the_code_that_it_is_on(
    asked, tmp_path, monkeypatch
) -> None:
    digest = verdict_digest("built-in", "flash-bk")
    of_method = make_experiment(method="flash-bk")
    write_synthetic_verdict(tmp_path, of_method, code_digest=digest)
    [path] = (tmp_path / "results" / "verify").iterdir()
    kept = {path.name: path.read_text()}
    monkeypatch.setattr(answers, "kept_answers", lambda: kept)
    here = asked / "results" / "verify" / path.name
    write_synthetic_verdict(asked, of_method, code_digest="0" * 64)

    said = call("advise", *ASKED, *HERE, cwd=asked).stdout
    assert here.read_text() == kept.pop(path.name)
    write_synthetic_verdict(asked, of_method, code_digest="0" * 64)
    other = call("advise", *ASKED, *HERE, cwd=asked).stdout
    here.unlink()

    assert "flash-bk   first" in said
    assert "flash-bk\N{DAGGER}  first" in other


def test_bad_input_is_one_sentence(tmp_path) -> None:
    def refusal_of(options: list[str]) -> str:
        done = call("advise", "--model", MODEL, "--seq-len=8", *options, cwd=tmp_path)
        assert (done.returncode, list(tmp_path.iterdir())) == (1, [])
        return done.stderr.removesuffix("\n")

    assert_sentences("cli/advise", refusal_of)


def test_another_packages_target_is_as_good_as_our_own(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "plugin"))
    monkeypatch.setattr(registry, "_entries", functools.cache(registry._entries.__wrapped__))
    experiment = make_experiment(target="test-board", device="cuda")
    compute = estimate(experiment, lambda _: None).compute

    assert (compute.peak_source, compute.peak_flops_per_s) == ("a board", 1e9)


@pytest.mark.parametrize(
    ("model", "lora", "named"),
    [
        ("own", None, ""),
        ("own", "rank 16", " with LoRA (rank 16)"),
        ("hf-llama-lora16", "rank 16", ""),
        ("own", "IA3", " with IA3"),
        ("hf-t5-ia3", "IA3", ""),
    ],
)
def test_adapters_are_named_once(model, lora, named) -> None:
    assert name_adapters(model, lora) == named
