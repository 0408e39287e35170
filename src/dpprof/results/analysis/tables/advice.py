"""The tables of advice, of budgets, and of noise by batch size."""

import pandas as pd

from dpprof.experiments.records.advice import OF_SEVERAL_WAYS
from dpprof.results.analysis.advice.advice import advise, group_capacities
from dpprof.results.analysis.advice.budget import Planned, make_budget
from dpprof.results.analysis.collection import Collected
from dpprof.results.analysis.tables.frames import make_frame


def tabulate_advice(collected: Collected) -> pd.DataFrame:
    """Return one row per option of every model, sequence length and target, best first."""
    rows = []
    for setting, results in group_capacities(collected):
        advice = advise(results, setting["target"] or "this machine", collected.standings)
        rows += [
            setting
            | {"budget_bytes": advice.budget_bytes}
            | option.model_dump(exclude=OF_SEVERAL_WAYS)
            for option in advice.options
        ]
    return make_frame("advice", rows)


def tabulate_budget(collected: Collected, planned: Planned | None) -> pd.DataFrame:
    """Return one row per method and epsilon of every setting with capacity results."""
    rows = []
    for setting, results in group_capacities(collected) if planned else ():
        assert planned is not None
        experiment = results[0].experiment
        plan = planned.plans.get(experiment.tokens_per_sample)
        if plan is None:
            rows.append(setting | {"message": planned.reason})
            continue
        target = setting["target"] or "this machine"
        budget = make_budget(results, target, collected.standings, planned.privacy, plan)
        sizes = {r.experiment.method: r.model and r.model.parameters_total for r in results}
        rows += [
            setting | {"parameters_total": sizes[cost.method]} | cost.model_dump()
            for cost in budget.methods
        ]
    return make_frame("budget", rows)


def tabulate_noise(planned: Planned | None) -> pd.DataFrame:
    """Return one row per batch size that a privacy budget was asked about."""
    rows = []
    for plan in planned.plans.values() if planned else ():
        assert planned is not None
        privacy = planned.privacy
        asked = privacy.model_dump(include={"samples", "tokens", "delta", "accountant"})
        asked |= {"epsilon": privacy.epsilon[0], "tokens_per_sample": plan.tokens_per_sample}
        rows += [
            asked | batch.model_dump() | {"chosen": batch.batch_size == plan.batch_size}
            for batch in plan.batches
        ]
    return make_frame("noise", rows)
