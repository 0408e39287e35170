"""The question that a sweep asks, in the words of its config."""

from collections.abc import Sequence

import pandas as pd

from dpprof.results.analysis.selection import Tables, find_trainings
from dpprof.results.analysis.tables.axes import BASELINE, name_model
from dpprof.results.report.wording import (
    THIS_MACHINE,
    listed,
    name_tokens,
    name_trained,
    name_trainings,
    plural,
)

_MOST_METHODS = 4
_MOST_MODELS = 3
_MOST_LENGTHS = 2


def ask(tables: Tables) -> str:
    """Return what the sweep asks: which models it trains where, and for which privacy.

    Without results there is no question, and the text is empty.
    """
    runs, trainings = tables["runs"], find_trainings(tables)
    if runs.empty:
        return ""
    if trainings:
        return _ask_for_trainings(trainings, tables["noise"])
    private = [str(method) for method in runs["method"].unique() if method != BASELINE]
    what = _name_places(runs)
    if not private:
        return f"What does it take to train {what} without privacy?"
    if len(private) == 1:
        return f"What does {private[0]} cost where it trains {what}?"
    named = listed(private) if len(private) <= _MOST_METHODS else f"{len(private)} private methods"
    return f"Which of {named} should train {what}, and at what cost?"


def _ask_for_trainings(trainings: Sequence[pd.DataFrame], noise: pd.DataFrame) -> str:
    names = name_trainings(trainings)
    models = {name_trained(rows.iloc[0]) for rows in trainings}
    what = f"{len(models)} {plural(len(models), 'model')} in {len(names)} settings"
    if len(names) <= _MOST_MODELS:  # each may have an "and" or a "with" of its own
        *most, last = sorted(names, key=lambda name: " with " in name)
        what = f"{', '.join(most)}{',' * (len(most) > 1)} or {last}" if most else last
    elif len(names) == len(models):
        what = f"{len(models)} models"
    rows = pd.concat(trainings)
    targets = rows["target"].fillna(THIS_MACHINE).unique()
    if noise.empty:
        return f"How should one train {what} privately on {listed(targets)}?"
    hourly = (rows["price"] / rows["gpu_hours"]).dropna().astype(float)
    cost = f", if an hour of any GPU costs {hourly.iloc[0]:.4g}" if len(hourly) else ""
    return (
        f"With which method should one train {what} on {listed(targets)}, and at what price for "
        f"{name_tokens(noise.iloc[0])}{cost}?"
    )


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
