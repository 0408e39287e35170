"""What `dpprof advise` says, as text."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from dpprof.ask.layout import explain_signs, format_number, group_messages, lay_out
from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.tasks import name_size, name_units
from dpprof.experiments.config.validation import spell
from dpprof.experiments.records.advice import Advice, OneMoreSample, OnGpus, Option
from dpprof.experiments.records.result import Result
from dpprof.results.analysis.advice.advice import (
    BEST,
    compare_options,
    find_as_cheap,
    find_fastest,
)
from dpprof.results.analysis.advice.ratios import Ratio
from dpprof.results.analysis.difference.waterfall import format_size, name_component
from dpprof.results.analysis.standings import find_signs, sign
from dpprof.results.analysis.tables.axes import BASELINE
from dpprof.results.report.wording import listed, plural
from dpprof.system.numbers import three_digits

_SPEED = "tokens/s"
_MIB = 2**20

_LARGE_SHARE = 0.1
"""A component with this share of the peak is named, after the largest."""


def _format_interval(option: Option) -> str:
    low, high = option.tokens_per_s_low, option.tokens_per_s_high
    return "unknown" if low is None or high is None else f"{low:,.0f} to {high:,.0f}"


_ROW: Mapping[str, Callable[[Advice], str]] = {
    "dtype": lambda side: side.dtype,
    "tokens": lambda side: f"{side.seq_len:,}",
    "pixels": lambda side: str(side.image_size),
    "ranks": lambda side: side.parallel or "1",
    "trained": lambda side: "whole" if side.lora is None else "LoRA",
    "execution": lambda side: side.execution,
    "head": lambda side: side.head,
}
"""What a row of winners is about. Dtype and size are always shown, others where they vary."""

_CELLS: Mapping[str, Callable[[Option], str]] = {
    "verdict": lambda option: option.verdict,
    "checkpointing": lambda option: str(option.checkpointing),
    "largest batch": lambda option: (
        f"{option.largest_batch_size:,}{'+' if option.limited_by == 'search' else ''}"
    ),
    "peak": lambda option: f"{(option.largest_peak_bytes or 0) / _MIB:,.0f} MiB",
    "safe batch": lambda option: format_number(option.safe_batch_size, ",", "none"),
    _SPEED: lambda option: format_number(option.tokens_per_s, ",.0f"),
    "90 % interval": _format_interval,
    "FLOPs x": lambda option: format_number(option.dp_flop_multiplier, ".2f"),
    "GiB at peak": lambda option: three_digits(option.safe_peak_bytes, 2**30),
}
"""What is said of a method, by the head of its column."""

_OF_METHODS = tuple(name for name in _CELLS if name != "GiB at peak")
_OF_WINNERS = ("checkpointing", "safe batch", _SPEED, "90 % interval", "GiB at peak")
_TIMES = (
    "{units} per second are predicted, with 90 % intervals; what they rest on differs by row, and "
    "--json says it"
)
_TEXTS = ("dtype", "ranks", "trained", "execution", "head", "method", "checkpointing", "verdict")
"""Columns that are set flush left."""


def _choose_columns(names: Iterable[str], advice: Advice) -> list[str]:
    """Leave out the way of checkpointing where it was not asked for."""
    return [name for name in names if name != "checkpointing" or advice.checkpointing == BEST]


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


def _lay_out(advice: Advice, names: Mapping[str, str]) -> list[str]:
    """Lay out the methods, with adapters and without side by side."""
    sides = advice.sides
    columns = _choose_columns(_OF_METHODS, advice)
    cells: dict[str, list[str]] = defaultdict(list)
    for side in sides:
        for option in side.options:
            fits = None not in (option.largest_batch_size, option.largest_peak_bytes)
            shown = columns if fits else columns[:1]
            texts = [_CELLS[name](option) for name in shown]
            cells[option.method] += texts + [""] * (len(columns) - len(shown))
    rows = [[names[option.method], *cells[option.method]] for option in advice.options]
    lines = _tabulate(["method", *columns * len(sides)], rows, advice)
    if len(sides) > 1:
        lora_at = lines[0].index(columns[0])
        whole_at = lines[0].index(columns[0], lora_at + 1)
        lines.insert(0, f"{' ' * lora_at}LoRA".ljust(whole_at) + "whole")
    return lines


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
    names, prices = registry.names("targets"), {}
    for side in sides:
        target = registry.load("targets", side.target) if side.target in names else None
        prices[side.dtype] = None if target is None else target.price_of(side.dtype)
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
    signs = find_signs(option for option in winners if option is not None)
    figures = _choose_columns(_OF_WINNERS, sides[0])
    table = [
        [*row, "none", *("" for _ in figures)]
        if best is None
        else [*row, best.method + sign(best.method, signs), *(_CELLS[f](best) for f in figures)]
        for row, best in zip(rows, winners, strict=True)
    ]
    what = f"{_name(sides[0])}, on {sides[0].target}"
    lines = [
        f"The fastest private method at its largest safe batch: {what}.",
        *_tabulate([*axes, "method", *figures], table, sides[0]),
    ]
    if close:
        said = "; ".join(f"{names} ({', '.join(where)})" for names, where in close.items())
        lines.append(f"No difference predicted between it and: {said}.")
    is_timed = [best.tokens_per_s is not None for best in winners if best is not None]
    if not all(is_timed):
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
    largest = max(sides, key=lambda side: (side.budget_bytes is not None, side.parallel or ""))
    lines += [*_tell_prices(sides), *explain_signs(signs), *_tell_memory(largest)]
    times = dict.fromkeys(side.sure_of_time for side in sides)
    units = name_units(sides[0].image_size)
    time = _TIMES.format(units=units) if any(is_timed) and len(times) > 1 else "; ".join(times)
    return "\n".join([*lines, f"Time: {time}."])


def _tabulate(header: Sequence[str], rows: Iterable[list[str]], advice: Advice) -> list[str]:
    """Return the lines of a table whose header names the speed by what it counts."""
    speed = f"{name_units(advice.image_size)}/s"
    named = [speed if name == _SPEED else name for name in header]
    return lay_out([named, *rows], [i for i, name in enumerate(header) if name in _TEXTS])


def _find_winner(advice: Advice) -> Option | None:
    """Return the best method; where none is ranked, the one with the largest safe batch."""
    unranked = [option for option in advice.options if option.verdict == "unranked"]
    return advice.best or max(unranked, key=lambda o: o.safe_batch_size or 0, default=None)


def list_smallest_ranks(results: Sequence[Result]) -> list[str]:
    """Say on how many ranks each method trains at all; nothing for one number of ranks."""
    sizes = sorted({result.experiment.world_size for result in results})
    if len(sizes) == 1:
        return []
    fits: dict[str, list[int]] = {result.experiment.method: [] for result in results}
    for result in results:
        if result.capacity is not None:
            fits[result.experiment.method].append(result.experiment.world_size)
    fitting = [f"{method} {min(ranks)}" for method, ranks in fits.items() if ranks]
    lines = [f"smallest number of GPUs: {', '.join(fitting)}"] if fitting else []
    if none := [method for method, ranks in fits.items() if not ranks]:
        lines.append(f"on none of {', '.join(map(str, sizes))}: {', '.join(none)}")
    return lines


_IN_16_BITS = {"dtype": "bfloat16"}
_REMEDIES: tuple[tuple[Mapping[str, str], Mapping[str, Any], Callable[[Experiment], bool]], ...] = (
    (
        _IN_16_BITS,
        _IN_16_BITS,
        lambda asked: asked.dtype in ("float32", "tf32", "float64") and asked.lora is None,
    ),
    (
        _IN_16_BITS | {"parameters_dtype": "bfloat16"},
        _IN_16_BITS | {"parameters_dtype": "bfloat16"},
        lambda asked: asked.lora is not None and asked.parameters_dtype != "bfloat16",
    ),
    (
        {"checkpointing": BEST},
        {"checkpointing": "non-reentrant"},
        lambda asked: asked.checkpointing == "none" and asked.image_size is None,
    ),
    (
        {"head": BEST},
        {"head": "chunked"},
        lambda asked: asked.head == "logits" and not asked.method.startswith("opacus"),
    ),
    (
        {"lora": "rank=16"},
        {"lora": {"rank": 16}},
        lambda asked: asked.lora is None and asked.trained == "all" and asked.task == "causal-lm",
    ),
    ({"quantization": "nf4"}, {"quantization": "nf4"}, lambda q: q.base_format is None),
    (
        {"world_sizes": "2 4 8"},
        {"parallel": {"kind": "fsdp", "world_size": 2}},
        lambda asked: asked.parallel is None and asked.device == "cuda",
    ),
)
"""What may take less memory: how it is asked for, fields of an experiment that has it, and whether
it may help one that lacks it."""


def list_remedies(results: Sequence[Result]) -> list[str]:
    """Say what may take less memory, where that is all that keeps private methods from training."""
    private = [r for r in results if r.experiment.method != BASELINE] or results
    is_safe = [r.capacity is not None and r.capacity.safe_batch_size for r in private]
    lacking = [r.experiment for r in private if r.outcome == "oom" or r.capacity]
    if any(is_safe) or not lacking:
        return []
    asked = [experiment for experiment in lacking if experiment.lora is not None] or lacking
    remedies = [
        " ".join(f"{spell(name)} {value}" for name, value in options.items())
        for options, fields, helps in _REMEDIES
        if any(map(helps, asked)) and all(_accepts(e, fields) for e in asked)
    ]
    return [f"What may take less memory: {', '.join(remedies)}."] if remedies else []


def _accepts(experiment: Experiment, fields: Mapping[str, Any]) -> bool:
    try:
        Experiment.model_validate({**experiment.model_dump(mode="json"), **fields})
    except ValidationError:
        return False
    return True


def compare_heads(advices: Sequence[Advice]) -> list[str]:
    """Say which way to a loss is the fastest where several were asked, and what it brings."""
    sides = [side for advice in advices for side in advice.sides]
    axes = [name for name in _find_axes(sides) if name != "head"]
    alike: dict[tuple[str, ...], dict[str, Option]] = defaultdict(dict)
    for side in sides:
        if side.best is not None:
            alike[tuple(_ROW[name](side) for name in axes)][side.head] = side.best
    lines = []
    for where, by_head in alike.items():
        head = max(by_head, key=lambda name: by_head[name].tokens_per_s or 0.0)
        best, usual = by_head[head], by_head.get("logits")
        if head != "logits" and usual is not None and usual.tokens_per_s and best.tokens_per_s:
            ratio = best.tokens_per_s / usual.tokens_per_s
            lines.append(
                f"{' '.join(where)}: head {head} takes {best.safe_batch_size:,} samples for "
                f"{usual.safe_batch_size:,} with logits, at {ratio:.2f} times the speed"
                f"{_tell_interval(compare_options(usual, best))}."
            )
    return lines


def _tell_interval(ratio: Ratio) -> str:
    """Say how sure a ratio is, where that is known."""
    if ratio.low is None:
        return ""
    interval = f" (90 % interval {ratio.low:.2f} to {ratio.high:.2f}"
    return f"{interval}: no difference is predicted)" if ratio.holds_one else f"{interval})"


_OF_GPUS: Mapping[str, Callable[[OnGpus], str]] = {
    "GPUs": lambda option: f"{option.gpus:,}",
    "method": lambda option: option.method,
    "safe batch": lambda option: f"{option.safe_batch_size:,}",
    _SPEED: lambda option: f"{option.tokens_per_s:,.0f}",
    "90 % interval": lambda option: (
        f"{option.tokens_per_s_low or 0.0:,.0f} to {option.tokens_per_s_high or 0.0:,.0f}"
    ),
    "per GPU": lambda option: f"{option.tokens_per_s_per_gpu:,.0f}",
    "efficiency": lambda option: f"{option.efficiency:.0%}",
    "GPU hours per 1e9 tokens": lambda option: three_digits(option.gpu_hours_per_billion),
}


def format_gpus(options: Sequence[OnGpus]) -> list[str]:
    """Say which number of GPUs is the cheapest, which the fastest, and what each brings.

    Nothing is said where no speed is predicted.
    """
    fastest = find_fastest(options)
    if not fastest:
        return []
    cheap, *as_cheap = find_as_cheap(fastest)
    fast = max(fastest, key=lambda option: option.tokens_per_s)
    small = min(fastest, key=lambda option: option.gpus)
    where = [f"{o.method} on {o.gpus:,} {plural(o.gpus, 'GPU')}" for o in (cheap, fast, small)]
    hours = three_digits(cheap.gpu_hours_per_billion)
    alike = f"; {listed(f'{o.gpus:,}' for o in as_cheap)} may be as cheap" if as_cheap else ""
    said = f"Cheapest: {where[0]}, {hours} GPU hours for a billion tokens{alike}. "
    said += f"Fastest: {where[1]}, {fast.tokens_per_s:,.0f} tokens/s. Smallest: {where[2]}."
    rows = [[cell(option) for cell in _OF_GPUS.values()] for option in fastest]
    return [
        said,
        *lay_out([list(_OF_GPUS), *rows], texts=(1,)),
        "Efficiency: tokens/s of a GPU over those with the fewest GPUs that train with the method.",
    ]
