"""Find what the documentation and the default sweep ask, and keep the answers.

The documentation asks ``dpprof advise``, ``budget`` and ``fits``; the default sweep asks for
capacities, and for the noise of its privacy budget. The verdicts on their methods are kept too.
"""

import itertools
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path

from dpprof.ask.capacities import find_capacities
from dpprof.experiments.config.config_files import read_config_file
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.launch.accounting_run import account_once
from dpprof.experiments.launch.verification_run import verify_apart
from dpprof.experiments.planning.code_digest import verified_as
from dpprof.experiments.planning.planner import Plan, make_plan
from dpprof.experiments.planning.stand_ins import StandIn
from dpprof.experiments.records.answers import keep_answers
from dpprof.experiments.records.record import write_record
from dpprof.experiments.records.result import Failure, Result, read_result
from dpprof.experiments.records.verdict import Verdict
from dpprof.system.hardware import available_cores
from dpprof.system.paths import find_checkout

ROOT = Path(__file__).resolve().parents[2]
_KEPT = ("python", "packages")
"""What is kept of the provenance."""

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
    if find_checkout() != ROOT:
        sys.exit(f"answers would be those of {find_checkout()}; set PYTHONPATH={ROOT / 'src'}")
    with tempfile.TemporaryDirectory() as folder:
        for arguments in find_questions():
            print(shlex.join(["dpprof", *arguments]), flush=True)
            # Some ask what does not fit, which is an answer too.
            subprocess.run([sys.executable, "-m", "dpprof", *arguments], cwd=folder, check=False)
        answer_default_sweep(Path(folder))
        results = Path(folder, "results")
        capacities = sorted(results.glob("capacity/*.json"))
        for path in capacities:
            _forget_machine(path)
        verdicts = verify_methods([read_result(path).experiment for path in capacities], results)
        keep_answers([*capacities, *verdicts, *results.glob("accounting/*.json")])
    print(f"{len(capacities)} capacities and {len(verdicts)} verdicts are kept")


def verify_methods(experiments: Iterable[Experiment], results: Path) -> list[Path]:
    """Write the verdict on each method of experiments, on what stands for their models."""
    subjects = {
        (verified_as(one), one.method): StandIn.of(one) or verified_as(one) for one in experiments
    }

    def verify(label: str, method: str) -> Path:
        path = results / "verify" / f"{label}-{method}.json"
        print(f"dpprof verify {label} --method {method}", flush=True)
        verdict = verify_apart(subjects[label, method], method, path)
        provenance = {name: verdict.provenance[name] for name in _KEPT}
        write_record(path, Verdict, dict(verdict) | {"provenance": provenance})
        return path

    with ThreadPoolExecutor(max_workers=available_cores()) as pool:
        return list(pool.map(verify, *zip(*sorted(subjects), strict=True)))


def _forget_machine(path: Path) -> None:
    """Leave out of a result which machine found it, and where."""
    result = read_result(path)
    kept = {name: result.provenance.get(name) for name in _KEPT}
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
