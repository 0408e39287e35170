"""Predict the memory, FLOPs and least time of one experiment, without running it.

With what was measured of a run, say how far off the prediction is, and what would explain it.
"""

import itertools
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from dpprof.ask.answer import Answer, DataFrame, Figure, load_figure, tabulate
from dpprof.ask.commands.common import FILE, Parser, ending_in_a_sentence
from dpprof.ask.commands.options import add_experiment_options, read_given
from dpprof.ask.defaults import DESCRIBED
from dpprof.ask.layout import WIDTH, name_settings
from dpprof.ask.measured import Measured, compare, write_rows
from dpprof.ask.predictions import PredictionError, predict
from dpprof.ask.questions import make_experiment, naming
from dpprof.experiments.config.datasheets import find_context
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.tasks import name_size
from dpprof.experiments.launch.progress import tell_result
from dpprof.experiments.records.result import Result, result_path
from dpprof.experiments.records.step_costs import Allocator, Memory, find_unknown_workspaces
from dpprof.experiments.records.varied import Varied
from dpprof.system.console import printable
from dpprof.system.files import check_writable

INSTRUMENT = "estimate"
_GIB, _MOST = 2**30, 8
_PEAK_WITHIN = 0.0164
"""Half the 90 % interval of a peak on a GPU: nine of ten peaks of other sources whose training loop
is known are so near (perf/intervals.md). Those of images hold workspaces that nobody knows."""
MEASURED_RUNS = Path("results", "measured.csv")


class Predicted(Answer):
    """One prediction; ``result`` has every figure (docs/numbers/README.md).

    ``compared`` says how it differs from what was measured, in lines.
    """

    _short: ClassVar = ("component", "bytes", "share")

    def __init__(self, result: Result, compared: Sequence[str] = ()) -> None:
        self.result, self.compared = result, compared

    @property
    def sentence(self) -> str:
        """The experiment, its peak, and its time where that is predicted."""
        head, peak, *others = str(self).splitlines()
        time = [line for line in others if line.startswith("time")]
        return "; ".join([head, *(" ".join(line.split()) for line in (peak, *time))])

    def __str__(self) -> str:
        return "\n".join([format_estimate(self.result), *_fill(self.compared)])

    def table(self) -> DataFrame:
        """Return what holds the memory at the peak: component, bytes and share."""
        memory = self.result.memory
        assert memory is not None
        assert memory.at_peak is not None
        held = memory.at_peak.components.items()
        rows = sorted(((name, size) for name, size in held if size), key=lambda row: -row[1])
        frame = tabulate(rows, ("component", "bytes"))
        return frame.assign(share=frame["bytes"] / frame["bytes"].sum())

    def plot(self) -> Figure:
        """Draw the memory of a step by what holds it."""
        return load_figure("timeline:draw_one", "plot")(self.result)

    def to_json(self) -> str:
        """Return the result, as its file has it."""
        return self.result.model_dump_json(indent=1)


def estimate(
    model: str | dict[str, Any] | Callable[[Experiment], Any],
    method: str,
    *,
    output: str | Path | None = None,
    measured_peak: int | str | None = None,
    measured_step: float | None = None,
    rows: str | Path = MEASURED_RUNS,
    **experiment: Any,
) -> Predicted:
    """Predict the memory, FLOPs and time of an experiment, without running it.

    Args:
        model: A name or a mapping as of ``dpprof estimate``; or ``package.module:function``, or a
            function, that builds the model (docs/how-to/answers-from-python.md).
        method: How the gradient is computed.
        output: The result's file; ``results/estimate/ID.r0.json`` where it is not given. Of a
            model that a function of this process builds there is none.
        measured_peak: Bytes, such as ``"21.5GiB"``, that a run had allocated at its peak.
        measured_step: Seconds of a step of a run.
        rows: The table that gets what was measured.
        **experiment: Every other option of ``dpprof estimate``, with underscores.

    Raises:
        InputError: A value is not allowed, or a required one is missing.
        PredictionError: Nothing could be predicted; the message says why.

    Example:
        >>> import dpprof
        >>> told = dpprof.estimate("tiny", "flash-bk", batch_size=4, seq_len=64, target="h100")
        >>> told.result.memory.at_peak.phase
        'backward'
    """
    with naming({"model": model, "method": method, **experiment}) as fields:
        measured = Measured.read(measured_peak, measured_step)
        asked = make_experiment(fields, for_question=True)
        if measured is not None:
            measured.check(asked, Path(rows))
        file = Path(output or result_path(Path(), INSTRUMENT, asked.id, 0))
        check_writable(file)
        result = predict(asked, INSTRUMENT, file, keep=True)
    tell_result(result)
    if result.outcome != "ok":
        raise PredictionError(result)
    if measured is None:
        return Predicted(result)
    return Predicted(result, [*compare(result, measured), write_rows(Path(rows), result, measured)])


