"""Declares every table: what a row is, and each column with its type and description.

The headers of the CSV files, the columns that are read as text, the workflow's list of tables and
docs/numbers/tables.md follow from these declarations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pydantic import BaseModel

from dpprof.experiments.accounting.plan import NoiseOfBatch
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.records.advice import OF_SEVERAL_WAYS, Option
from dpprof.experiments.records.budget import MethodCost
from dpprof.experiments.records.result import Energy, Kernels, Launched, RankPart, Throughput
from dpprof.experiments.records.step_costs import (
    Compute,
    Exchange,
    Io,
    LiveAllocation,
    Memory,
    Snapshot,
)
from dpprof.experiments.records.terms import COMPONENTS, EVIDENCE, OUTCOMES
from dpprof.results.analysis.tables.axes import AXES, SETTING, WITHOUT_BATCH

_UNITS = {
    "flops_per_s": "FLOP/s",
    "bytes_per_s": "B/s",
    "per_s": "1/s",
    "joules_per_step": "J",
    "bytes": "B",
    "gpu_hours": "h",
    "seconds": "s",
    "s": "s",
    "flops": "FLOP",
}


@dataclass(frozen=True)
class Column:
    """A column; an empty cell is an unknown value."""

    kind: Literal["text", "integer", "number", "boolean"]
    name: str
    description: str

    @property
    def unit(self) -> str:
        """The unit, which the name ends in; empty for a count, a share and a text."""
        ends = (unit for end, unit in _UNITS.items() if f"_{self.name}".endswith(f"_{end}"))
        return next(ends, "") if self.kind in ("integer", "number") else ""


class Table:
    """A table: what a row is, and its columns in order."""

    def __init__(self, row: str, *columns: Column) -> None:
        self.row, self.columns = row, {column.name: column for column in columns}


text, integer, number, boolean = (
    partial(Column, kind) for kind in ("text", "integer", "number", "boolean")
)


def declare(model: type[BaseModel], names: str | None = None) -> list[Column]:
    """Declare columns for fields of a model, all or some, with the fields' descriptions."""
    schemas = model.model_json_schema()["properties"]
    columns = []
    for name in schemas if names is None else names.split():
        types = {schema.get("type") for schema in schemas[name].get("anyOf", [schemas[name]])}
        make = next((make for make in (integer, number, boolean) if make.args[0] in types), text)
        columns.append(make(name, schemas[name]["description"]))
    return columns


_PAGE = """\
# The columns of the tables

What each column of `results/tables/*.csv` is. `make schemas` writes this page from
`src/dpprof/results/analysis/tables/columns.py`.

An empty cell is an unknown value. Axes are
[keys of an experiment](../../config/README.md#keys-of-an-experiment), all but the two on waiting.

No spreadsheet runs a text of these tables. One that begins with `=`, `+`, `-`, `@`, a tab or a
carriage return, with or without apostrophes before it, has one more apostrophe in front. Numbers
have none: -0.5. CSV files that `report.html` saves are written so too.
"""


def write_page(tables: Mapping[str, Table]) -> str:
    """Return docs/numbers/tables.md, which lists the columns of every table."""
    axes = declare(Experiment, " ".join(AXES))
    lines = [_PAGE]
    for name, table in tables.items():
        lines += [f"## `{name}.csv`\n", f"A row is {table.row}.\n"]
        lines += ["| column | type | unit | what it is |", "| --- | --- | --- | --- |"]
        shared = [column for column in table.columns.values() if column in axes]
        for column in table.columns.values():
            if column not in axes:
                cells = f"`{column.name}` | {column.kind} | {column.unit}"
                lines.append(f"| {cells} | {column.description} |".replace("|  |", "| |"))
            elif column is shared[0]:
                rest = ", ".join(column.name for column in axes if column not in shared)
                what = f"axes without {rest}" if rest else "axes"
                lines.append(f"| `{column.name}` ... `{shared[-1].name}` | | | {what} |")
        lines.append("")
    return "\n".join(lines)


