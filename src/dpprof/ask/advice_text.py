"""What `dpprof advise` says on a screen: the answer, a table, and how far to trust it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from dpprof.ask import layout
from dpprof.experiments.config import registry
from dpprof.experiments.config.tasks import name_size, name_units
from dpprof.experiments.records.advice import Advice, OnGpus, Option
from dpprof.experiments.records.result import Result
from dpprof.results.analysis.advice.advice import (
    BEST,
    compare_options,
    find_as_cheap,
    find_fastest,
)
from dpprof.results.analysis.advice.ratios import Ratio
from dpprof.results.analysis.standings import find_signs, sign
from dpprof.system.words import listed, plural, three_digits

SPEED = "tokens/s"
_GIB = 2**30

_MANY = 10**9  # tokens that hours are told for; of images it is a thousandth


def _format_interval(option: Option | OnGpus) -> str:
    low, high = option.tokens_per_s_low, option.tokens_per_s_high
    return "unknown" if low is None or high is None else f"{low:,.0f} to {high:,.0f}"


def _more(option: Option) -> str:
    """Return a sign where larger batches were not looked for."""
    return "+" if option.limited_by == "search" else ""


def _find_execution(advice: Advice) -> str:
    """Return how the kernels of the advised method are started."""
    return (advice.best and advice.best.execution) or advice.execution


_ROW: Mapping[str, Callable[[Advice], str]] = {
    "dtype": lambda side: side.dtype,
    "tokens": lambda side: f"{side.seq_len:,}",
    "pixels": lambda side: str(side.image_size),
    "ranks": lambda side: side.parallel or "1",
    "trained": lambda side: "whole" if side.lora is None else "LoRA",
    "execution": _find_execution,
    "head": lambda side: side.head,
}
"""What a row of winners is about. Dtype and size are always shown, others where they vary."""

_USUAL = {"head": "logits", "execution": "eager", "checkpointing": "none"}
"""What may be asked in several ways, and the way that the others are compared with."""

CELLS: Mapping[str, Callable[[Option], str]] = {
    "verdict": lambda option: option.verdict,
    "checkpointing": lambda option: str(option.checkpointing),
    "execution": lambda option: str(option.execution),
    "batch": lambda option: (
        layout.format_number(option.safe_batch_size, ",", "none") + _more(option)
    ),
    "peak GiB": lambda option: three_digits(option.safe_peak_bytes, _GIB),
    SPEED: lambda option: layout.format_number(option.tokens_per_s, ",.0f"),
    "90 % interval": _format_interval,
    "FLOPs x": lambda option: layout.format_number(option.dp_flop_multiplier, ".2f"),
    "largest batch": lambda option: f"{option.largest_batch_size:,}{_more(option)}",
    "its peak, MiB": lambda option: f"{(option.largest_peak_bytes or 0) / 2**20:,.0f}",
}
"""What is said of a method, by the head of its column."""

_OF_WINNERS = ("checkpointing", "batch", "peak GiB", SPEED, "90 % interval")
_ON_SCREEN = ("verdict", "execution", *_OF_WINNERS)
_TEXTS = ("dtype", "ranks", "trained", "execution", "head", "method", "checkpointing", "verdict")
"""Columns that are set flush left."""


def choose_columns(names: Iterable[str], advice: Advice) -> list[str]:
    """Leave out the way of checkpointing where it was not asked for, and execution where equal."""
    hidden = set() if advice.checkpointing == BEST else {"checkpointing"}
    hidden |= set() if advice.execution == "default" else {"execution"}
    return [name for name in names if name not in hidden]


def _name(advice: Advice) -> str:
    return advice.model + layout.name_adapters(advice.model, advice.lora)


def _name_target(advice: Advice) -> str:
    """Return the target, with its memory where that is not the card's."""
    card = registry.find_gpu(advice.target)
    if card is None or advice.budget_bytes in (None, card.memory_bytes):
        return f"on {advice.target}"
    return f"on {advice.target} with {three_digits(advice.budget_bytes, _GIB)} GiB"


