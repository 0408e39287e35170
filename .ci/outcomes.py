"""Fail where runs of the default sweep did not end as its config says: .ci/outcomes.py results.

It also fails where page one does not compare every prediction for this machine with a measurement.
"""

import csv
import re
import sys
from pathlib import Path

FURTHEST_BYTES = 8
"""How far a predicted peak may be from the measured one."""


def is_too_large(run: dict[str, str]) -> bool:
    """Tell whether a run is one that config/config.yaml says no GPU of the sweep holds."""
    return run["sweeps"] == "whole" and not run["parallel"]


def list_faults(results: Path) -> list[str]:
    """Return a line for each run with another outcome than the expected one."""
    with (results / "tables" / "runs.csv").open(encoding="utf-8", newline="") as file:
        runs = list(csv.DictReader(file))
    return [
        f"{run['experiment_id']} {run['instrument']} r{run['replicate']} ended as "
        f"{run['outcome']}, not {expected}: {run['error_message']}"
        for run in runs
        if run["outcome"] != (expected := "oom" if is_too_large(run) else "ok")
    ]


def judge_page_one(results: Path) -> list[str]:
    """Return what is wrong with the comparison of predicted with measured peaks."""
    text = (results / "report.md").read_text(encoding="utf-8")
    compared = re.search(r"(\d+) of (\d+) predicted memory peaks are exact", text)
    if compared is None:
        return ["page one compares no predicted peak"]
    furthest = re.search(r"the largest gap is ([\d,]+) bytes", text)
    gap = int(furthest[1].replace(",", "")) if furthest else 0
    found = []
    if compared[2] != "4":
        found.append(f"page one compares {compared[2]} predicted peaks, not 4")
    if gap > FURTHEST_BYTES:
        found.append(f"a predicted peak is {gap} bytes off")
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if faults := [*list_faults(folder), *judge_page_one(folder)]:
        sys.exit("\n".join(faults))
