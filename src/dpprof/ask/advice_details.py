"""What `dpprof advise --details` adds: all columns, reasons, and what each number rests on."""

from collections.abc import Sequence

from dpprof.ask.advice_text import CELLS, choose_columns, list_options, recommend
from dpprof.ask.layout import group_messages
from dpprof.experiments.records.advice import Advice, OneMoreSample
from dpprof.results.analysis.difference.waterfall import format_size, name_component

_LARGE_SHARE = 0.1  # a component with this share of the peak is named, after the largest


def detail_advice(advices: Sequence[Advice]) -> list[str]:
    """Say everything about the methods for each question, and what the numbers rest on."""
    sides = [side for advice in advices for side in advice.sides]
    lines: list[str] = []
    for side in sides:
        lines += [recommend(side)] if len(sides) > 1 else []
        lines += list_options(side, choose_columns(CELLS, side))
        lines += [] if side.one_more_sample is None else [_tell_sample(side.one_more_sample)]
        for option in side.options:
            least = option.smallest_batch_size or 1
            smallest = f"takes at least {least:,} samples" if least > 1 else None
            lines += group_messages((option.method, why) for why in (option.message, smallest))
        if side.budget_bytes is not None:
            each = ", batches and peaks are those of each rank" if side.parallel else ""
            room = f"{side.budget_bytes / 2**20:,.0f} MiB{each}"
            lines.append(f"Memory: {room}; {side.sure_of_memory}.")
        lines += [f"Time: {side.sure_of_time}.", ""]
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