def _count(option: Option) -> str:
    """Say how many samples one pass can take; a batch may have more, in parts."""
    count = option.safe_batch_size or 0
    return f"{count:,} {plural(count, 'sample')} at once"


def recommend(advice: Advice) -> str:
    """Say which method to use, with which batch, and what is asked."""
    best = advice.best
    ranks = "" if advice.parallel is None else f", {advice.parallel}"
    head = "" if advice.head == "logits" else f", head {advice.head}"
    size = name_size(advice.seq_len, advice.image_size)
    where = f"{_name(advice)}, {size}{ranks}{head}, {_name_target(advice)}"
    others = _find_execution(advice), f"loop {advice.loop}", advice.noise_strategy
    settings = layout.name_settings(advice.dtype, advice.optimizer, *others)
    if any(option.verdict == "unranked" for option in advice.options):
        return f"No time is predicted ({settings}), so methods that fit are not ranked: {where}."
    if not any(option.private for option in advice.options):
        return f"No private method was asked about ({settings}): {where}."
    if best is None:
        wrong = any(option.verdict == "wrong" for option in advice.options)
        can = "can be advised" if wrong else "safely fits"
        return f"No private method {can} ({settings}): {where}."
    way = ""
    if advice.checkpointing == BEST:
        is_none = best.checkpointing == "none"
        way = " without" if is_none else f" with {best.checkpointing}"
        way += " checkpointing"
    return f"Use {best.method}, {_count(best)}{way} ({settings}): {where}."


