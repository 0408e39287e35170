"""What privacy costs in accuracy: a table, a figure and a report of the trainings that learn.

Reads the files that ``learning.py`` left, and writes ``learning.csv``, ``figures/learning.png`` and
``report.md``, ``.json``, ``.tex`` and ``.pdf``.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import t as student

from dpprof.ask.commands.common import save_figure
from dpprof.results.figures.style import method_style, new_figure, tell
from dpprof.results.report.rendering.document import Blocks, Document, Picture, Section
from dpprof.results.report.rendering.write import write_report
from dpprof.results.report.sections import column
from dpprof.results.report.sections.tables import paragraph, tabulate
from dpprof.system.files import write_atomically
from learning_plan import CellResult

CELL = ["task", "library", "epsilon", "change"]
LIBRARIES = {"dpprof": "flash-bk", "opacus": "opacus-hooks"}
"""The methods with whose colours libraries are drawn."""

CONFIDENCE = 0.95


def build_frame(results: Sequence[CellResult]) -> pd.DataFrame:
    """Return a row for each training."""
    facts = ["metric", "samples", "sample_rate", "noise_multiplier", "parameters"]
    rows = [
        {
            **result.cell.model_dump(include=set(CELL)),
            **result.cell.settings.model_dump(),
            **result.model_dump(include=set(facts)),
            **run.model_dump(),
        }
        for result in results
        for run in result.runs
    ]
    order = [*CELL, "seed", "before", "held_out", "cpu_s"]
    frame = pd.DataFrame(rows)
    return frame[[*order, *frame.columns.difference(order)]].sort_values(
        ["task", "change", "epsilon", "library", "seed"], na_position="first", ignore_index=True
    )


def find_interval(values: pd.Series, comparisons: int = 1) -> tuple[float, float, float]:
    """Return a mean over seeds, and the ends of its t interval.

    With several comparisons all intervals hold together with the same confidence (Bonferroni).
    """
    share = (1 - CONFIDENCE) / comparisons
    reach = student.ppf(1 - share / 2, len(values) - 1) * values.std() / np.sqrt(len(values))
    return values.mean(), values.mean() - reach, values.mean() + reach


def compare_libraries(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each task and epsilon: both libraries, and their difference by seeds."""
    own = frame[frame["change"].isna()]
    table = own.pivot_table(
        index=["task", "epsilon", "seed"],
        columns="library",
        values=["held_out", "cpu_s"],
        dropna=False,
    ).dropna(subset=[("held_out", name) for name in LIBRARIES])
    groups = [group for _, group in table.groupby(level=[0, 1], dropna=False)]
    rows = []
    for group in groups:
        by_seed = group["held_out"]["dpprof"] - group["held_out"]["opacus"]
        task, epsilon = group.index[0][:2]
        row: dict[str, object] = {"task": task, "epsilon": epsilon}
        for name in LIBRARIES:
            row |= _ends(name, find_interval(group["held_out"][name]))
        row |= _ends("difference", find_interval(by_seed))
        row["all_low"], row["all_high"] = find_interval(by_seed, len(groups))[1:]
        row |= {f"{name}_s": seconds.mean() for name, seconds in group["cpu_s"].items()}
        rows.append(row)
    return pd.DataFrame(rows).sort_values(["task", "epsilon"], ascending=[True, False])


def compare_changes(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each change: its metric, and the difference from the task's settings."""
    rows = []
    for (task, change), group in frame[frame["change"].notna()].groupby(["task", "change"]):
        same = (frame["task"] == task) & (frame["library"] == "dpprof") & frame["change"].isna()
        base = frame[same & (frame["epsilon"] == group["epsilon"].iloc[0])].set_index("seed")
        by_seed = group.set_index("seed")
        difference = (by_seed["held_out"] - base["held_out"]).dropna()
        rows.append(
            {
                "task": task,
                "change": str(change).rpartition("-")[::2],
                **_ends("held_out", find_interval(by_seed["held_out"])),
                **_ends("difference", find_interval(difference)),
                "noise_multiplier": group["noise_multiplier"].iloc[0],
                "cpu_s": group["cpu_s"].mean(),
            }
        )
    table = pd.DataFrame(rows)
    table["change"] = [f"{key.replace('_', ' ')} {value}" for key, value in table["change"]]
    return table


def _ends(name: str, interval: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))


