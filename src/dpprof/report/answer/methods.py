"""The first page: the question, the answer, one table with a row a method, and one figure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from dpprof.analysis.selection import Tables, find_here, find_on_targets, find_predicted
from dpprof.analysis.tables.axes import BASELINE, name_size, name_speed
from dpprof.report.rendering.document import Blocks, Drawing, Picture, Section
from dpprof.report.sections.tables import tabulate, text, whole
from dpprof.report.wording import (
    THIS_MACHINE,
    name_setting,
    name_training,
    number,
    ratio_with_interval,
    rounded,
    rows_in,
    significant,
    text_of,
)

TITLE = "The methods side by side"

_MOST_TARGETS = 3
"""More do not fit the width of a page."""

_GIB = 2**30

_PICTURES = ("tradeoff", "predicted", "breakdown", "outcomes")
"""The figures that may stand on the first page, the most telling first."""


class _Place(NamedTuple):
    """What the table says of one place: columns by heading, one cell per method."""

    caption: str
    columns: Mapping[str, "pd.Series[str]"]
    order: "pd.Series[float]"
    """What methods are sorted by, the smallest first."""


def build_first_section(tables: Tables, drawings: Sequence[Drawing]) -> Section:
    """Return the table of methods and the figure of the first page; either may be missing."""
    blocks: Blocks = []
    places = [*_targets(tables), *_here(tables)]
    if places:
        blocks += _tabulate(places, tables["methods"])
    picture = choose_picture(tables, drawings)
    if picture is not None:
        blocks.append(picture)
    return Section(title=TITLE, blocks=tuple(blocks))


def choose_picture(tables: Tables, drawings: Sequence[Drawing]) -> Picture | None:
    """Return the figure that says most: time against peak of two methods, else the next there is.

    Figures in which there is nothing to compare are left to the sections.
    """
    drawn = {one.name: one for one in drawings if one.missing is None}
    here = find_here(tables["experiments"])
    timed = here.dropna(subset=["median_step_s", "peak_bytes"])
    dull = set() if len(timed) > 1 else {"tradeoff"}
    dull |= set() if (tables["runs"]["outcome"] != "ok").any() else {"outcomes"}
    name = next((name for name in _PICTURES if name in drawn.keys() - dull), None)
    return None if name is None else Picture(name=name, caption=drawn[name].caption)


def _targets(tables: Tables) -> list[_Place]:
    capacities, predicted = find_on_targets(tables), find_predicted(tables)
    places = [_capacity(target, rows) for target, rows in capacities.items()]
    places += [
        _predicted(target, rows) for target, rows in predicted.items() if target not in capacities
    ]
    return places[:_MOST_TARGETS]


def _capacity(target: str, options: pd.DataFrame) -> _Place:
    rows = options.drop_duplicates("method").set_index("method")
    row = options.iloc[0]
    columns = {f"batch on {target}": rows.apply(_batch, axis=1)}
    if rows["tokens_per_s"].notna().any():
        columns[f"{name_speed([row])} on {target}"] = rows["tokens_per_s"].map(rounded)
    caption = (
        f"Predicted for {target}, {name_training(row)} at {name_size(row)} in "
        f"{row['dtype']}: the largest batch that safely fits, and {name_speed([row])} with it."
    )
    return _Place(caption, columns, -rows["tokens_per_s"].astype(float))


def _batch(row: Any) -> str:
    if pd.isna(row["safe_batch_size"]):
        return str(row["verdict"])
    more = "+" if row["limited_by"] == "search" else ""
    return f"{number(row['safe_batch_size'], digits=0)}{more}"


def _predicted(target: str, peaks: pd.DataFrame) -> _Place:
    rows = peaks.set_index("method")
    columns = {f"GiB on {target}": rows["peak_bytes"].map(lambda size: significant(size, _GIB))}
    if rows["peak_ratio"].notna().any():
        ratios = rows["peak_ratio"].map(lambda ratio: number(ratio, digits=2))
        columns[f"x standard on {target}"] = ratios
    caption = f"Predicted for {target}, {name_setting(peaks.iloc[0])}: the peak of a step."
    return _Place(caption, columns, rows["peak_bytes"].astype(float))


def _here(tables: Tables) -> list[_Place]:
    measured = find_here(tables["experiments"])
    if measured.empty:
        return []
    rows = measured.set_index("method")
    over = rows["step_ratio"].notna().any() or rows["peak_ratio"].notna().any()
    if over:
        columns = {
            "time over standard": rows.apply(ratio_with_interval, axis=1),
            "peak over standard": rows["peak_ratio"].map(lambda ratio: number(ratio, digits=2)),
        }
    else:
        columns = {
            "step (ms)": rows["median_step_s"].map(lambda step: number(step, 1e-3)),
            "peak (MiB)": rows["peak_bytes"].map(lambda size: number(size, 2**20)),
        }
    runs = tables["runs"]
    failures = rows_in(measured.iloc[0], runs[runs["outcome"] != "ok"]).drop_duplicates("method")
    failed = failures.set_index("method")["outcome"].astype(str)
    columns = {
        heading: pd.concat([cells, failed[~failed.index.isin(cells.index)]])
        for heading, cells in columns.items()
    }
    intervals = rows["step_ratio_low"].notna().any()
    caption = (
        f"Measured on {THIS_MACHINE}, {name_setting(measured.iloc[0])}: the median step time and "
        f"the {_PEAKS.get(text_of(rows['peak_kind'].iloc[0]), '')}peak"
        + (", over those of standard" if over else "")
        + (" (95 % intervals over processes)" if intervals else "")
        + "."
    )
    return [_Place(caption, columns, rows["median_step_s"].astype(float))]


_PEAKS = {"allocated": "allocator's ", "rss": "resident "}


def _tabulate(places: Sequence[_Place], known: pd.DataFrame) -> Blocks:
    cells = {name: column for one in places for name, column in one.columns.items()}
    methods = dict.fromkeys(name for column in cells.values() for name in column.index)
    # Sorted by what is known of the most methods; of as many, by the first place.
    main = max(places, key=lambda one: one.order.notna().sum()).order
    rank = main.reindex(list(methods))
    ordered = sorted(
        methods, key=lambda name: (name != BASELINE, rank[name] != rank[name], rank[name])
    )
    rows = pd.DataFrame({name: column.reindex(ordered) for name, column in cells.items()})
    verdicts = known.set_index("method")["verified"].map({True: "yes", False: "failed"})
    rows = rows.assign(method=ordered, verified=verdicts.reindex(ordered).fillna("not known"))
    columns = {"method": text("method"), **{name: whole(name) for name in cells}}
    columns["verified"] = text("verified")
    caption = " ".join(one.caption for one in places)
    return tabulate(caption, columns, rows, "methods.csv")
