"""What `dpprof advise` says, as text."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from dpprof.ask.layout import (
    explain_signs,
    format_number,
    group_messages,
    lay_out,
)
from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.tasks import name_size, name_units
from dpprof.experiments.config.validation import spell
from dpprof.experiments.records.advice import Advice, OneMoreSample, Option
from dpprof.experiments.records.result import Result
from dpprof.results.analysis.advice.advice import BEST
from dpprof.results.analysis.difference.waterfall import format_size, name_component
from dpprof.results.analysis.standings import find_signs, sign
from dpprof.results.analysis.tables.axes import BASELINE
from dpprof.system.numbers import three_digits

_SIZES = ("largest batch", "peak", "safe batch")

_SPEED = "tokens/s"

_FIGURES = (*_SIZES, _SPEED, "90 % interval", "FLOPs x")

_MIB = 2**20

_SAFE = {
    False: "the allocator never has to release its cache to find room",
    True: "a tenth of the memory is left",
}
"""What a safe batch is, by whether a share of the memory is left."""

_LARGE_SHARE = 0.1
"""Of a component that is said to bind."""


def _format_interval(option: Option) -> str:
    low, high = option.tokens_per_s_low, option.tokens_per_s_high
    return "unknown" if low is None or high is None else f"{low:,.0f} to {high:,.0f}"


_ROW: Mapping[str, Callable[[Advice], str]] = {
    "dtype": lambda one: one.dtype,
    "tokens": lambda one: f"{one.seq_len:,}",
    "pixels": lambda one: str(one.image_size),
    "ranks": lambda one: one.parallel or "1",
    "trained": lambda one: "whole" if one.lora is None else "LoRA",
    "execution": lambda one: one.execution,
    "head": lambda one: one.head,
}
"""What a row of winners is about. Dtype and size are always shown, others where they vary."""


_WINNER: Mapping[str, Callable[[Option], str]] = {
    "checkpointing": lambda one: str(one.checkpointing),
    "safe batch": lambda one: format_number(one.safe_batch_size, ","),
    _SPEED: lambda one: format_number(one.tokens_per_s, ",.0f"),
    "90 % interval": _format_interval,
    "GiB at peak": lambda one: three_digits(one.safe_peak_bytes, 2**30),
}


_TIMES = (
    "{units} per second are predicted, with 90 % intervals; what they rest on differs by row, and "
    "--json says it"
)


_TEXTS = ("dtype", "ranks", "trained", "execution", "head", "method", "checkpointing", "verdict")
"""Columns that are set flush left."""


def _name(advice: Advice) -> str:
    trained = "" if advice.lora is None else f" with LoRA ({advice.lora})"
    return advice.model + trained


def recommend(advice: Advice) -> list[str]:
    """Say which method to use, in a few sentences."""
    best = advice.best
    ranks = "" if advice.parallel is None else f", {advice.parallel}"
    size = name_size(advice.seq_len, advice.image_size)
    where = f"{_name(advice)}, {size}, {advice.dtype}{ranks}"
    where += "" if advice.execution == "eager" else ", as a CUDA graph"
    where += "" if advice.head == "logits" else f", head {advice.head}"
    where += f", on {advice.target}"
    if any(option.verdict == "unranked" for option in advice.options):
        return [f"No time is predicted, so methods that fit are not ranked: {where}."]
    if best is None:
        wrong = any(option.verdict == "wrong" for option in advice.options)
        return [f"No private method {'can be advised' if wrong else 'safely fits'}: {where}."]
    way = ""
    if advice.checkpointing == BEST:
        is_none = best.checkpointing == "none"
        way = " without checkpointing" if is_none else f" and {best.checkpointing} checkpointing"
    lines = [f"Use {best.method} with batches of {best.safe_batch_size}{way}: {where}."]
    close = [option.method for option in advice.options if option.verdict == "close"]
    if close:
        lines.append(f"No difference predicted between it and: {', '.join(close)}.")
    if advice.one_more_sample is not None:
        lines.append(_tell_sample(advice.one_more_sample))
    return lines


def _tell_sample(sample: OneMoreSample) -> str:
    """Say what one more sample costs, and what the peak is of."""
    first, *others = sample.peak_shares.items()
    held = f"{name_component(first[0])} take {100 * first[1]:.0f} %" + "".join(
        f", {name_component(name)} {100 * share:.0f} %"
        for name, share in others
        if share >= _LARGE_SHARE
    )
    peak = f"at the peak ({sample.phase.replace('_', ' ')}), {held}"
    return f"One more sample costs {format_size(sample.sample_bytes)}; {peak}."


def _cells(option: Option) -> tuple[str, ...]:
    if option.largest_batch_size is None or option.largest_peak_bytes is None:
        return ("",) * len(_FIGURES)
    return (
        f"{option.largest_batch_size:,}" + ("+" if option.limited_by == "search" else ""),
        f"{option.largest_peak_bytes / _MIB:,.0f} MiB",
        format_number(option.safe_batch_size, ",", "none"),
        format_number(option.tokens_per_s, ",.0f"),
        _format_interval(option),
        format_number(option.dp_flop_multiplier, ".2f"),
    )


def _lay_out(advice: Advice, names: Mapping[str, str]) -> list[str]:
    """Lay out the methods, with adapters and without side by side."""
    sides = advice.sides
    texts: dict[str, Callable[[Option], str]] = {"verdict": lambda option: option.verdict}
    if advice.checkpointing == BEST:
        texts["checkpointing"] = _name_way
    found = [
        {
            one.method: [*(text(one) for text in texts.values()), *_cells(one)]
            for one in side.options
        }
        for side in sides
    ]
    rows = [
        [names[one.method], *(c for side in found for c in side[one.method])]
        for one in advice.options
    ]
    columns = [*texts, *_FIGURES]
    header = _name_speed(["method", *columns * len(sides)], advice)
    lines = lay_out([header, *rows], texts=_find_texts(header))
    if len(sides) > 1:
        lora_at = lines[0].index(columns[0])
        whole_at = lines[0].index(columns[0], lora_at + 1)
        lines.insert(0, f"{' ' * lora_at}LoRA".ljust(whole_at) + "whole")
    return lines


def _name_way(option: Option) -> str:
    """Return the way of checkpointing; nothing where none fits."""
    return "" if option.largest_batch_size is None else str(option.checkpointing)


def format_advice(advice: Advice) -> str:
    """Return the advice as text."""
    sides = advice.sides
    options = [option for side in sides for option in side.options]
    signs = find_signs(options)
    names = {option.method: option.method + sign(option.method, signs) for option in options}
    messages = []
    for trained, side in zip(("", " (whole)"), sides, strict=False):
        for option in side.options:
            least = option.smallest_batch_size or 1
            smallest = f"takes at least {least:,} samples" if least > 1 else None
            messages += [(option.method + trained, why) for why in (option.message, smallest)]
    lines = [sentence for side in sides for sentence in recommend(side)] + _tell_prices(sides)
    lines += [*_lay_out(advice, names), *group_messages(messages), *explain_signs(signs)]
    return "\n".join([*lines, *_tell_memory(advice), f"Time: {advice.sure_of_time}."])


def _tell_prices(sides: Iterable[Advice]) -> list[str]:
    """Say what dtypes cost on a GPU that has no units for them."""
    known, prices = registry.names("targets"), {}
    for one in sides:
        target = registry.load("targets", one.target) if one.target in known else None
        prices[one.dtype] = None if target is None else target.price_of(one.dtype)
    return [f"{dtype}: {price}." for dtype, price in prices.items() if price]


def _tell_memory(advice: Advice) -> list[str]:
    if advice.budget_bytes is None:
        return []
    each = ", batches and peaks are those of each rank" if advice.parallel else ""
    return [f"Memory: {advice.budget_bytes / _MIB:,.0f} MiB{each}; {advice.sure_of_memory}."]


def _find_axes(sides: Sequence[Advice]) -> list[str]:
    """List what rows are about: dtype and size, and what differs between them."""
    always = ("dtype", "tokens" if sides[0].image_size is None else "pixels")
    return [name for name, cell in _ROW.items() if name in always or len(set(map(cell, sides))) > 1]


def format_winners(advices: Sequence[Advice]) -> str:
    """Return the advice for several dtypes and sequence lengths: a table with a row for each."""
    sides = [side for advice in advices for side in advice.sides]
    winners = [_find_winner(side) for side in sides]
    axes = _find_axes(sides)
    rows = [[_ROW[name](side) for name in axes] for side in sides]
    close: dict[str, list[str]] = defaultdict(list)
    for side, row in zip(sides, rows, strict=True):
        if names := [option.method for option in side.options if option.verdict == "close"]:
            close[", ".join(names)].append(" ".join(row))
    signs = find_signs(one for one in winners if one is not None)
    figures = dict(_WINNER)
    if sides[0].checkpointing != BEST:
        del figures["checkpointing"]
    header = _name_speed([*axes, "method", *figures], sides[0])
    table = [
        [*row, one.method + sign(one.method, signs), *(cell(one) for cell in figures.values())]
        if one is not None
        else [*row, "none", *("" for _ in figures)]
        for row, one in zip(rows, winners, strict=True)
    ]
    what = f"{_name(sides[0])}, on {sides[0].target}"
    lines = [
        f"The fastest private method at its largest safe batch: {what}.",
        *lay_out([header, *table], texts=_find_texts(header)),
    ]
    if close:
        said = "; ".join(f"{names} ({', '.join(at)})" for names, at in close.items())
        lines.append(f"No difference predicted between it and: {said}.")
    if any(one is not None and one.tokens_per_s is None for one in winners):
        lines.append(
            "unknown: no time is predicted, so methods are not ranked; the one with the largest "
            "safe batch is named."
        )
    if None in winners:
        lines.append("none: no private method safely fits, or can be advised; --json says why.")
    lines += [
        f"{' '.join(row)}: {_tell_sample(side.one_more_sample)}"
        for side, row in zip(sides, rows, strict=True)
        if side.one_more_sample is not None
    ]
    largest = max(sides, key=lambda one: (one.budget_bytes is not None, one.parallel or ""))
    lines += [*_tell_prices(sides), *explain_signs(signs), *_tell_memory(largest)]
    times = dict.fromkeys(side.sure_of_time for side in sides)
    is_known = any(one is not None and one.tokens_per_s is not None for one in winners)
    units = name_units(sides[0].image_size)
    time = _TIMES.format(units=units) if is_known and len(times) > 1 else "; ".join(times)
    return "\n".join([*lines, f"Time: {time}."])


def _name_speed(header: Sequence[str], advice: Advice) -> list[str]:
    """Return a header with the speed by the name of what it counts."""
    speed = f"{name_units(advice.image_size)}/s"
    return [speed if name == _SPEED else name for name in header]


def _find_texts(header: Sequence[str]) -> list[int]:
    return [at for at, name in enumerate(header) if name in _TEXTS]


def _find_winner(advice: Advice) -> Option | None:
    """Return the best method; where none is ranked, the one with the largest safe batch."""
    unranked = [one for one in advice.options if one.verdict == "unranked"]
    return advice.best or max(unranked, key=lambda one: one.safe_batch_size or 0, default=None)


def explain_batches(results: Sequence[Result]) -> list[str]:
    """Return the lines of ``explain_safety``, and where pieces of free memory bound a batch."""
    lines = explain_safety(results)
    for result in results:
        experiment, capacity = result.experiment, result.capacity
        if capacity is not None and capacity.limited_by == "fragmentation":
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


def explain_safety(results: Sequence[Result]) -> list[str]:
    """Say what a safe batch is, and for which methods it is something else."""
    methods: dict[str, dict[str, None]] = defaultdict(dict)
    for result in results:
        if result.capacity is not None:
            meaning = _SAFE[result.capacity.safe_share is not None]
            methods[meaning][result.experiment.method] = None
    meanings = sorted(methods, key=lambda meaning: len(methods[meaning]), reverse=True)
    others = [f"; for {', '.join(methods[meaning])}: {meaning}" for meaning in meanings[1:]]
    return [f"Safe: {meanings[0]}{''.join(others)}."] if meanings else []


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


class _Remedy(NamedTuple):
    """What may take less memory."""

    options: Mapping[str, str]
    fields: Mapping[str, Any]
    """Of an experiment that has it."""

    helps: Callable[[Experiment], bool]
    """Whether it is not there already, and may help."""


_REMEDIES = (
    _Remedy(
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        lambda one: one.dtype in ("float32", "tf32", "float64") and one.lora is None,
    ),
    _Remedy(
        {"dtype": "bfloat16", "parameters_dtype": "bfloat16"},
        {"dtype": "bfloat16", "parameters_dtype": "bfloat16"},
        lambda one: one.lora is not None and one.parameters_dtype != "bfloat16",
    ),
    _Remedy(
        {"checkpointing": BEST},
        {"checkpointing": "non-reentrant"},
        lambda one: one.checkpointing == "none" and one.image_size is None,
    ),
    _Remedy(
        {"head": BEST},
        {"head": "chunked"},
        lambda one: one.head == "logits" and not one.method.startswith("opacus"),
    ),
    _Remedy(
        {"lora": "rank=16"},
        {"lora": {"rank": 16}},
        lambda one: one.lora is None and one.trained == "all" and one.task == "causal-lm",
    ),
    _Remedy({"quantization": "nf4"}, {"quantization": "nf4"}, lambda one: one.base_format is None),
    _Remedy(
        {"world_sizes": "2 4 8"},
        {"parallel": {"kind": "fsdp", "world_size": 2}},
        lambda one: one.parallel is None and one.device == "cuda",
    ),
)


def list_remedies(results: Sequence[Result]) -> list[str]:
    """Say what may take less memory, where that is all that keeps private methods from training."""
    private = [one for one in results if one.experiment.method != BASELINE] or results
    is_safe = [one.capacity is not None and one.capacity.safe_batch_size for one in private]
    lacking = [one.experiment for one in private if one.outcome == "oom" or one.capacity]
    if any(is_safe) or not lacking:
        return []
    asked = [one for one in lacking if one.lora is not None] or lacking
    found = [
        " ".join(f"{spell(name)} {value}" for name, value in remedy.options.items())
        for remedy in _REMEDIES
        if any(map(remedy.helps, asked)) and all(_accepts(one, remedy.fields) for one in asked)
    ]
    return [f"What may take less memory: {', '.join(found)}."] if found else []


def _accepts(experiment: Experiment, fields: Mapping[str, Any]) -> bool:
    try:
        Experiment.model_validate({**experiment.model_dump(mode="json"), **fields})
    except ValidationError:
        return False
    return True


def compare_heads(found: Sequence[Advice]) -> list[str]:
    """Say which way to a loss is the fastest where several were asked, and what it brings."""
    sides = [side for advice in found for side in advice.sides]
    axes = [name for name in _find_axes(sides) if name != "head"]
    alike: dict[tuple[str, ...], dict[str, Option]] = defaultdict(dict)
    for side in sides:
        if side.best is not None:
            alike[tuple(_ROW[name](side) for name in axes)][side.head] = side.best
    lines = []
    for where, by_head in alike.items():
        head, best = max(by_head.items(), key=lambda one: one[1].tokens_per_s or 0.0)
        usual = by_head.get("logits")
        if head != "logits" and usual is not None and usual.tokens_per_s and best.tokens_per_s:
            ratio = best.tokens_per_s / usual.tokens_per_s
            lines.append(
                f"{' '.join(where)}: head {head} takes {best.safe_batch_size:,} samples for "
                f"{usual.safe_batch_size:,} with logits, at {ratio:.2f} times the speed."
            )
    return lines
