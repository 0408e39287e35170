"""The first page: the question, the answer, one table with a row a method, and one figure."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dpprof.results.analysis.selection import (
    Tables,
    find_fitting,
    find_here,
    find_predicted,
    find_trainings,
)
from dpprof.results.analysis.tables.axes import name_size, name_speed
from dpprof.results.analysis.tables.frames import varying_axes
from dpprof.results.report.rendering.document import Blocks, Drawing, Picture, Section
from dpprof.results.report.sections.tables import (
    Column,
    amount,
    interval,
    tabulate,
    text,
    three_digits,
    words,
)
from dpprof.results.report.wording import (
    THIS_MACHINE,
    count_batch,
    name_gpus,
    name_setting,
    name_tokens,
    name_trained,
    ratio_with_interval,
    rounded,
    rows_in,
    spell_large,
    text_of,
)

TITLE = "The methods side by side"

_MOST_ROWS = 24
"""More leave no room for the figure; the appendix has all."""

_SAID = {
    *("model", "lora", "quantization", "trainable", "seq_len", "image_size", "dtype"),
    *("target", "device", "parallel", "method"),
}
"""The axes that the columns of every training say."""

_GIB = 2**30
_SPEED = Column(lambda row: rounded(row["tokens_per_s"]))

_PICTURES = ("budget", "tradeoff", "predicted", "breakdown", "outcomes")
"""The figures that may stand on the first page, the most telling first."""

_PEAKS = {"allocated": "allocator's ", "rss": "resident "}


def build_first_section(tables: Tables, drawings: Sequence[Drawing]) -> Section:
    """Return the table of methods and the figure of the first page; either may be missing."""
    blocks = _tell_trainings(tables) or _tell_here(tables) or _tell_predicted(tables)
    picture = choose_picture(tables, drawings)
    return Section(title=TITLE, blocks=(*blocks, *([picture] if picture else [])))


def choose_picture(tables: Tables, drawings: Sequence[Drawing]) -> Picture | None:
    """Return the figure that says most: the price of privacy, else the next there is.

    Figures in which there is nothing to compare are left to the sections.
    """
    drawn = {drawing.name: drawing for drawing in drawings if drawing.missing is None}
    dull = set() if (tables["runs"]["outcome"] != "ok").any() else {"outcomes"}
    name = next((name for name in _PICTURES if name in drawn.keys() - dull), None)
    return None if name is None else drawn[name].picture


def _tell_trainings(tables: Tables) -> Blocks:
    """Return what each method reaches in each training on each target."""
    trainings = find_trainings(tables)
    if not trainings:
        return []
    rows = pd.concat(trainings, ignore_index=True)
    rows = rows[rows["private"].astype(bool)] if rows["private"].any() else rows
    noise = tables["noise"]
    adapters = {"lora"} if len(set(rows["lora"].dropna())) > 1 else set()
    others = varying_axes(rows, but=_SAID - adapters)
    is_timed = rows["gpu_hours"].notna().any()
    # Speeds are of steps of one microbatch, a plan's hours of steps of many.
    speed = {} if is_timed else {name_speed(row for _, row in rows.iterrows()): _SPEED}
    columns = {
        "model": words(name_trained),
        "size": words(name_size),
        "dtype": words(lambda row: row["dtype"]),
        **{name.replace("_", " "): text(name) for name in others},
        "GPUs": words(name_gpus),
        "method": words(lambda row: row["method"]),
        "microbatch": Column(_tell_batch),
        **speed,
        "GPU hours": three_digits("gpu_hours"),
        "90 % interval": interval("gpu_hours"),
        "price": three_digits("price"),
        "hours / non-private": amount("hours_ratio", digits=2),
        "verified": words(_tell_verified),
    }
    caption = "Predicted. A microbatch is the largest that safely fits one GPU."
    if is_timed:
        caption += f" {_tell_plan(noise, rows)}"
    figures = rows[["tokens_per_s", "gpu_hours", "price", "hours_ratio"]].isna()
    if (figures.any() & ~figures.all()).any():
        caption += " A dash is unknown: the appendix says why."
    if len(rows) > _MOST_ROWS:
        caption += f" These are {_MOST_ROWS} of {len(rows):,} rows; advice.csv has all."
    return _tabulate(caption, columns, rows.head(_MOST_ROWS), "advice.csv and budget.csv")


def _tell_plan(noise: pd.DataFrame, rows: pd.DataFrame) -> str:
    """Return what hours and price are those of; steps and batch where one plan has all."""
    used = noise[noise["chosen"].astype(bool)] if noise["chosen"].any() else noise
    priced = " and price" if rows["price"].notna().any() else ""
    first = used.iloc[0]
    said = f"Hours{priced} are those of {name_tokens(first)} (delta {first['delta']:g}, "
    said += f"{spell_large(first['samples'])} samples)"
    plans = used[used["epsilon"] == used["epsilon"].iloc[0]]
    if len(plans[["steps", "batch_size"]].drop_duplicates()) == 1:
        said += (
            f", in {first['steps']:,.0f} steps of {first['batch_size']:,.0f} samples with noise "
            f"multiplier {first['noise_multiplier']:.3g}"
        )
    return f"{said}."


def _tell_batch(row: Any) -> str:
    return str(row["verdict"]) if pd.isna(row["safe_batch_size"]) else count_batch(row)


def _tell_verified(row: Any) -> str:
    return {True: "yes", False: "failed"}.get(row["verified"], "not known")


_SAID_OF_ALL = {
    ("verified", "yes"): "gradients verified",
    ("verified", "failed"): "failed verification",
    ("verified", "not known"): "gradients not verified",
}
"""How a caption says what a column has in all rows."""


def _tell_here(tables: Tables) -> Blocks:
    """Return times and peaks that were measured here, over those of standard where it ran."""
    rows = find_here(tables["experiments"])
    if rows.empty:
        return []
    setting = rows.iloc[0]
    over = rows["step_ratio"].notna().any() or rows["peak_ratio"].notna().any()
    runs = tables["runs"]
    failures = rows_in(setting, runs[runs["outcome"] != "ok"]).drop_duplicates("method")
    failed = failures[~failures["method"].isin(rows["method"])].set_index("method")["outcome"]
    verified = tables["methods"].set_index("method")["verified"]
    shown = pd.concat([rows, failed.reset_index()])
    shown = shown.assign(verified=shown["method"].map(verified))
    figures = {
        "time over standard": ratio_with_interval,
        "peak over standard": amount("peak_ratio", digits=2).write,
    }
    if not over:
        figures = {
            "step (ms)": amount("median_step_s", 1e-3).write,
            "peak (MiB)": amount("peak_bytes", 2**20).write,
        }

    def or_outcome(write: Any) -> Column:
        return Column(lambda row: failed[row["method"]] if row["method"] in failed else write(row))

    columns = {"method": words(lambda row: row["method"])}
    columns |= {heading: or_outcome(write) for heading, write in figures.items()}
    columns["verified"] = words(_tell_verified)
    caption = (
        f"Measured on {THIS_MACHINE}, {name_setting(setting)}: the median step time and the "
        f"{_PEAKS.get(text_of(setting['peak_kind']), '')}peak"
        + (", over those of standard" if over else "")
        + (" (95 % intervals over processes)" if rows["step_ratio_low"].notna().any() else "")
        + "."
    )
    return tabulate(caption, columns, shown.sort_values("median_step_s"), "methods.csv")


def _tell_predicted(tables: Tables) -> Blocks:
    """Return peaks that were predicted for targets."""
    predicted = find_predicted(tables)
    if not predicted:
        return []
    rows = pd.concat(predicted.values(), ignore_index=True)
    columns = {
        "model": words(name_setting),
        "GPUs": words(name_gpus),
        "method": words(lambda row: row["method"]),
        "peak (GiB)": three_digits("peak_bytes", _GIB),
        "x standard": amount("peak_ratio", digits=2),
        "memory": words(lambda row: "fits" if row["_fits"] else "does not fit"),
    }
    caption = "Predicted peaks of a step."
    return _tabulate(caption, columns, rows.assign(_fits=find_fitting(rows)), "peaks.csv")


def _tabulate(caption: str, columns: dict[str, Column], rows: pd.DataFrame, source: str) -> Blocks:
    """Return a table in which a text that is the same in all rows stands in the caption alone."""
    kept, said = {}, []
    for heading, column in columns.items():
        cells = {column.write(row) for _, row in rows.iterrows()}
        if cells == {"-"}:
            continue
        if len(cells) == 1 and not column.numeric and heading != "method":
            cell = f"computed in {cells.pop()}" if heading == "dtype" else cells.pop()
            said.append(_SAID_OF_ALL.get((heading, cell), cell))
        else:
            kept[heading] = column
    where = f" All rows: {', '.join(said)}." if said else ""
    return tabulate(f"{caption}{where}", kept, rows, source)