def format_estimate(result: Result) -> str:
    """Return a prediction, whose outcome is ``ok``, as text."""
    experiment, memory, compute = result.experiment, result.memory, result.compute
    assert memory is not None
    lines = _format_peak(memory, experiment)
    if compute is not None:
        times = compute.dp_flop_multiplier
        over = "" if times is None else f", {times:.2f} times what the model needs"
        flops = compute.executed_flops
        told = f"{flops / 1e9:.2f} GFLOP" if flops < 1e11 else f"{flops / 1e12:.2f} TFLOP"  # noqa: PLR2004
        lines.append(f"FLOPs   {told} a step{over}")
        if result.io is not None and result.io.launches is not None:
            lines.append(f"        in {result.io.launches:,} operators that start a kernel")
        if compute.roofline_step_s is not None:
            bound = f"at least {compute.roofline_step_s * 1e3:,.1f} ms by the roofline"
            step = result.time and result.time.predicted_step_s
            if step:
                interval = f"{step.low * 1e3:,.1f} to {step.high * 1e3:,.1f}"
                bound = f"{step.median * 1e3:,.1f} ms a step (90 % interval {interval}); {bound}"
            lines.append(f"time    {bound}")
            if step and step.unlike:
                lines.append(f"        {step.unlike}, so the interval is wide")
    lines += _format_exchange(result) + _format_varied(result.varied, experiment)
    size = name_size(experiment.seq_len, experiment.image_size)
    loop = f"loop {experiment.loop}"
    settings = name_settings(experiment.dtype, experiment.optimizer, experiment.execution, loop)
    parts = f"{experiment.accumulation:,} x " if experiment.accumulation > 1 else ""
    where = f"{parts}{experiment.batch_size:,} x {size}, {settings}"
    if experiment.parallel is not None:
        where += f", {experiment.parallel.text}; all of this is rank 0's"
    if experiment.padding is not None and experiment.padding.packed:
        where += "; packed rows count as full rows of one document, without a mask of several"
    if experiment.optimizer.startswith("paged"):
        where += "; pages count as on the GPU, which PyTorch's own figures leave out"
    experts = result.model.unquantized_experts_bytes if result.model is not None else 0
    if experts:
        where += (
            f"; {experts / _GIB:.2f} GiB of fused experts are not quantised to "
            f"{experiment.base_format}: transformers 5 quantises linear layers alone"
        )
    return "\n".join([f"{experiment.method}, {where}", *_fill(lines)])


def _format_peak(memory: Memory, experiment: Experiment) -> list[str]:
    """Return the peak with what holds it, the allocator, and what is not known of workspaces."""
    assert memory.at_peak is not None
    assert memory.peak_allocated_bytes is not None
    peak = memory.at_peak
    is_small = memory.peak_allocated_bytes < _GIB / 10
    unit, letters = (2**20, "MiB") if is_small else (_GIB, "GiB")
    in_units = memory.peak_allocated_bytes / unit
    lines = [f"peak    {in_units:.2f} {letters} allocated, in {peak.phase}"]
    if memory.allocator is not None and experiment.image_size is None:
        low, high = (in_units * math.exp(sign * _PEAK_WITHIN) for sign in (-1, 1))
        lines[0] += f" (90 % interval of this loop {low:.2f} to {high:.2f})"
    if memory.allocator is not None and memory.allocator.fits is False:
        limit = (memory.allocator.limit_bytes or 0) / _GIB
        lines.insert(0, f"memory  out of memory of {limit:.2f} GiB: a request finds no room")
    owned = sorted(peak.components.items(), key=lambda part: part[1], reverse=True)
    lines += [
        f"        {size / unit:8.2f} {letters}  {name.replace('_', ' ')}"
        for name, size in owned[:_MOST]
        if size >= memory.peak_allocated_bytes / 1000
    ]
    if memory.allocator is not None:
        lines += _format_allocator(memory.allocator)
        shown = memory.allocator.reserved_bytes + find_context(experiment.target)
        lines.append(f"        {shown / _GIB:.2f} GiB by nvidia-smi, with the context of CUDA")
    told = (memory.assumed.get(key) for key in (experiment.dtype, "logits"))
    lines += [f"        {text}" for text in told if text]
    by_reason: dict[str, list[str]] = {}
    for op, why in find_unknown_workspaces(memory.assumed).items():
        by_reason.setdefault(why, []).append(op)
    return lines + [
        f"        workspace of {', '.join(ops)}: {why}" for why, ops in by_reason.items()
    ]