_RUN = (
    text("experiment_id", "the experiment"),
    text("instrument", "the instrument"),
    integer("replicate", "the number of the process, from 0"),
)
_EXPERIMENT_AXES = declare(Experiment, " ".join(AXES))
_RUN_AND_AXES = (*_RUN, *_EXPERIMENT_AXES)
_PARAMETERS = integer("parameters_total", "parameters of the model")
_STANDING = (
    text("mechanism", "what makes the method private; empty without a verdict"),
    boolean("verified", "whether its gradient is the reference's; empty: not known"),
    number("max_relative_error", "the largest relative error of its gradient"),
)
_OWNER = (text("component", "what the memory is for"), integer("bytes", "what it holds"))

TABLES: Mapping[str, Table] = {
    "runs": Table(
        "an experiment, instrument and replicate",
        *_RUN,
        text("sweeps", "the sweeps that contain the run, separated by spaces"),
        *_EXPERIMENT_AXES,
        text("outcome", "how the run ended"),
        integer("attempts", "attempts; a crash or a kill is tried once more"),
        number("others_busy_cores", "cores that other processes kept busy meanwhile"),
        text("error_kind", "the kind of error"),
        text("error_phase", "the phase in which it occurred"),
        text("error_message", "its message"),
        integer("error_requested_bytes", "what was requested when memory ran out"),
        text("error_log", "the log of the run"),
        _PARAMETERS,
        number("median_step_s", "median of the timed steps"),
        *declare(Throughput),
        *declare(Memory, "peak_allocated_bytes first_step_peak_allocated_bytes"),
        *declare(Memory, "peak_reserved_bytes peak_rss_bytes peak_device_used_bytes alloc_retries"),
        number("fragmentation", "share of the reserved peak left unused by the allocated"),
        integer("host_read_bytes", "bytes that the process read in the timed steps"),
        integer("host_written_bytes", "bytes that it wrote in them"),
        *declare(Energy, "joules_per_step"),
        text("started_at", "start of the run: UTC, ISO 8601"),
        number("wall_s", "duration of the run, with start-up"),
        text("device_name", "the device that it ran on"),
        text("hostname", "the machine"),
        text("python", "version of Python"),
        text("torch", "version of torch"),
        text("opacus", "version of Opacus"),
        text("git_commit", "commit of the checkout"),
        boolean("git_dirty", "whether the checkout had uncommitted changes"),
        text("code_digest", "digest of the code that measured"),
        boolean("code_is_current", "whether that is the code that was planned last"),
    ),
    "experiments": Table(
        "an experiment, over its processes",
        _RUN[0],
        *_EXPERIMENT_AXES,
        _PARAMETERS,
        integer("runs", "planned runs"),
        integer("runs_ok", "runs with outcome ok"),
        text("outcome", "the outcomes of the runs, separated by spaces"),
        integer("processes", "clean processes with a step time"),
        number("median_step_s", "median over processes of their median steps"),
        number("step_low_s", "its 95 % bootstrap interval, lower end"),
        number("step_high_s", "upper end"),
        number("tokens_per_s", "tokens of a batch over that step time"),
        text("peak_kind", "allocated: the allocator's peak; rss: resident memory"),
        integer("peak_processes", "processes with such a peak"),
        number("peak_bytes", "median peak over processes"),
        number("peak_min_bytes", "smallest peak"),
        number("peak_max_bytes", "largest peak"),
        integer("reserved_min_bytes", "smallest peak of reserved memory"),
        integer("reserved_max_bytes", "largest peak of reserved memory"),
        integer("rss_min_bytes", "smallest peak of resident memory"),
        integer("rss_max_bytes", "largest peak of resident memory"),
        number("step_ratio", "step time over that of standard with all else equal"),
        number("step_ratio_low", "its 95 % bootstrap interval, lower end"),
        number("step_ratio_high", "upper end"),
        number("step_p_value", "Mann-Whitney test against standard, two-sided"),
        number("step_floor", "noise floor: what ratios of equal experiments stay within"),
        text("step_verdict", "larger, smaller or no difference detected"),
        number("peak_ratio", "peak over standard's peak of the same kind"),
        integer("sent_bytes", "what one of several ranks sends in a step, and receives as well"),
        integer("sent_beyond_bytes", "how much of it standard with all else equal does not send"),
        *_STANDING,
    ),
    "settings": Table(
        "a setting in which methods compete",
        *(column for column in _EXPERIMENT_AXES if column.name in SETTING),
        _PARAMETERS,
        integer("methods", "private methods with a step time or a peak"),
        text("smallest", "the private method with the lowest peak"),
        text("peak_kind", "the kind of that peak, as in experiments.csv"),
        number("smallest_peak_bytes", "that peak"),
        number("smallest_ratio", "its ratio to standard's"),
        text("fastest", "the private method with the shortest step"),
        number("fastest_step_s", "that step time"),
        number("fastest_ratio", "its ratio to standard's"),
        number("fastest_ratio_low", "the ratio's 95 % bootstrap interval, lower end"),
        number("fastest_ratio_high", "upper end"),
        text("fastest_verdict", "larger, smaller or no difference detected"),
        text("not_slower", "methods that do not detectably differ from the fastest"),
        boolean("noise_known", "whether replicates show how much processes differ"),
    ),
    "methods": Table(
        "a method, over all settings",
        text("method", "the method"),
        integer("experiments", "its experiments"),
        integer("step_ratio_count", "known ratios of step times to standard's"),
        number("step_ratio_median", "their median"),
        number("step_ratio_min", "the smallest"),
        number("step_ratio_max", "the largest"),
        integer("peak_ratio_count", "known ratios of peaks to standard's"),
        number("peak_ratio_median", "their median"),
        number("peak_ratio_min", "the smallest"),
        number("peak_ratio_max", "the largest"),
        *_STANDING,
    ),
    "outcomes": Table(
        "a method",
        text("method", "the method"),
        integer("runs", "runs with a result"),
        *(integer(name, f"runs that ended {name}") for name in OUTCOMES),
        integer("missing", "runs without a result"),
        number("success_rate", "ok runs over runs with a result"),
    ),
    "steps": Table(
        "a step, warm-up included",
        *_RUN,
        text("stage", "warmup or timed"),
        integer("index", "its place in the stage, from 0"),
        number("step_s", "its time"),
    ),
    "phases": Table(
        "a phase of a run",
        *_RUN,
        text("phase", "the phase"),
        number("median_s", "median over the timed steps"),
        number("min_s", "the shortest"),
        number("max_s", "the longest"),
    ),
    "snapshots": Table(
        "a named snapshot",
        *_RUN,
        *declare(Snapshot, "name elapsed_s allocated_bytes reserved_bytes rss_bytes"),
    ),
    "components": Table(
        "a component of a snapshot", *_RUN, text("snapshot", "the snapshot"), *_OWNER
    ),
    "advice": Table(
        "a method of each setting with capacity results",
        *(column for column in _EXPERIMENT_AXES if column.name in WITHOUT_BATCH),
        integer("budget_bytes", "memory that training may allocate"),
        *(column for column in declare(Option) if column.name not in OF_SEVERAL_WAYS),
    ),
    "budget": Table(
        "a method and epsilon of each setting with capacity results",
        *(column for column in _EXPERIMENT_AXES if column.name in WITHOUT_BATCH),
        _PARAMETERS,
        *declare(MethodCost),
    ),
    "noise": Table(
        "a batch size for the privacy budget",
        *declare(Privacy, "samples tokens"),
        number("epsilon", "the epsilon that is spent"),
        *declare(Privacy, "delta accountant"),
        number("tokens_per_sample", "tokens in a sample, without padding"),
        *(column for column in declare(NoiseOfBatch) if column.name != "reason"),
        boolean("chosen", "whether hours are predicted for it"),
        text("reason", "why there is no noise multiplier"),
    ),
    "peaks": Table(
        "a run that recorded or estimated memory",
        *_RUN_AND_AXES,
        _PARAMETERS,
        integer("target_memory_bytes", "memory of the target"),
        integer("peak_bytes", "recorded peak of a step in the steady state"),
        integer("first_step_peak_bytes", "recorded peak of the first step"),
        text("phase", "the phase of the peak"),
        text("module", "the module that ran then"),
        text("op", "the last operator that allocated before the peak"),
        *(
            integer(f"by_{kind}_bytes", f"bytes at the peak whose owner is known by {kind}")
            for kind in EVIDENCE
        ),
        integer("unattributed_bytes", "bytes at the peak without a known owner"),
        integer("requested_bytes", "on CUDA, by simulation: peak of sizes as requested"),
        integer("rounding_bytes", "on CUDA: what whole blocks take beyond the recorded peak"),
        integer("reserved_bytes", "on CUDA: peak of what the caching allocator reserves"),
        integer("expandable_reserved_bytes", "the same with expandable_segments:True"),
        boolean("fits", "whether every request finds room in the target's memory"),
        integer("allocator_peak_bytes", "the allocator's peak in another process"),
        integer("gap_bytes", "that less the recorded peak and the rounding"),
        integer("bound_bytes", "what the gap may not exceed"),
        boolean("valid", "whether it does not"),
        text("reason", "why it does, or why there is nothing to compare with"),
    ),
    "costs": Table(
        "a run that recorded or estimated memory",
        *_RUN_AND_AXES,
        *declare(Compute, "model_flops executed_flops other_flops dp_flop_multiplier"),
        *declare(Io, "bytes_read bytes_written launches arithmetic_intensity"),
        number("peak_flops_per_s", "dense peak of the dtype in use"),
        text("peak_source", "where that peak is from"),
        number("roofline_step_s", "least time of a step by the roofline"),
        number("median_step_s", "median step time of the clean processes"),
        number("predicted_step_s", "predicted step time"),
        number("predicted_step_low_s", "lower end of its 90 % interval"),
        number("predicted_step_high_s", "upper end"),
        number("mfu", "model FLOPs over step time and peak"),
        number("hfu", "executed FLOPs over step time and peak"),
        boolean("beyond_peak", "whether one of them is above 1"),
        text("utilisation_reason", "why MFU is unknown"),
    ),
    "owners": Table("an owner of memory at the peak", *_RUN, *_OWNER),
    "holdings": Table("one of the largest holdings at the peak", *_RUN, *declare(LiveAllocation)),
    "ranks": Table(
        "a rank of a run of several ranks",
        *_RUN,
        *declare(RankPart, "rank"),
        *declare(Memory, "peak_allocated_bytes peak_reserved_bytes peak_rss_bytes"),
        number("median_step_s", "median of its timed steps"),
        integer("sent_bytes", "what it sends in a step, and receives as well"),
    ),
    "communication": Table(
        "a collective in a phase of a run of several ranks; of rank 0",
        *_RUN_AND_AXES,
        *declare(Exchange),
    ),
    "timeline": Table(
        "an instant of a step",
        *_RUN,
        integer("ops", "operators run so far"),
        text("op", "the operator that ran last"),
        number("elapsed_s", "time since the step began"),
        text("phase", "the phase"),
        *(integer(name, f"bytes of {name}") for name in COMPONENTS),
    ),
    "traffic": Table(
        "a phase, op kind or component of a run",
        *_RUN,
        text("by", "phase, op_kind or component"),
        text("key", "which of them"),
        integer("flops", "FLOPs of matrix products and attention"),
        integer("read_bytes", "bytes read"),
        integer("written_bytes", "bytes written"),
    ),
    "kernels": Table(
        "an op kind in a phase of a traced run",
        *_RUN_AND_AXES,
        _PARAMETERS,
        *declare(Launched),
        integer("flops", "FLOPs recorded for the same phase and op kind"),
        integer("read_bytes", "bytes read, likewise"),
        integer("written_bytes", "bytes written, likewise"),
        number("arithmetic_intensity", "FLOPs per byte"),
        number("flops_per_s", "FLOPs over seconds"),
        number("bytes_per_s", "bytes read and written over seconds"),
        number("ceiling_flops_per_s", "ceiling of matrix products of this dtype"),
        number("ceiling_bytes_per_s", "ceiling of copies"),
        text("ceilings_of", "the device of these ceilings"),
        text("bound", "compute or memory, whichever takes longer at the ceilings"),
    ),
    "traces": Table(
        "a traced run",
        *_RUN_AND_AXES,
        _PARAMETERS,
        *declare(Kernels, "steps step_s total_s"),
        number("compute_bound_s", "seconds of kernels that computing binds"),
        number("memory_bound_s", "seconds of kernels that memory binds"),
        number("unknown_s", "seconds of kernels for which that is unknown"),
        *declare(Kernels, "idle_s waiting_s other_share"),
        number("host_to_device_bytes", "bytes copied to the device in a step"),
        number("device_to_host_bytes", "bytes copied to the host in a step"),
        number("launch_latency_s", "ceiling of launches: time of one tiny operator"),
        *declare(Kernels, "trace trace_bytes trace_steps"),
    ),
    "instrument_overhead": Table(
        "an experiment and instrument",
        _RUN[0],
        _RUN[1],
        *_EXPERIMENT_AXES,
        integer("processes", "processes under the instrument"),
        integer("clean_processes", "processes under clean"),
        number("step_s", "median step time under the instrument"),
        number("peak_rss_bytes", "median resident peak under it"),
        number("peak_allocated_bytes", "median allocator's peak under it"),
        number("clean_step_s", "median step time under clean"),
        number("clean_peak_rss_bytes", "median resident peak under clean"),
        number("clean_peak_allocated_bytes", "median allocator's peak under clean"),
        number("step_ratio", "ratio of the step times"),
        number("rss_ratio", "ratio of the resident peaks"),
        number("allocated_ratio", "ratio of the allocator's peaks"),
    ),
    "samplers": Table(
        "a type of layer in a run",
        *_RUN,
        text("method", "the method"),
        text("layer", "the type of layer"),
        text("path", "the code path that it took"),
    ),
    "verification": Table(
        "a method, model and variant of attention",
        text("model", "the model that the verdict is about"),
        text("attention", "the variant of attention"),
        text("method", "the method"),
        boolean("verified", "whether its gradient is the reference's; empty: not known"),
        text("reason", "why it is not verified"),
        number("max_relative_error", "the largest relative error of the gradient"),
        number("max_relative_error_of_norms", "the same of per-sample norms"),
        text("reference", "what it was compared with"),
        integer("groups", "groups of parameters, each clipped by its own norm"),
        number("sensitivity", "how far one sample can move the sum, over C"),
        text("mechanism", "what makes the method private"),
        text("holes", "where the guarantee was lost"),
    ),
    "ceilings": Table(
        "a device and figure",
        text("device", "the device"),
        text("dtype", "the dtype of matrix products"),
        text("figure", "flops_per_s, bytes_per_s or launch_s, which is also the unit"),
        number("measured", "the measured figure"),
        integer("size", "n of n x n matrices, or bytes of the copied array"),
        number("datasheet", "the data sheet's figure"),
        text("source", "the data sheet"),
        text("reason", "why nothing was measured"),
        number("others_busy_cores", "cores that other processes kept busy meanwhile"),
    ),
    "findings": Table(
        "a caveat",
        text("kind", "the kind of caveat"),
        text("experiment_id", "the experiment; for ceilings and shared hosts the device"),
        text("instrument", "the instrument"),
        text("finding", "the caveat in a sentence"),
    ),
    "missing": Table(
        "a run without a result that can be trusted",
        *_RUN,
        text("method", "the method"),
        text("reason", "why there is none"),
    ),
}
"""Tables by file stem. ``make_frame`` refuses columns that are not here."""
