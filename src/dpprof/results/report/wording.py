"""How sentences and tables write numbers and names."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dpprof.experiments.config.architecture import PREFIX
from dpprof.experiments.config.parallel import read_world_size
from dpprof.experiments.records.terms import OUTCOMES
from dpprof.results.analysis.selection import TRAINING
from dpprof.results.analysis.tables.axes import SETTING, name_kind, name_model, name_size
from dpprof.results.analysis.tables.frames import varying_axes
from dpprof.system.words import three_digits

THIS_MACHINE = "this machine"

ENDS = ("min", "max")

GIB, MIB, MS = 2**30, 2**20, 1e-3


def name_trained(row: Any) -> str:
    """Return what is trained in words: ``1b``, ``llama-3.1-8b with LoRA``, ``all of gpt2``."""
    name = str(row["model"])
    base = row["quantization"]
    over = f" over {base}" if isinstance(base, str) else ""
    adapted = f" with LoRA{over}" if isinstance(row["lora"], str) else ""
    adapted += f", training {row['trainable']}" if isinstance(row["trainable"], str) else ""
    is_foreign = name.startswith(PREFIX)
    whole = "all of " if is_foreign and not adapted else ""
    return f"{whole}{name.removeprefix(PREFIX)}{adapted}"


def name_trainings(trainings: Sequence[pd.DataFrame], *always: str) -> list[str]:
    """Return what each training trains in words that no other has: ``1b at T = 8 (float16)``.

    A name has the value of an axis where trainings that would share the name differ in it, and of
    each axis in ``always``.
    """
    alike: dict[str, list[Any]] = {}
    for rows in trainings:
        alike.setdefault(name_trained(rows.iloc[0]), []).append(rows.iloc[0])
    differ = {name: varying_axes(pd.DataFrame(some)[TRAINING], ()) for name, some in alike.items()}
    return [
        name + _say_axes(rows.iloc[0], {*always, *differ[name]})
        for rows in trainings
        for name in [name_trained(rows.iloc[0])]
    ]


def _say_axes(row: Any, axes: set[str]) -> str:
    size = {"seq_len", "image_size"}
    rest = [
        str(row[name]) if name in {"dtype", "lora"} else f"{name.replace('_', ' ')} {row[name]}"
        for name in TRAINING
        if name in axes - size and pd.notna(row[name])
    ]
    where = f" at {name_size(row)}" if axes & size else ""
    return where + (f" ({', '.join(rest)})" if rest else "")


def name_gpus(row: Any) -> str:
    """Return where a training runs: ``h100``, ``4 x h100`` under FSDP, ``4 x h100 (ddp)``."""
    place = THIS_MACHINE if pd.isna(row["target"]) else str(row["target"])
    ranks, kind = read_world_size(row["parallel"]), name_kind(row)
    by = f" ({kind})" if kind not in ("", "fsdp") else ""
    return place if ranks == 1 else f"{ranks} x {place}{by}"


def name_tokens(noise: Any) -> str:
    """Return the training that a privacy budget is for, of a row of the table ``noise``."""
    return f"{spell_large(noise['tokens'])} tokens at epsilon {noise['epsilon']:g}"


def spell_large(count: float) -> str:
    """Return a large count in words, as ``2 billion``, where three digits are all that it has."""
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size and float(f"{count / size:.3g}") * size == count:
            return f"{count / size:.3g} {unit}"
    return f"{count:,.0f}"


def count_batch(row: Any, name: str = "safe_batch_size") -> str:
    """Return a largest batch of a row of advice, with a ``+`` where larger ones were not tried."""
    return number(row[name], digits=0) + ("+" if row["limited_by"] == "search" else "")


def name_setting(row: Any) -> str:
    """Return a setting with its batch: ``small (T = 128, B = 4)``."""
    return f"{name_model(row)} ({name_size(row)}, B = {row['batch_size']:,})"


def rows_in(setting: Any, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the same setting as one row."""
    wanted = [str(setting[name]) for name in SETTING]
    return rows[(rows[SETTING].map(str) == wanted).all(axis=1)]


def count_failures(runs: pd.DataFrame) -> str:
    """Return how many runs had each outcome but ok; nothing where all were ok."""
    counts = {name: int((runs["outcome"] == name).sum()) for name in OUTCOMES[1:]}
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def rounded(value: float | None) -> str:
    """Return a figure with three significant digits, and no more: ``14,700,000``."""
    return significant(None if pd.isna(value) else float(f"{value:.3g}"))


def number(value: float | None, unit: float = 1.0, digits: int = 1) -> str:
    """Return a figure in a unit; a dash where it is unknown."""
    return "-" if value is None or pd.isna(value) else f"{value / unit:,.{digits}f}"


def significant(value: float | None, unit: float = 1.0) -> str:
    """Return a figure in a unit with three significant digits; a dash where it is unknown."""
    return three_digits(None if pd.isna(value) else value, unit)


def percent(value: float | None, digits: int = 0) -> str:
    """Return a share in percent; a dash where it is unknown."""
    return "-" if value is None or pd.isna(value) else f"{100 * value:.{digits}f} %"


def span(low: float | None, high: float | None, unit: float = 1.0, digits: int = 1) -> str:
    """Return an interval in a unit; a dash where it is unknown."""
    if pd.isna(low) or pd.isna(high):
        return "-"
    return f"{number(low, unit, digits)} to {number(high, unit, digits)}"


def reach(low: str, high: str) -> str:
    """Return a range of figures, or one figure where both ends are the same."""
    return low if low == high else f"{low} to {high}"


def ratio_with_interval(row: Any) -> str:
    """Return the ratio of a step to standard's, with its interval where it has one."""
    ratio = number(row["step_ratio"], digits=2)
    interval = span(row["step_ratio_low"], row["step_ratio_high"], digits=2)
    return ratio if interval == "-" else f"{ratio} ({interval})"


def text_of(value: Any) -> str:
    """Return a text; a dash where there is none."""
    return "-" if value is None or pd.isna(value) else str(value)
