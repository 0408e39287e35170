"""The question that a sweep asks, in the words of its config."""

import pandas as pd

from dpprof.analysis.tables.axes import BASELINE, name_model
from dpprof.report.wording import THIS_MACHINE, listed, plural

_MOST_METHODS = 4
_MOST_MODELS = 3
_MOST_LENGTHS = 2


def ask(runs: pd.DataFrame) -> str:
    """Return what the sweep asks: of which methods, which models, how long sequences, and where.

    Args:
        runs: The table ``runs``. Without rows there is no question, and the result is empty.
    """
    if runs.empty:
        return ""
    private = [str(method) for method in runs["method"].unique() if method != BASELINE]
    what = _name_places(runs)
    if not private:
        return f"What does it take to train {what} without privacy?"
    if len(private) == 1:
        return f"What does {private[0]} cost where it trains {what}?"
    named = listed(private) if len(private) <= _MOST_METHODS else f"{len(private)} private methods"
    return f"Which of {named} should train {what}, and at what cost?"


def _name_places(runs: pd.DataFrame) -> str:
    """Return what is trained where, targets first; places with the same models become one."""
    places = runs["target"].fillna(THIS_MACHINE)
    where: dict[str, list[str]] = {}
    for place in sorted(places.unique(), key=lambda place: place == THIS_MACHINE):
        where.setdefault(_name_models(runs[places == place]), []).append(f"on {place}")
    *most, last = (f"{models} {listed(named)}" for models, named in where.items())
    return f"{', '.join(most)}, and {last}" if most else last


def _name_models(rows: pd.DataFrame) -> str:
    models = rows.assign(named=[name_model(row) for _, row in rows.iterrows()])
    groups = [group for _, group in models.groupby("named", sort=False)]
    if len(groups) > _MOST_MODELS:
        return f"{len(groups)} {plural(len(groups), 'model')}"
    return listed(_name_model(group) for group in groups)


def _name_model(rows: pd.DataFrame) -> str:
    """Return a model with its sizes: ``small at T = 64 to 256``, or ``vit-b16 at 224 px``."""
    name, images = name_model(rows.iloc[0]), rows["image_size"].dropna()
    if len(images):
        return f"{name} at {listed(f'{size:.0f} px' for size in sorted(set(images)))}"
    lengths = [f"{length:,}" for length in sorted(set(rows["seq_len"]))]
    several = f"{lengths[0]} to {lengths[-1]}" if len(lengths) > _MOST_LENGTHS else listed(lengths)
    return f"{name} at T = {several}"