def _tell_speed(advice: Advice) -> list[str]:
    """Say how fast the advised method is, and what is as fast as far as is predicted.

    Where no method is advised, say what speaks against one.
    """
    best = advice.best
    if best is None:
        private = (o for o in advice.options if o.private and o.message)
        return [f"{option.method}: {option.message}." for option in private][:1]
    if not best.tokens_per_s:
        return []
    many, named = (_MANY, "billion") if advice.image_size is None else (_MANY // 1000, "million")
    ends = best.tokens_per_s_high, best.tokens_per_s, best.tokens_per_s_low
    low, hours, high = (three_digits(speed and many / speed, 3600) for speed in ends)
    units = name_units(advice.image_size)
    said = f"{best.tokens_per_s:,.0f} {units}/s: a {named} {units} take {hours} hours"
    lines = [f"{said} (90 % interval {low} to {high})."]
    close = [_mark(option) for option in advice.options if option.verdict == "close"]
    return [*lines, f"May be as fast: {', '.join(close)}."] if close else lines


def _tell_briefly(advice: Advice) -> str:
    """Say which method fits with which batch, and how fast it is."""
    best = advice.best
    if best is None:
        return "no private method safely fits, or can be advised"
    speed = layout.format_number(best.tokens_per_s, ",.0f")
    units = name_units(advice.image_size)
    return f"{best.method}, {_count(best)}, {speed} {units}/s"


def format_advice(advice: Advice, others: Sequence[str] = ()) -> str:
    """Return the advice as text that fits a screen; ``others`` is said below the table.

    Methods for the model without adapters, where asked, are in the details.
    """
    signs = find_signs(advice.options)
    for hidden in ("", "peak GiB"):  # where there is no room for it
        columns = [name for name in choose_columns(_ON_SCREEN, advice) if name != hidden]
        table = list_options(advice, columns)
        if max(map(len, table)) <= layout.WIDTH:
            break
    for place, option in enumerate(advice.options, start=1):
        if option.message is not None and not option.safe_batch_size:
            table[place] += f"  {option.message}"
    whole = [] if advice.whole is None else [f"Without adapters: {_tell_briefly(advice.whole)}."]
    return layout.fit_screen(
        [recommend(advice), *_tell_speed(advice)],
        table,
        [
            *whole,
            *tell_prices(advice.sides),
            *others,
            *layout.explain_signs(signs),
            layout.explain_trust(advice.rests_on),
        ],
    )


def list_options(advice: Advice, columns: Sequence[str]) -> list[str]:
    """Return the lines of a table of the methods; of those that do not fit only the verdict."""
    rows = []
    for option in advice.options:
        fits = option.largest_batch_size is not None
        shown = [CELLS[name](option) for name in (columns if fits else columns[:1])]
        rows.append([_mark(option), *shown, *[""] * (len(columns) - len(shown))])
    return tabulate(["method", *columns], rows, advice)


def tell_prices(sides: Iterable[Advice]) -> list[str]:
    """Say what dtypes cost on a GPU that has no units for them."""
    prices = {}
    for side in sides:
        target = registry.find_gpu(side.target)
        prices[side.dtype] = None if target is None else target.price_of(side.dtype)
    return [f"{dtype}: {price}." for dtype, price in prices.items() if price]


def _find_axes(sides: Sequence[Advice]) -> list[str]:
    """List what rows are about: dtype and size, and what differs between them."""
    always = ("dtype", "tokens" if sides[0].image_size is None else "pixels")
    return [name for name, cell in _ROW.items() if name in always or len(set(map(cell, sides))) > 1]


def format_winners(advices: Sequence[Advice], others: Sequence[str] = ()) -> str:
    """Return the advice for several dtypes and sequence lengths: a table with a row for each."""
    sides = [side for advice in advices for side in advice.sides]
    winners = [_find_winner(side) for side in sides]
    axes = _find_axes(sides)
    rows = [[_ROW[name](side) for name in axes] for side in sides]
    close: dict[str, list[str]] = defaultdict(list)
    for side, row in zip(sides, rows, strict=True):
        if names := [option.method for option in side.options if option.verdict == "close"]:
            close[", ".join(names)].append(" ".join(row))
    ranked = [option for option in winners if option is not None]
    for hidden in ("", "peak GiB"):  # where there is no room for it
        figures = [name for name in choose_columns(_OF_WINNERS, sides[0]) if name != hidden]
        cells = [
            [*row, "none", *("" for _ in figures)]
            if best is None
            else [*row, _mark(best), *(CELLS[f](best) for f in figures)]
            for row, best in zip(rows, winners, strict=True)
        ]
        table = tabulate([*axes, "method", *figures], cells, sides[0])
        if max(map(len, table)) <= layout.WIDTH:
            break
    after = []
    if close:
        said = "; ".join(f"{names} ({', '.join(where)})" for names, where in close.items())
        after.append(f"May be as fast: {said}.")
    if any(option.tokens_per_s is None for option in ranked):
        after.append("unknown: no time is predicted; the method with the largest batch is named.")
    if None in winners:
        after.append("none: no private method safely fits, or can be advised; --details says why.")
    after += [*tell_prices(sides), *others, *layout.explain_signs(find_signs(ranked))]
    after.append(layout.explain_trust(*(side.rests_on for side in sides)))
    return layout.fit_screen([_name_winners(sides, winners)], table, after)


def _mark(option: Option) -> str:
    """Return the method with the signs that it bears in this row."""
    return option.method + sign(option.method, find_signs([option]))


def _name_winners(sides: Sequence[Advice], winners: Sequence[Option | None]) -> str:
    """Say which methods are the fastest, and what all rows have in common."""
    ranked = [best for best in winners if best is not None]
    names = {best.method for best in ranked}
    executions = {_find_execution(side) for side in sides}
    shared = layout.name_settings(sides[0].optimizer, *(executions if len(executions) == 1 else ()))
    where = f"({shared}): {_name(sides[0])}, {_name_target(sides[0])}"
    if len(names) != 1 or any(best.tokens_per_s is None for best in ranked):
        return f"The fastest private method with its largest safe batch {where}."
    return f"Use {names.pop()}, the fastest in each row, with its batch {where}."


def tabulate(header: Sequence[str], rows: Iterable[list[str]], advice: Advice) -> list[str]:
    """Return the lines of a table whose header names the speed by what it counts."""
    speed = f"{name_units(advice.image_size)}/s"
    named = [speed if name == SPEED else name for name in header]
    return layout.lay_out([named, *rows], [i for i, name in enumerate(header) if name in _TEXTS])


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


def compare_ways(advices: Sequence[Advice]) -> list[str]:
    """Say which head, execution or checkpointing is the fastest of several, and what it brings."""
    sides = [side for advice in advices for side in advice.sides if side.best is not None]
    lines = []
    for axis, usual in _USUAL.items() if sides else ():
        names = [name for name in _find_axes(sides) if name != axis]
        alike: dict[str, dict[str, Option]] = defaultdict(dict)
        for side in sides:
            best = side.best
            assert best is not None
            ways = alike[" ".join(_ROW[name](side) for name in names)]
            if axis != "checkpointing":
                ways[_ROW[axis](side)] = best
            elif side.without_checkpointing is not None:
                ways |= {"none": side.without_checkpointing, str(best.checkpointing): best}
        for where, options in alike.items():
            way = max(options, key=lambda name: options[name].tokens_per_s or 0.0, default=usual)
            best, other = options.get(way), options.get(usual)
            if best and other and best is not other and other.tokens_per_s and best.tokens_per_s:
                ratio = best.tokens_per_s / other.tokens_per_s
                lines.append(
                    f"{where}: {axis} {way} takes {best.safe_batch_size:,} samples for "
                    f"{other.safe_batch_size:,} with {usual}, at {ratio:.2f} times the speed"
                    f"{_tell_interval(compare_options(other, best))}."
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
    "batch": lambda option: f"{option.safe_batch_size:,}",
    SPEED: lambda option: f"{option.tokens_per_s:,.0f}",
    "90 % interval": _format_interval,
    "efficiency": lambda option: f"{option.efficiency:.0%}",
    "GPU hours/1e9": lambda option: three_digits(option.gpu_hours_per_billion),
}


def format_gpus(
    options: Sequence[OnGpus], advices: Sequence[Advice], others: Sequence[str] = ()
) -> str:
    """Say which number of GPUs is the cheapest, which the fastest, and what each brings.

    Where no speed is predicted, the largest batches are said.
    """
    fastest = find_fastest(options)
    if not fastest:
        return format_winners(advices, others)
    cheap, *as_cheap = find_as_cheap(fastest)
    fast = max(fastest, key=lambda option: option.tokens_per_s)
    small = min(fastest, key=lambda option: option.gpus)
    where = [f"{o.method} on {o.gpus:,} {plural(o.gpus, 'GPU')}" for o in (cheap, fast, small)]
    hours = three_digits(cheap.gpu_hours_per_billion)
    first = advices[0]
    settings = layout.name_settings(first.dtype, first.optimizer, _find_execution(first))
    alike = f"; {listed(f'{o.gpus:,}' for o in as_cheap)} may be as cheap" if as_cheap else ""
    said = f"Cheapest: {where[0]} ({settings}), {hours} GPU hours for a billion tokens{alike}. "
    said += f"Fastest: {where[1]}, {fast.tokens_per_s:,.0f} tokens/s. Smallest: {where[2]}."
    size = name_size(first.seq_len, first.image_size)
    about = f"Asked: {_name(first)}, {size}, {_name_target(first)}."
    named = {option.method for option in fastest}
    signs = find_signs(o for advice in advices for o in advice.options if o.method in named)
    rows = [
        [
            cell(option) + (sign(option.method, signs) if name == "method" else "")
            for name, cell in _OF_GPUS.items()
        ]
        for option in fastest
    ]
    bases = [advice.rests_on for advice in advices]
    efficiency = "Efficiency: tokens/s of a GPU over those with the fewest GPUs that train."
    return layout.fit_screen(
        [said, about],
        layout.lay_out([list(_OF_GPUS), *rows], texts=(1,)),
        [efficiency, *others, *layout.explain_signs(signs), layout.explain_trust(*bases)],
    )
