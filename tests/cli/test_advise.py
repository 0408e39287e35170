"""``dpprof advise``: what it says of invented results, and of real ones."""

import functools
import json

import pytest
from factory import (
    make_capacity,
    make_experiment,
    make_memory,
    write_synthetic,
    write_synthetic_verdict,
)
from scripts import ASKED, HERE, MODEL, ROOT, call

from dpprof.ask.advise.ask import list_questions
from dpprof.ask.advise.show import (
    compare_heads,
    format_advice,
    format_winners,
    list_remedies,
    list_smallest_ranks,
)
from dpprof.ask.capacity.show import explain_batches, explain_safety
from dpprof.experiments.config import registry
from dpprof.experiments.planning.code_digest import verdict_digest
from dpprof.experiments.records.advice import Advice, Option
from dpprof.experiments.records.result import read_result
from dpprof.predict.estimate import estimate

WHERE = "64 tokens, bfloat16, on h100"
SIZES = "largest batch   peak  safe batch"
NUMBERS = f"{SIZES}  tokens/s   90 % interval  FLOPs x"
NARROW = "largest batch  peak  safe batch  tokens/s  90 % interval  FLOPs x"
SURE = {"sure_of_memory": "by sums", "sure_of_time": "by bounds"}
MEMORY = ["Memory: 9 MiB; by sums.", "Time: by bounds."]


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


def test_a_dtype_without_units_on_the_card_has_its_price_told() -> None:
    on_t4 = make(option("flash-bk", "first", 8), target="t4")
    (line,) = (one for one in format_advice(on_t4).splitlines() if "no units" in one)

    assert line.startswith("bfloat16: compute capability 7.5 has no units for bfloat16: products")
    assert line in format_winners([on_t4, on_t4]).splitlines()
    assert "no units" not in format_advice(make(option("flash-bk", "first", 8)))


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


def test_the_way_of_checkpointing_stands_beside_each_method() -> None:
    ways = {"flash-bk": "none", "flash": "reentrant"}
    options = (
        option("flash-bk", "first", 8, checkpointing="none"),
        option("flash", "slower", 7, checkpointing="reentrant"),
        option("per-layer", "does not fit", checkpointing="reentrant"),
    )
    lines = format_advice(make(*options, checkpointing="best")).splitlines()

    assert lines[0] == f"Use flash-bk with batches of 8 without checkpointing: hf-m, {WHERE}."
    assert lines[1].startswith("method     verdict       checkpointing  largest batch   peak  safe")
    assert {line.split()[0]: line.split()[2] for line in lines[2:4]} == ways
    assert lines[4] == "per-layer  does not fit"
    [first, *_] = format_advice(make(*options[1:], checkpointing="best")).splitlines()
    assert first == f"No private method safely fits: hf-m, {WHERE}."


