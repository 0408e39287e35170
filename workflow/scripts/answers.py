"""Find what the documentation and the default sweep ask, and keep the answers.

The documentation asks ``dpprof advise``, ``budget`` and ``fits``; the default sweep asks for
capacities, and for the noise of its privacy budget.
"""

import itertools
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from dpprof.ask.capacities import find_capacities
from dpprof.experiments.config.config_files import read_config_file
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.launch.accounting_run import account_once
from dpprof.experiments.planning.planner import Plan, make_plan
from dpprof.experiments.records.answers import keep_answers
from dpprof.experiments.records.record import write_record
from dpprof.experiments.records.result import Failure, Result, read_result

ROOT = Path(__file__).resolve().parents[2]
_COMMAND = re.compile(r"^dpprof ((?:advise|budget|fits) (?:.*\\\n)*.*)$", re.MULTILINE)


def find_questions() -> Iterator[list[str]]:
    """Yield the arguments of each question in a page of the documentation."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for found in _COMMAND.findall(page.read_text(encoding="utf-8")):
            yield shlex.split(found.replace("\\\n", " "))


def plan_default_sweep() -> tuple[Plan, list[Experiment]]:
    """Return the default sweep, and the experiments whose capacities it asks for."""
    plan = make_plan(read_config_file(ROOT / "config" / "config.yaml"))
    runs = (run for run in plan.manifest.runs if run.instrument == "capacity")
    return plan, [plan.experiments[run.id] for run in runs]


def answer_default_sweep(root: Path) -> None:
    """Find the capacities of the default sweep, model by model, and the noise of its budget."""
    plan, asked = plan_default_sweep()
    for model, alike in itertools.groupby(asked, key=attrgetter("model_name")):
        print(f"the default sweep asks about {model}", flush=True)
        find_capacities(list(alike), root, again=False)
    if plan.config.privacy is not None:
        lengths = sorted({experiment.tokens_per_sample for experiment in asked})
        account_once(root, plan.config.privacy, lengths)


def main() -> None:
    """Run from the command line."""
    sys.path.pop(0)  # profile.py in this folder would hide the standard library's
    with tempfile.TemporaryDirectory() as folder:
        for arguments in find_questions():
            print(shlex.join(["dpprof", *arguments]), flush=True)
            # Some ask what does not fit, which is an answer too.
            subprocess.run([sys.executable, "-m", "dpprof", *arguments], cwd=folder, check=False)
        answer_default_sweep(Path(folder))
        capacities = sorted(Path(folder, "results", "capacity").glob("*.json"))
        for path in capacities:
            _forget_machine(path)
        keep_answers([*capacities, *Path(folder, "results", "accounting").glob("*.json")])
    print(f"{len(capacities)} capacities are kept")


def _forget_machine(path: Path) -> None:
    """Leave out of a result which machine found it, and where."""
    result = read_result(path)
    kept = {name: result.provenance.get(name) for name in ("python", "packages")}
    attempts = [
        attempt.model_copy(update={"error": _without_log(attempt.error)})
        for attempt in result.attempts
    ]
    others = {"provenance": kept, "error": _without_log(result.error), "attempts": attempts}
    write_record(path, Result, dict(result) | others)


def _without_log(error: Failure | None) -> Failure | None:
    return error and error.model_copy(update={"log": None})


if __name__ == "__main__":
    main()
