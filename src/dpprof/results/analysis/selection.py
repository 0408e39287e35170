"""Which runs and settings figures and reports show, of the many that a sweep has."""

import math
from collections.abc import Mapping

import pandas as pd

from dpprof.experiments.config.parallel import read_world_size
from dpprof.experiments.records.terms import COMPONENTS
from dpprof.results.analysis.groups import RECORDERS
from dpprof.results.analysis.tables.axes import BASELINE, RUN_KEY, SETTING, WITHOUT_BATCH

PRICE = ["gpu_hours", "gpu_hours_low", "gpu_hours_high", "price", "hours_ratio", "steps"]
PRICE += ["hours_ratio_low", "hours_ratio_high", "cost_verdict"]
"""The figures of the table ``budget`` that say what a training costs."""

TRAINING = [name for name in WITHOUT_BATCH if name not in ("target", "device", "parallel")]
"""The axes of what is trained, wherever it is."""


def choose_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one run per experiment: its first recorded one, or else its first estimate."""
    recorded = [runs[runs["instrument"] == name] for name in RECORDERS]
    return pd.concat(recorded).drop_duplicates("experiment_id")


def compose_peaks(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the peaks of the chosen runs, with the bytes of each component as a column."""
    by_owner = spread_owners(tables["owners"])
    return choose_runs(tables["peaks"]).merge(by_owner, left_on=RUN_KEY, right_index=True)


def spread_owners(owners: pd.DataFrame) -> pd.DataFrame:
    """Return the bytes of each component at the peak, a column each, by run."""
    by_owner = owners.set_index([*RUN_KEY, "component"])["bytes"].unstack()  # noqa: PD010
    return by_owner.reindex(columns=pd.Index(COMPONENTS)).fillna(0)


def spread_phases(phases: pd.DataFrame) -> pd.DataFrame:
    """Return the median seconds of each phase, a column each, over processes by experiment."""
    medians = phases.groupby(["experiment_id", "phase"])["median_s"].median()
    return medians.unstack()  # noqa: PD010 (there is nothing to aggregate)


