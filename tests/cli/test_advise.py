"""What advice says to people: one table, or adapters and whole training side by side."""

from dpprof.analysis.advice.advice import Advice, Option
from dpprof.cli.advise import tell

WHERE = "64 tokens, bfloat16, on h100"
NUMBERS = "safe batch  tokens/s   90 % interval  FLOPs x"
NARROW = "safe batch  tokens/s  90 % interval  FLOPs x"
SURE = {"sure_of_memory": "by sums", "sure_of_time": "by bounds"}


def make(*options: Option, **others) -> Advice:
    named = {"model": "hf-m", "seq_len": 64, "dtype": "bfloat16", "target": "h100"}
    return Advice(**named, budget_bytes=1, options=options, **SURE, **others)


def option(method: str, verdict: str, batch: int | None = None, **others) -> Option:
    numbers = {"largest_batch_size": batch, "safe_batch_size": batch, "verified": True}
    tokens = 1000.0 * (batch or 0)
    speed = {"tokens_per_s": tokens, "dp_flop_multiplier": 1.5}
    speed |= {"tokens_per_s_low": 0.9 * tokens, "tokens_per_s_high": 1.1 * tokens}
    fits = numbers | speed if batch else {"verified": True}
    return Option(method=method, verdict=verdict, private=method != "standard", **fits | others)


def test_one_table_says_what_fits() -> None:
    said = tell(make(option("flash-bk", "first", 8), option("standard", "baseline", 9)))

    assert said.splitlines() == [
        f"Use flash-bk with batches of 8: hf-m, {WHERE}.",
        f"method    verdict   {NUMBERS}",
        "flash-bk  first              8     8,000  7,200 to 8,800     1.50",
        "standard  baseline           9     9,000  8,100 to 9,900     1.50",
        "Memory: by sums.",
        "Time: by bounds.",
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

    assert tell(adapted).splitlines() == [
        f"Use flash-bk with batches of 8: hf-m with LoRA (rank 16, alpha 32), {WHERE}.",
        f"No private method safely fits: hf-m, {WHERE}.",
        "          LoRA                                                     whole",
        f"method    verdict   {NUMBERS}  verdict       {NARROW}",
        "flash-bk  first              8     8,000  7,200 to 8,800     1.50  does not fit",
        "standard  baseline           9     9,000  8,100 to 9,900     1.50  does not fit",
        "standard (whole): standard needs more",
        "flash-bk (whole): flash-bk needs more",
        "Memory: by sums.",
        "Time: by bounds.",
    ]


def test_the_smallest_batch_is_told_where_one_sample_is_too_few() -> None:
    said = tell(
        make(
            option("opacus-ghost", "first", 8, smallest_batch_size=1),
            option("opacus-adaptive", "close", 8, smallest_batch_size=11),
        )
    )

    assert "opacus-adaptive: takes at least 11 samples" in said.splitlines()
    assert "opacus-ghost: takes" not in said


def test_the_same_reason_is_given_once() -> None:
    refused = "use reentrant"
    said = tell(
        make(
            option("opacus-hooks", "failed", message=refused),
            option("opacus-ghost", "failed", message=refused),
        )
    )

    assert "opacus-hooks, opacus-ghost: use reentrant" in said.splitlines()