def _format_varied(varied: Varied | None, experiment: Experiment) -> list[str]:
    """Return the batches of a training in which they differ, and what a run of them reserves."""
    if varied is None:
        return []
    up_to = "at most " if experiment.poisson else ""
    lines = [
        f"{'varied' if place == 0 else '':8}{batch.share:7.2%} of batches: "
        f"{up_to}{batch.batch_size:,} x {batch.seq_len:,}, peak {batch.peak_bytes / _GIB:.2f} GiB"
        + ("" if batch.step_s is None else f", {batch.step_s * 1e3:,.1f} ms")
        for place, batch in enumerate(varied.batches)
    ]
    if varied.mean_step_s is not None and not experiment.poisson:
        lines.append(f"        {varied.mean_step_s * 1e3:,.1f} ms a step in the mean")
    figures = (
        *(varied.reserved_p99_bytes, varied.reserved_mean_bytes),
        *(varied.reserved_most_bytes, varied.expandable_reserved_bytes),
    )
    if None in figures:
        return lines
    p99, mean, most, expandable = (f"{(size or 0) / _GIB:.2f}" for size in figures)
    every = experiment.empty_cache_every
    emptied = "" if every is None else f", with the cache emptied every {every:,}"
    lines.append(
        f"        {p99} GiB reserved after 99 of 100 steps at most ({varied.steps:,} in random "
        f"order{emptied}), {mean} in the mean, {most} at most; {expandable} at most with "
        "expandable_segments:True"
    )
    if not varied.fits:
        lines.append("        out of memory: the allocator finds no room for a request of them")
    return lines


def _fill(lines: Iterable[str]) -> Iterator[str]:
    """Wrap lines to the width of a screen."""
    fill = partial(textwrap.wrap, width=WIDTH, subsequent_indent=" " * 8, break_on_hyphens=False)
    return itertools.chain.from_iterable(map(fill, lines))


def _format_exchange(result: Result) -> list[str]:
    """Return the bytes that one of several ranks sends, by collective."""
    sent: dict[str, int] = {}
    for exchange in result.communication or []:
        sent[exchange.collective] = sent.get(exchange.collective, 0) + exchange.bytes_each_way
    total = sum(sent.values()) / _GIB
    lines = [f"sends   {total:.2f} GiB a step, and receives as much"] if sent else []
    return lines + [f"        {size / _GIB:8.2f} GiB  {name}" for name, size in sent.items()]


def _format_allocator(allocator: Allocator) -> list[str]:
    reserved, expandable = allocator.reserved_bytes, allocator.expandable_reserved_bytes
    otherwise = f"{expandable / _GIB:.2f} with expandable_segments:True"
    lines = [f"        {reserved / _GIB:.2f} GiB reserved by the caching allocator; {otherwise}"]
    limit = allocator.limit_bytes
    if allocator.fits and limit is not None and reserved > limit:
        lines.append(
            f"        it fits {limit / _GIB:.2f} GiB, and releases its cache {allocator.retries} "
            "times a step"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; the exit status is 1 where nothing could be predicted."""
    parser = Parser(
        "estimate",
        __doc__,
        example="--model 1b --method flash-bk --batch-size 4 --seq-len 2048 --dtype bfloat16 "
        "--target h100",
    )
    parser.add_argument(
        "--output", **FILE, help="the result file to write (default: results/estimate/ID.r0.json)"
    )
    own = parser.add_argument_group("a run of your own, on the target")
    own.add_argument(
        "--measured-peak", metavar="SIZE", help="its peak of allocated memory, such as 21.5GiB"
    )
    own.add_argument("--measured-step", metavar="SECONDS", help="its seconds a step")
    own.add_argument(
        "--rows",
        **FILE,
        default=MEASURED_RUNS,
        help=f"the table that gets them, for perf/validate.py (default: {MEASURED_RUNS})",
    )
    usual = {name: DESCRIBED[name] for name in ("dtype", "optimizer")}
    add_experiment_options(parser, defaults=usual)
    arguments = parser.parse_args(argv)
    options = {"model": None, "method": None} | read_given(arguments)
    with ending_in_a_sentence("no result was written"):
        try:
            predicted = estimate(
                **options,
                output=arguments.output,
                measured_peak=arguments.measured_peak,
                measured_step=arguments.measured_step,
                rows=arguments.rows,
            )
        except PredictionError:  # it has been told
            sys.exit(1)
    print(printable(str(predicted)))
