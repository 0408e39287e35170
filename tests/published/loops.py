"""Trainings of other people, asked for as their sources state them, and what is predicted.

``python -m published.loops`` prints the table in docs/numbers/data.
"""

import csv
import json
import sys
from functools import cached_property
from typing import Any

from published.recording import DATA

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.loops import LOOPS
from dpprof.predict.estimate import estimate


class Run:
    """What a run showed, and how dpprof is asked for it."""

    def __init__(
        self, source: str, counter: str, measured: float, missing: str, **fields: Any
    ) -> None:
        self.source, self.counter, self.measured, self.missing = source, counter, measured, missing
        self.name = fields["model"]
        usual = {"device": "cuda", "dtype": "bfloat16", "autocast": False}
        self.experiment = Experiment.model_validate(usual | fields | {"model": _MODELS[self.name]})

    @cached_property
    def predicted(self) -> float:
        """The predicted peak of the counter; 10^9 bytes."""
        memory = estimate(self.experiment, lambda _: None).memory
        nbytes = getattr(memory, f"peak_{self.counter}_bytes")
        return float(nbytes) / 1e9

    @property
    def difference(self) -> float:
        """By how many percent the prediction differs."""
        return 100 * (self.predicted / self.measured - 1)

    @property
    def row(self) -> dict[str, str]:
        """The run in the table."""
        of_loop = LOOPS[self.experiment.loop]._asdict()
        left_out = {"model", "device"}
        asked = self.experiment.model_dump(mode="json", exclude_defaults=True, exclude=left_out)
        asked = {key: value for key, value in asked.items() if of_loop.get(key, ...) != value}
        return {
            "source": self.source,
            "model": self.name,
            "asked": json.dumps(asked, sort_keys=True).replace('"', "")[1:-1],
            "counter": self.counter,
            "measured_gb": f"{self.measured:.2f}",
            "predicted_gb": f"{self.predicted:.2f}",
            "difference_percent": f"{self.difference:+.1f}",
            "known_of_the_difference": self.missing,
        }


_CONTENT = json.loads((DATA / "loops.json").read_text())
_MODELS: dict[str, dict[str, Any]] = _CONTENT["models"]
RUNS = [Run(**fields) for fields in _CONTENT["runs"]]

if __name__ == "__main__":
    table = csv.DictWriter(sys.stdout, list(RUNS[0].row), lineterminator="\n")
    table.writeheader()
    table.writerows(run.row for run in RUNS)