SAMPLES = {
    "what is large": (
        {"sample_bytes": 1234 * 2**20, "peak_shares": {"saved_activations": 0.61, "inputs": 0.09}},
        "One more sample costs 1.2 GiB; at the peak (clip), saved activations take 61 %.",
    ),
    "all that is large": (
        {"sample_bytes": 5, "peak_shares": {"logits_and_loss": 0.7, "workspace": 0.3}},
        (
            "One more sample costs 5 bytes; at the peak (clip), logits and loss take 70 %, "
            "workspace 30 %."
        ),
    ),
    "nothing that is large": (
        {"sample_bytes": 0, "peak_shares": {"parameters": 0.09, "inputs": 0.08}},
        "One more sample costs 0 bytes; at the peak (clip), parameters take 9 %.",
    ),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_it_says_what_one_more_sample_costs_and_what_binds(case) -> None:
    told, sentence = SAMPLES[case]
    sample = {"phase": "clip", **told}
    lines = format_advice(make(option("flash-bk", "first", 8), one_more_sample=sample)).splitlines()

    assert lines[1] == sentence


def test_several_rows_are_one_table_of_winners() -> None:
    fits = {"safe_peak_bytes": 3 * 2**29, "checkpointing": "none"}
    sample = {"sample_bytes": 2**20, "phase": "backward", "peak_shares": {"parameters": 1.0}}
    rows = [
        make(
            option("flash-bk", "first", 8, **fits),
            option("flash", "close", 7),
            option("per-layer", "close", 6),
            option("standard", "baseline", 99),
            one_more_sample=sample,
        ),
        make(
            option("flash", "first", 4, mechanism="per-layer clipping", **fits),
            option("flash-bk", "close", 3),
            seq_len=1024,
        ),
        make(option("flash", "does not fit"), seq_len=4096),
        make(
            option("flash", "unranked", 3, **fits | {"tokens_per_s": None}),
            option("flash-bk", "unranked", 5, **fits | {"tokens_per_s": None}),
            option("opacus-ew", "wrong", 9),
            dtype="float32",
        ),
    ]
    lines = format_winners(rows).splitlines()

    row = "bfloat16   1,024  flash_             4     4,000  3,600 to 4,400         1.50"
    assert lines == [
        "The fastest private method at its largest safe batch: hf-m, on h100.",
        "dtype     tokens  method    safe batch  tokens/s   90 % interval  GiB at peak",
        "bfloat16      64  flash-bk           8     8,000  7,200 to 8,800         1.50",
        row.replace("_", "\N{DOUBLE DAGGER}"),
        "bfloat16   4,096  none",
        "float32       64  flash-bk           5   unknown  4,500 to 5,500         1.50",
        (
            "No difference predicted between it and: flash, per-layer (bfloat16 64); flash-bk "
            "(bfloat16 1,024)."
        ),
        (
            "unknown: no time is predicted, so methods are not ranked; the one with the largest "
            "safe batch is named."
        ),
        "none: no private method safely fits, or can be advised; --json says why.",
        (
            "bfloat16 64: One more sample costs 1.0 MiB; at the peak (backward), parameters take "
            "100 %."
        ),
        "\N{DOUBLE DAGGER} Another mechanism than flat clipping; docs/methods.md.",
        *MEMORY,
    ]


def test_without_a_predicted_time_rows_do_not_speak_of_tokens_a_second() -> None:
    rows = [
        make(option("flash", "does not fit"), sure_of_time="not predicted: here"),
        make(option("flash", "does not fit"), seq_len=9, sure_of_time="not predicted: there"),
    ]

    assert format_winners(rows).splitlines()[-1] == (
        "Time: not predicted: here; not predicted: there."
    )


def test_rows_say_what_else_differs_between_them() -> None:
    fits = {"safe_peak_bytes": 2**30, "checkpointing": "reentrant"}
    first, close = option("flash", "first", 4, **fits), option("flash-bk", "close", 3)
    common = {"checkpointing": "best", "lora": "rank 16"}
    whole = make(first, close, seq_len=64, sure_of_time="by the clock")
    rows = [
        make(first, close, **common, parallel="fsdp x2", whole=whole),
        make(first, close, **common, seq_len=128),
    ]
    lines = format_winners(rows).splitlines()

    assert [line.split()[:8] for line in lines[1:5]] == [
        ["dtype", "tokens", "ranks", "trained", "method", "checkpointing", "safe", "batch"],
        ["bfloat16", "64", "fsdp", "x2", "LoRA", "flash", "reentrant", "4"],
        ["bfloat16", "64", "1", "whole", "flash", "reentrant", "4", "4,000"],
        ["bfloat16", "128", "1", "LoRA", "flash", "reentrant", "4", "4,000"],
    ]
    assert lines[5] == (
        "No difference predicted between it and: flash-bk (bfloat16 64 fsdp x2 LoRA, bfloat16 64 1 "
        "whole, bfloat16 128 1 LoRA)."
    )
    assert lines[-2] == "Memory: 9 MiB, batches and peaks are those of each rank; by sums."
    assert lines[-1].startswith("Time: tokens per second are predicted, with 90 % intervals; what")


def test_what_a_head_without_logits_brings_is_said() -> None:
    found = [
        make(option("flash-bk", "first", 6)),
        make(option("flash-bk", "first", 12), head="kept"),
        make(option("flash-bk", "first", 9), head="chunked"),
        make(option("flash-bk", "first", 6), seq_len=128),
        make(option("flash-bk", "does not fit"), head="kept", seq_len=128),
    ]

    [line] = compare_heads(found)
    assert line == (
        "bfloat16 64: head kept takes 12 samples for 6 with logits, at 2.00 times the speed."
    )


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
    table = [line.split() for line in done.stdout.splitlines()[1:8]]
    assert table[1][:5] == ["float32", "8", "flash-bk\N{DAGGER}", "non-reentrant", "8"]
    assert table[3] == ["float32", "32", "none"]
    assert "float32 8: One more sample costs 50 bytes; at the peak (backward)" in done.stdout
    assert (grid / "rows.svg").read_text().startswith("<?xml")


def test_progress_is_one_aligned_row_as_soon_as_a_capacity_is_known(grid) -> None:
    done = call("advise", *GRID, cwd=grid)
    head, *rows = [line.removeprefix("dpprof: ") for line in done.stderr.splitlines()]

    assert head == (
        "method    dtype     tokens  checkpointing  largest batch  safe batch       tokens/s"
        "      after"
    )
    assert len(rows) == 3 * 2 * 3 * 3
    assert (
        "flash-bk  float32        8  none                      10           8             32"
        "        2 s"
    ) in rows
    assert ("flash-bk  bfloat16      32  reentrant      oom: too large") in rows
    assert (
        "flash     bfloat16      32  none                      10        none               "
        "        2 s"
    ) in rows


def test_one_row_is_as_before_and_says_which_checkpointing(grid) -> None:
    one = [*GRID[: GRID.index("16")], "--checkpointing", "best", "--json=one.json"]
    done = call("advise", *one, cwd=grid)
    advice = json.loads((grid / "one.json").read_text())

    assert advice["options"][0]["checkpointing"] == "non-reentrant"
    assert done.stdout.startswith(
        "Use flash-bk with batches of 8 and non-reentrant checkpointing: custom, 8 tokens, "
    )
    assert "method     verdict   checkpointing" in done.stdout


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


def test_what_safe_means_for_some_methods_alone_is_said_of_these(tmp_path) -> None:
    shares = {"microbatch": 0.9, "flash": None, "flash-bk": None}
    found = [
        write_synthetic(
            tmp_path,
            make_experiment(method=method),
            instrument="capacity",
            recorded=make_capacity(safe_share=share),
        )
        for method, share in shares.items()
    ]

    (line,) = explain_safety(found)

    assert line == (
        "Safe: the allocator never has to release its cache to find room; for microbatch: a tenth "
        "of the memory is left."
    )


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


LLAMA = {"model": "hf:tiny-llama", "target": "h100", "seq_len": 8, "methods": ["flash-bk"]}
LORA = {"lora": "rank=2", "dtype": "bfloat16"}
PLAIN = {"model": {"vocab_size": 16, "d_model": 8, "layers": 1, "heads": 2}}
STATED = {
    "hf": "tiny-llama",
    "quantization_config": {"load_in_8bit": True, "llm_int8_threshold": 0},
}
LACKING = {
    "whole": (
        LLAMA,
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
    "on ranks": (LLAMA | {"world_sizes": [2]}, "dtype bfloat16, checkpointing best, lora rank=16"),
    "Opacus's": (
        LLAMA | {"methods": ["opacus-hooks"], "dtype": "bfloat16"},
        "checkpointing best, lora rank=16, world_sizes 2 4 8",
    ),
    "as a graph": (
        LLAMA | PLAIN | {"execution": "graph"},
        "dtype bfloat16, checkpointing best, head best",
    ),
    "a processor": (
        LLAMA | PLAIN | {"target": "cpu"},
        "dtype bfloat16, checkpointing best, head best",
    ),
    "images": ({**LLAMA, "model": "vit-b16", "seq_len": None}, "dtype bfloat16, world_sizes 2 4 8"),
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
        experiment = make_experiment(method=method)
        result = write_synthetic(tmp_path, experiment, instrument="capacity", **kept)
        assert list_remedies([result]) == []


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

    assert "What may take less memory: --dtype bfloat16, --checkpointing best" in done.stdout
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
    "a target without memory": (
        ["--target={flops_per_s: 1e12, bandwidth_bytes_per_s: 1e11}"],
        "--target: missing memory_bytes",
    ),
    "a length twice": (
        ["--target=l4", "--seq-len", "16", "8"],
        "--seq-len: '8 16 8' is not allowed; give each value once",
    ),
    "no length": (
        ["--target=l4", "--seq-len", "16", "0"],
        "--seq-len: '0' is not allowed; it must be greater than or equal to 1",
    ),
    "a negative length": (
        ["--target=l4", "--seq-len", "-5"],
        "--seq-len: '-5' is not allowed; it must be greater than or equal to 1",
    ),
    "a dtype twice": (
        ["--target=l4", "--dtype", "float32", "float32"],
        "--dtype: 'float32 float32' is not allowed; give each value once",
    ),
    "an unknown dtype of two": (
        ["--target=l4", "--dtype", "float32", "half"],
        "--dtype: 'half' is not allowed; it must be 'float32', 'tf32', 'bfloat16', 'float64'",
    ),
    "a method twice": (
        ["--target=l4", "--methods", "flash", "standard", "flash"],
        "--methods: 'flash standard flash' is not allowed; give each value once",
    ),
    "a number of ranks twice": (
        ["--target=l4", "--world-sizes", "2", "2"],
        "--world-sizes: '2 2' is not allowed; give each value once",
    ),
    "a batch": (
        ["--target=l4", "--batch-size=4"],
        "--batch-size: '4' is not allowed; advise finds the largest batch that fits; leave it out",
    ),
    "two models": (
        ["--target=l4", "--model", "tiny", "small"],
        f"--model: '{MODEL} tiny small' is not allowed; give one model, and call once for each",
    ),
    "best beside another way": (
        ["--target=l4", "--checkpointing", "best", "none"],
        (
            "--checkpointing: 'best none' is not allowed; give one way, or best alone, which tries "
            "each"
        ),
    ),
    "unknown checkpointing": (
        ["--target=l4", "--checkpointing=bst"],
        "--checkpointing: 'bst' is not allowed; did you mean 'best'? allowed: best, non-reentrant",
    ),
    "a figure of one length": (
        ["--target=l4", "--figure=x.svg"],
        "--figure: 'x.svg' is not allowed; it shows sequence lengths; give --seq-len two or more",
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


def test_images_are_advised_by_pixels_and_samples() -> None:
    of_images = {"seq_len": 1, "image_size": 224}
    first = option("flash-bk", "first", 8)
    lines = format_advice(make(first, **of_images)).splitlines()
    several = [make(first, **of_images), make(first, **of_images | {"image_size": 384})]
    winners = format_winners(several).splitlines()

    assert lines[0] == "Use flash-bk with batches of 8: hf-m, 224 x 224 pixels, bfloat16, on h100."
    assert "samples/s" in lines[1]
    assert winners[1].split()[:3] == ["dtype", "pixels", "method"]
    assert "samples/s" in winners[1]
    assert [line.split()[1] for line in winners[2:4]] == ["224", "384"]