def draw(table: pd.DataFrame, metrics: Mapping[str, str]) -> Figure:
    """Held-out metric over epsilon, with dpprof and with Opacus; bars are 95 % intervals.

    Both get the same noise, sampling and steps. The last place is training without privacy.
    """
    figure, axes = new_figure(len(metrics), row_inches=2.3)
    for axis, (task, metric) in zip(axes[0], metrics.items(), strict=True):
        rows = table[table["task"] == task].sort_values("epsilon", na_position="last")
        names = ["none" if np.isnan(epsilon) else f"{epsilon:g}" for epsilon in rows["epsilon"]]
        for at, (library, method) in enumerate(LIBRARIES.items()):
            places = np.arange(len(rows)) + 0.16 * (at - 0.5)
            middle = rows[library]
            reach = [middle - rows[f"{library}_low"], rows[f"{library}_high"] - middle]
            style = method_style(method) | {"markersize": 4, "linewidth": 1, "capsize": 2}
            axis.errorbar(places, middle, yerr=reach, label=library, **style)
        axis.set_xticks(np.arange(len(rows)), names)
        axis.set(title=task, xlabel="epsilon", ylabel=metric)
        axis.grid(visible=False, axis="x")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    tell(figure, summarise(table))
    return figure


def summarise(table: pd.DataFrame) -> str:
    """Say whether both libraries train alike."""
    outside = (table["difference_low"] > 0) | (table["difference_high"] < 0)
    beyond = (table["all_low"] > 0) | (table["all_high"] < 0)
    return (
        f"dpprof and Opacus differ in {outside.sum()} of {len(table)} pairs by more than the 95 % "
        f"interval of the pair, of which {0.05 * len(table):.1f} are expected by chance, and in "
        f"{beyond.sum()} by more than the intervals that hold for all pairs together."
    )


def write_document(frame: pd.DataFrame, drawing: Picture, place: str) -> Document:
    """Compose the report."""
    libraries, changes = compare_libraries(frame), compare_changes(frame)
    budget = {
        "task": column.text("task"),
        "epsilon": column.Column(
            lambda row: "none" if np.isnan(row["epsilon"]) else f"{row['epsilon']:g}"
        ),
    }
    measured = {name: _between(name) for name in (*LIBRARIES, "difference")}
    timed = [name for name in (*LIBRARIES, "torch") if f"{name}_s" in libraries]
    seconds = {f"{name} (s)": column.amount(f"{name}_s") for name in timed}
    both = tabulate(
        "Accuracy (digits), or bits per character, of held-out data: means over seeds, and 95 % t "
        "intervals; the difference is that of trainings with the same seed. Seconds are CPU "
        "seconds of a training's steps on one core; torch trains without per-sample gradients.",
        budget | measured | seconds,
        libraries,
        "learning.csv",
    )
    tried = tabulate(
        "One setting changed at a time, with dpprof, at one epsilon, with as many steps. The "
        "difference is to the task's own settings, by seeds.",
        {
            **{name: column.text(name) for name in ("task", "change")},
            "held out": _between("held_out"),
            "difference": measured["difference"],
            "noise": column.amount("noise_multiplier", digits=2),
            "CPU (s)": column.amount("cpu_s"),
        },
        changes,
        "learning.csv",
    )
    blocks: Blocks = [drawing, *both]
    return Document(
        title="What privacy costs in accuracy",
        question="How well do private trainings learn, and do dpprof and Opacus train alike?",
        headline=(summarise(libraries),),
        sections=(
            Section(title="Accuracy over epsilon", blocks=tuple(blocks)),
            Section(title="What to try", blocks=tuple(tried)),
            Section(title="How this was measured", blocks=tuple(paragraph(f"{place}."))),
        ),
    )


def _between(name: str) -> column.Column:
    sign = "+" if name == "difference" else ""
    return column.Column(
        lambda row: f"{row[name]:{sign}.3f} ± {row[f'{name}_high'] - row[name]:.3f}"
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="files that learning.py left")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the report goes")
    arguments = parser.parse_args()
    results = [CellResult.model_validate_json(path.read_bytes()) for path in arguments.results]
    frame = build_frame(results)
    folder: Path = arguments.output_dir
    write_atomically(folder / "learning.csv", frame.to_csv(index=False))
    figure = draw(compare_libraries(frame), dict(zip(frame["task"], frame["metric"], strict=True)))
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for kind in ("png", "pdf"):
        save_figure(figure, folder / "figures" / f"learning.{kind}")
    caption = " ".join((draw.__doc__ or "").split())
    picture = Picture(name="learning", said=str(figure.get_label()), caption=caption)
    places = sorted({result.place for result in results})
    write_report(write_document(frame, picture, "; ".join(places)), folder)


if __name__ == "__main__":
    main()
