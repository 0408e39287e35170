"""Say how large a batch fits on a GPU that need not be here, and which private method to use."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

from dpprof.analysis.advice.advice import advise
from dpprof.analysis.standings import sign
from dpprof.analysis.tables.axes import target_text
from dpprof.cli.capacities import (
    answer,
    explain_signs,
    find_signs,
    format_number,
    group_messages,
    make_parser,
    read_verdicts,
)
from dpprof.cli.common import lay_out
from dpprof.records.advice import Advice, Option
from dpprof.records.result import Result
from dpprof.records.verdict import Standing
from dpprof.spec.experiment import Experiment

_SIZES = ("largest batch", "peak", "safe batch")
_COLUMNS = ("verdict", *_SIZES, "tokens/s", "90 % interval", "FLOPs x")
_MIB = 2**20


def _recommend(advice: Advice) -> list[str]:
    """Say which method to use, in a sentence or two."""
    best = advice.best
    trained = "" if advice.lora is None else f" with LoRA ({advice.lora})"
    ranks = "" if advice.parallel is None else f", {advice.parallel}"
    where = f"{advice.model}{trained}, {advice.seq_len:,} tokens, {advice.dtype}{ranks}"
    where += f", on {advice.target}"
    if any(option.verdict == "unranked" for option in advice.options):
        return [f"No time is predicted, so methods that fit are not ranked: {where}."]
    if best is None:
        wrong = any(option.verdict == "wrong" for option in advice.options)
        return [f"No private method {'can be advised' if wrong else 'safely fits'}: {where}."]
    lines = [f"Use {best.method} with batches of {best.safe_batch_size}: {where}."]
    close = [option.method for option in advice.options if option.verdict == "close"]
    if close:
        lines.append(f"No difference predicted between it and: {', '.join(close)}.")
    return lines


def _cells(option: Option) -> tuple[str, ...]:
    if option.largest_batch_size is None or option.largest_peak_bytes is None:
        return (option.verdict, *[""] * (len(_COLUMNS) - 1))
    low, high = option.tokens_per_s_low, option.tokens_per_s_high
    return (
        option.verdict,
        f"{option.largest_batch_size:,}" + ("+" if option.limited_by == "search" else ""),
        f"{option.largest_peak_bytes / _MIB:,.0f} MiB",
        format_number(option.safe_batch_size, ",", "none"),
        format_number(option.tokens_per_s, ",.0f"),
        "unknown" if low is None or high is None else f"{low:,.0f} to {high:,.0f}",
        format_number(option.dp_flop_multiplier, ".2f"),
    )


def _lay_out(advice: Advice, names: Mapping[str, str]) -> list[str]:
    """Lay out the methods, with adapters and without side by side."""
    sides = [advice, *([] if advice.whole is None else [advice.whole])]
    found = [{option.method: _cells(option) for option in side.options} for side in sides]
    rows = [
        [names[one.method], *(c for side in found for c in side[one.method])]
        for one in advice.options
    ]
    header = ["method", *_COLUMNS * len(sides)]
    lines = lay_out([header, *rows], texts=(0, *range(1, len(header), len(_COLUMNS))))
    if len(sides) > 1:
        lora_at = lines[0].index(_COLUMNS[0])
        whole_at = lines[0].index(_COLUMNS[0], lora_at + 1)
        lines.insert(0, f"{' ' * lora_at}LoRA".ljust(whole_at) + "whole")
    return lines


def format_advice(advice: Advice) -> str:
    """Return the advice as text."""
    sides = [advice, *([] if advice.whole is None else [advice.whole])]
    options = [option for side in sides for option in side.options]
    signs = find_signs(options)
    names = {option.method: option.method + sign(option.method, signs) for option in options}
    messages = []
    for trained, side in zip(("", " (whole)"), sides, strict=False):
        for option in side.options:
            least = option.smallest_batch_size or 1
            smallest = f"takes at least {least:,} samples" if least > 1 else None
            messages += [(option.method + trained, why) for why in (option.message, smallest)]
    lines = [sentence for side in sides for sentence in _recommend(side)]
    lines += [*_lay_out(advice, names), *group_messages(messages), *explain_signs(signs)]
    if advice.budget_bytes is not None:
        each = ", batches and peaks are those of each rank" if advice.parallel else ""
        lines.append(
            f"Memory: {advice.budget_bytes / _MIB:,.0f} MiB{each}; {advice.sure_of_memory}."
        )
    return "\n".join([*lines, f"Time: {advice.sure_of_time}."])


def explain_batches(results: Sequence[Result]) -> list[str]:
    """Say what a safe batch is, and where pieces of free memory bound the largest one."""
    found = [(r.experiment, r.capacity) for r in results if r.capacity is not None]
    lines = []
    if any(capacity.safe_share for _, capacity in found):
        lines.append("Safe: a tenth of the memory is left.")
    if any(capacity.safe_share is None for _, capacity in found):
        lines.append("Safe: the allocator never has to release its cache to find room.")
    for experiment, capacity in found:
        if capacity.limited_by == "fragmentation":
            ranks = "" if experiment.parallel is None else f", {experiment.parallel.text}"
            whole = "" if experiment.lora is None else " with LoRA"
            lines.append(
                f"{experiment.method}{whole}{ranks}: free memory is in pieces too small for "
                f"{capacity.batch_size + 1:,} samples; by size "
                f"{capacity.unfragmented_batch_size:,} fit, with "
                "PYTORCH_ALLOC_CONF=expandable_segments:True "
                f"{capacity.expandable_batch_size or 0:,}"
            )
    return lines


def list_smallest_ranks(results: Sequence[Result]) -> list[str]:
    """Say on how many ranks each method trains at all; nothing for one number of ranks."""
    sizes = sorted({result.experiment.world_size for result in results})
    if len(sizes) == 1:
        return []
    fits: dict[str, list[int]] = {result.experiment.method: [] for result in results}
    for result in results:
        if result.capacity is not None:
            fits[result.experiment.method].append(result.experiment.world_size)
    fitting = [f"{method} {min(known)}" for method, known in fits.items() if known]
    lines = [f"smallest number of GPUs: {', '.join(fitting)}"] if fitting else []
    if none := [method for method, known in fits.items() if not known]:
        lines.append(f"on none of {', '.join(map(str, sizes))}: {', '.join(none)}")
    return lines


def rank_methods(
    experiments: Sequence[Experiment], results: Sequence[Result]
) -> tuple[str, str, bool]:
    """Return the methods in order, as far as their verdicts are known here."""
    standings = read_verdicts(experiments)
    by_ranks: dict[int, list[Result]] = defaultdict(list)
    for result in results:
        by_ranks[result.experiment.world_size].append(result)
    found = [_advise(experiments[0], alike, standings) for alike in by_ranks.values()]
    fits = any(option.safe_batch_size for advice in found for option in advice.options)
    lines = [*map(format_advice, found), *explain_batches(results), *list_smallest_ranks(results)]
    dumped = [advice.model_dump(mode="json") for advice in found]
    return json.dumps(dumped[0] if len(found) == 1 else dumped, indent=1), "\n".join(lines), fits


def _advise(
    asked_first: Experiment, results: Sequence[Result], standings: Mapping[str, Standing]
) -> Advice:
    """Rank the methods on one number of ranks, with adapters and without."""
    target = target_text(asked_first) or "this machine"
    asked = [one for one in results if one.experiment.lora == asked_first.lora]
    whole = [one for one in results if one.experiment.lora != asked_first.lora]
    advice = advise(asked, target, standings)
    if whole:
        advice = advice.model_copy(update={"whole": advise(whole, target, standings)})
    return advice


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    answer(make_parser("advise", __doc__).parse_args(argv), rank_methods, whole_too=True)
