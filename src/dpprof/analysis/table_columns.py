"""The tables that there are, each with what a row of it is; the workflow makes a file of each."""

from collections.abc import Mapping

TABLES: Mapping[str, str] = {
    "runs": "an experiment, instrument and replicate",
    "experiments": "an experiment, over its processes",
    "settings": "a setting in which methods compete",
    "methods": "a method, over all settings",
    "outcomes": "a method",
    "steps": "a step, warm-up included",
    "phases": "a phase of a run",
    "snapshots": "a named snapshot",
    "components": "a component of a snapshot",
    "advice": "a method of each setting with capacity results",
    "peaks": "a run that recorded or estimated memory",
    "costs": "a run that recorded or estimated memory",
    "owners": "an owner of memory at the peak",
    "holdings": "one of the largest holdings at the peak",
    "timeline": "an instant of a step",
    "traffic": "bytes and FLOPs by phase, op kind, module or component",
    "kernels": "an op kind in a phase of a traced run",
    "traces": "a traced run",
    "instrument_overhead": "an experiment and instrument",
    "samplers": "a type of layer",
    "verification": "a method, model and variant of attention",
    "ceilings": "a device and figure",
    "findings": "a caveat",
    "missing": "a run without a result that can be trusted",
}
"""By file stem. A test holds ``build_tables`` to it."""