def add_op_kinds(traces: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """Return traces with the seconds of each op kind in a column, such as ``gemm_s``."""
    seconds = kernels.groupby([*RUN_KEY, "op_kind"])["seconds"].sum()
    by_op_kind = seconds.unstack().add_suffix("_s")  # noqa: PD010 (nothing to aggregate)
    return traces.merge(by_op_kind, left_on=RUN_KEY, right_index=True)


def median_over_processes(traces: pd.DataFrame) -> pd.DataFrame:
    """Return one row per traced experiment, with the medians of its times over processes."""
    figures = [name for name in map(str, traces) if name.endswith("_s") or name == "other_share"]
    medians = traces.groupby("experiment_id")[figures].median()
    facts = traces.drop(columns=figures).drop_duplicates("experiment_id")
    return facts.merge(medians, left_on="experiment_id", right_index=True)


def needed_bytes(peaks: pd.DataFrame) -> "pd.Series[float]":
    """Return the bytes that must fit: what the allocator would reserve, where that is known.

    Elsewhere it is the higher of the steady-state and the first step's peak.
    """
    tensors = peaks[["peak_bytes", "first_step_peak_bytes"]].astype(float).max(axis=1)
    return peaks["reserved_bytes"].astype(float).fillna(tensors)


def find_fitting(peaks: pd.DataFrame) -> "pd.Series[bool]":
    """Return whether each run fits: by the simulated allocator, or else by its peak.

    A run that would reserve more than the memory fits if releasing the cache makes room.
    """
    within = needed_bytes(peaks) <= peaks["target_memory_bytes"].astype(float)
    return peaks["fits"].where(peaks["fits"].notna(), within).astype(bool)


Tables = Mapping[str, pd.DataFrame]


def measured(experiments: pd.DataFrame) -> pd.DataFrame:
    """Return the experiments that have a measured time or peak on this machine."""
    is_measured = experiments["processes"].fillna(0) + experiments["peak_processes"].fillna(0) > 0
    return experiments[experiments["target"].isna() & is_measured]


def find_here(experiments: pd.DataFrame) -> pd.DataFrame:
    """Return the measured experiments of one setting, one per method; empty without any.

    A setting with two methods comes before one with a single method, then the largest model, then
    the most methods, replicated ones first, then the most tokens in a batch.
    """
    # Positions are learned, so one model has more parameters for longer sequences.
    rows = with_size(measured(experiments), experiments)
    groups = _group_by(SETTING, rows)
    if not groups:
        return experiments.head(0)
    chosen = max(groups, key=_how_much_is_known)
    ordered = chosen.sort_values("processes", ascending=False, kind="stable")
    return ordered.drop_duplicates("method").reset_index(drop=True)


def find_trainings(tables: Tables) -> list[pd.DataFrame]:
    """Return capacity results by what is trained, each with what the privacy budget costs.

    Rows are options. Of each target they are on the fewest ranks on which one ``fits_privately``,
    with hours and price at the first epsilon; the fewest hours come first. What fits a single GPU
    comes first, then the largest model and the longest sequence.
    """
    trainings = []
    for rows in find_options(tables):
        targets = []
        for _, on_it in rows.groupby(rows["target"].map(str)):
            fitting = on_it.loc[on_it["fits"], "ranks"]
            ranks = fitting.min() if len(fitting) else on_it["ranks"].max()
            fewest = on_it[on_it["ranks"].eq(ranks)]
            targets.append(fewest.sort_values("gpu_hours", kind="stable"))
        trainings.append(pd.concat(targets, ignore_index=True))
    return trainings


def find_options(tables: Tables) -> list[pd.DataFrame]:
    """Return capacity results by what is trained, as ``find_trainings``, on any number of ranks."""
    advice = with_size(_add_price(tables), tables["runs"])
    ranks = advice["parallel"].map(read_world_size)
    groups = _group_by(TRAINING, advice.assign(ranks=ranks, fits=fits_privately(advice)))

    def rank(rows: pd.DataFrame) -> tuple[float, ...]:
        fitting = rows.loc[rows["fits"], "ranks"]
        size, length = _size(rows)
        return float(fitting.min()) if len(fitting) else math.inf, -size, -length

    return sorted((rows.reset_index(drop=True) for rows in groups), key=rank)


def fits_privately(advice: pd.DataFrame) -> "pd.Series[bool]":
    """Return whether each option is private, with a safe batch and a gradient not known wrong."""
    safe = advice["private"].astype(bool) & advice["safe_batch_size"].notna()
    return safe & advice["verdict"].ne("wrong")


def _add_price(tables: Tables) -> pd.DataFrame:
    """Return options with hours and price at the first epsilon, unknown without a budget."""
    advice, costs, noise = tables["advice"], tables["budget"], tables["noise"]
    axes = [*WITHOUT_BATCH, "method"]
    if len(noise):
        planned = noise["epsilon"].iloc[0]
        costs = costs[costs["epsilon"].isna() | costs["epsilon"].eq(planned)]
    price = costs[PRICE].assign(_key=_join(costs, axes)).drop_duplicates("_key")
    return advice.assign(_key=_join(advice, axes)).merge(price, how="left", on="_key")


def _join(rows: pd.DataFrame, axes: list[str]) -> "pd.Series[str]":
    """Return the axes of each row as one text; unknown values are equal."""
    return pd.Series(["|".join(map(str, row)) for row in rows[axes].to_numpy()], rows.index, str)


def find_agreement(tables: Tables) -> pd.DataFrame:
    """Return the experiments of which this machine's peak or time is both predicted and measured.

    ``predicted_bytes`` is the peak that ``estimate`` says, ``measured_bytes`` the allocator's;
    ``predicted_step_s`` is with its interval beside ``median_step_s``.
    """
    estimated = ["experiment_id", "peak_bytes", "allocator_peak_bytes"]
    timed = [f"predicted_step{end}_s" for end in ("", "_low", "_high")]
    peaks, costs = (
        tables[name]
        .loc[lambda rows: rows["instrument"].eq("estimate") & rows["target"].isna()]
        .drop_duplicates("experiment_id")
        for name in ("peaks", "costs")
    )
    names = {"peak_bytes": "predicted_bytes", "allocator_peak_bytes": "measured_bytes"}
    rows = tables["experiments"].drop(columns=["peak_bytes"])
    rows = rows.merge(peaks[estimated].rename(columns=names), on="experiment_id", how="left")
    rows = rows.merge(costs[["experiment_id", *timed]], on="experiment_id", how="left")
    of_memory = rows["predicted_bytes"].notna() & rows["measured_bytes"].notna()
    of_time = rows["predicted_step_s"].notna() & rows["median_step_s"].notna()
    return rows[of_memory | of_time].reset_index(drop=True)


def find_predicted(tables: Tables) -> dict[str, pd.DataFrame]:
    """Return predicted peaks by target, of one setting each, with their ratio to standard.

    The targets with the largest models come first, then those with the longest sequences.
    """
    peaks = with_size(compose_peaks(tables), tables["peaks"])
    settings = [
        max(_group_by(SETTING, rows), key=_how_much_is_known)
        for _, rows in peaks.groupby("target", sort=False)
    ]
    predicted = {}
    for rows in sorted(settings, key=_size, reverse=True):
        chosen = rows.drop_duplicates("method").reset_index(drop=True)
        base = chosen.loc[chosen["method"] == BASELINE, "peak_bytes"].astype(float)
        ratio = chosen["peak_bytes"] / (base.iloc[0] if len(base) else float("nan"))
        predicted[str(chosen["target"].iloc[0])] = chosen.assign(peak_ratio=ratio)
    return predicted


def with_size(rows: pd.DataFrame, models: pd.DataFrame) -> pd.DataFrame:
    """Return rows with a column for the most parameters that their model has in ``models``."""
    most = models.groupby("model")["parameters_total"].max()
    return rows.assign(model_size=rows["model"].map(most).astype(float))


def _group_by(axes: list[str], rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Group rows by axes, of which some may be unknown."""
    # As texts, because an axis that is unknown everywhere has no type that groups well.
    groups = rows.groupby([rows[name].map(str) for name in axes], sort=False)
    return [group for _, group in groups]


def _how_much_is_known(rows: pd.DataFrame) -> tuple[float, ...]:
    methods = rows["method"].nunique()
    first = rows.iloc[0]
    size = _number(rows["model_size"].max())
    replicated = _number(rows["processes"].gt(1).sum()) if "processes" in rows else 0.0
    tokens = _number(first["batch_size"] * first["seq_len"])
    return float(methods > 1), size, float(methods), replicated, tokens


def _size(rows: pd.DataFrame) -> tuple[float, float]:
    return _number(rows["model_size"].max()), _number(rows["seq_len"].max())


def _number(value: float) -> float:
    return 0.0 if pd.isna(value) else float(value)
