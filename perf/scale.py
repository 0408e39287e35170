"""What ten thousand experiments cost: planning them, and tables, figures and report of results.

Planning is `snakemake -n` of a config with so many runs, beside a bare Snakefile with as many jobs:
one rule without functions, and a rule for all. The first plan writes the specs, the second finds
them. The results are synthetic, with an estimate beside every second one; their cost is a multiple
of importing torch and Opacus. All figures are CPU time, of processes in turn, so other programs on
the machine hardly change them. Claims: a second plan is at most 2.2 times the bare one; tables,
figures and report take at most 20 times the import, and no process 1 GiB.
"""

import importlib
import itertools
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpprof.experiments.config import registry
from dpprof.system.console import say
from script import IMPORTS, ROOT, Cost, describe_place, lay_out, make_parser, publish, run

MIB = 2**20
REPLICATES = 2
PLAN_CLAIM = 2.2
REPORT_CLAIM = 20.0
MEMORY_CLAIM_MIB = 1024.0
PACKAGES = ("snakemake", "pandas", "scipy", "matplotlib", "torch", "opacus")

CHECKOUT = ("Snakefile", "src", "workflow", "profiles", "config", "envs", "pyproject.toml")
"""What a copy of the checkout needs to plan."""

BARE = """
rule all:
    input: expand("results/{{number}}.json", number=range({jobs}))

rule job:
    input: "spec.json"
    output: "results/{{number}}.json"
    shell: "cp {{input}} {{output}}"
"""

CONFIG = """
defaults: {{model: tiny, device: cpu, method: flash-bk, batch_size: 2, seq_len: 32}}
sweeps: {{many: {{seed: [{seeds}]}}}}
"""


class Row(NamedTuple):
    """A line of a table."""

    name: str
    cost: Cost
    ratio: float


def median_of(costs: Sequence[Cost]) -> Cost:
    """Return the median time and the highest peak."""
    return Cost(statistics.median(c.cpu_s for c in costs), max(c.peak_mib for c in costs))


def measure_planning(jobs: int, rounds: int, folder: Path) -> Iterator[Row]:
    """Plan so many runs in turn: bare, for the first time, and again."""
    bare, ours = folder / "bare", folder / "ours"
    bare.mkdir()
    (bare / "Snakefile").write_text(BARE.format(jobs=jobs), encoding="utf-8")
    (bare / "spec.json").touch()
    ours.mkdir()
    for name in CHECKOUT:
        copy: Callable[..., object] = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, ours / name)
    config = ours / "config" / "scale.yaml"
    config.write_text(CONFIG.format(seeds=", ".join(map(str, range(jobs)))), encoding="utf-8")
    dry = ["-m", "snakemake", "--dry-run", "--cores", "1"]
    sides: dict[str, list[Cost]] = {"bare": [], "first plan": [], "second plan": []}
    for number in range(rounds):
        shutil.rmtree(ours / "results", ignore_errors=True)
        sides["bare"].append(run(dry, bare))
        for name in ("first plan", "second plan"):
            sides[name].append(run([*dry, "--configfile", "config/scale.yaml"], ours))
        say(f"planning: round {number + 1} of {rounds}")
    for name, costs in sides.items():
        pairs = zip(costs, sides["bare"], strict=True)
        ratios = [cost.cpu_s / base.cpu_s for cost, base in pairs]
        yield Row(name, median_of(costs), statistics.median(ratios))


def measure_reporting(results: int, folder: Path) -> Iterator[Row]:
    """Make tables, figures and report of so many results, between imports."""
    manifest = write_results(folder, results)
    say("reporting: the results are written")
    tables, output = folder / "results" / "tables", folder / "results"
    figures = {
        f"figure {name}": [
            *("figure", f"--figure={name}", f"--tables={tables}"),
            *(f"--output={output}/figures/{name}.{kind}" for kind in ("png", "pdf", "json")),
        ]
        for name in registry.names("figures")
    }
    steps = {
        "tables": ["tables", f"--manifest={manifest}", f"--output-dir={tables}"],
        **figures,
        "report": ["report", f"--tables={tables}", f"--output-dir={output}"],
    }
    imports = [run(["-c", IMPORTS], folder) for _ in range(3)]
    costs = {}
    script = str(ROOT / "workflow" / "scripts" / "subcommand.py")
    for name, words in steps.items():
        costs[name] = run([script, *words], folder)
        imports.append(run(["-c", IMPORTS], folder))
        say(f"reporting: {name}")
    unit = median_of(imports)
    yield Row("import torch, opacus", unit, 1.0)
    for name, cost in costs.items():
        yield Row(name, cost, cost.cpu_s / unit.cpu_s)
    total = Cost(sum(c.cpu_s for c in costs.values()), max(c.peak_mib for c in costs.values()))
    yield Row("all of them", total, total.cpu_s / unit.cpu_s)


def write_results(folder: Path, count: int) -> Path:
    """Write results of clean and, for the first replicate of each experiment, of estimate.

    Returns the path of the manifest that lists them.
    """
    sys.path.append(str(ROOT / "tests"))
    factory: Any = importlib.import_module("factory")
    methods = registry.names("methods")
    lengths = (64, 128, 256, 512)
    batches = range(1, 2 + count // (len(lengths) * len(methods) * REPLICATES))
    grid = itertools.product(batches, lengths, enumerate(methods), range(REPLICATES))
    runs: list[tuple[Any, str, dict[str, Any]]] = []
    for batch, length, (rank, method), replicate in itertools.islice(grid, count):
        experiment = factory.make_experiment(method=method, batch_size=batch, seq_len=length)
        step_s = 1e-4 * batch * length * (1 + rank) * (1 + replicate / 50)
        fields = {
            "replicate": replicate,
            "outcome": "oom" if (batch + rank) % 17 == 0 else "ok",
            "step_s": (step_s, step_s * 1.1, step_s),
            "peak_allocated_bytes": MIB * batch * (3 + rank),
            "phases_s": {"forward": [step_s], "backward": [2 * step_s], "step": [step_s]},
            "samplers": {"Linear": "grad sampler"},
        }
        runs.append((experiment, "clean", fields))
        if replicate == 0:
            recorded = factory.make_memory({"parameters": 3 * MIB, "noise": MIB * batch})
            runs.append((experiment, "estimate", {"recorded": recorded}))
    manifest = factory.write_runs(folder, *runs)
    path: Path = folder / manifest.path
    path.parent.mkdir(parents=True)
    path.write_text(manifest.text, encoding="utf-8")
    return path


def tabulate(rows: Sequence[Row], of: str) -> str:
    """Lay rows out as a Markdown table; ratios are multiples ``of`` something."""
    cells = (
        (name, f"{cost.cpu_s:.1f}", f"{ratio:.2f}", f"{cost.peak_mib:.0f}")
        for name, cost, ratio in rows
    )
    return "\n".join(lay_out(("", "CPU (s):", f"{of}:", "peak RSS (MiB):"), cells))


def find_broken(planning: Sequence[Row], reporting: Sequence[Row]) -> list[str]:
    """Return the claims that do not hold."""
    plan, report = planning[-1], reporting[-1]
    broken = []
    if plan.ratio > PLAN_CLAIM:
        broken.append(f"{plan.name}: {plan.ratio:.2f} times bare, not at most {PLAN_CLAIM}")
    if report.ratio > REPORT_CLAIM:
        broken.append(f"report: {report.ratio:.1f} times the import, not at most {REPORT_CLAIM}")
    if report.cost.peak_mib >= MEMORY_CLAIM_MIB:
        broken.append(f"report: {report.cost.peak_mib:.0f} MiB, not below {MEMORY_CLAIM_MIB:.0f}")
    return broken


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=10_000, help="how many runs are planned")
    parser.add_argument("--results", type=int, default=10_000, help="how many results of clean")
    parser.add_argument("--rounds", type=int, default=3, help="how often each plan is made")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        planning = list(measure_planning(arguments.jobs, arguments.rounds, folder))
        reporting = list(measure_reporting(arguments.results, folder / "reporting"))
    estimates = -(-arguments.results // 2)
    text = "\n\n".join(
        [
            f"{describe_place(*PACKAGES)}.",
            f"`snakemake -n` with {arguments.jobs:,} runs:",
            tabulate(planning, "times bare"),
            f"{arguments.results:,} results of clean and {estimates:,} of estimate:",
            tabulate(reporting, "times the import"),
        ]
    )
    publish(__doc__, text, arguments.output)
    if broken := find_broken(planning, reporting):
        sys.exit("\n".join(broken))


if __name__ == "__main__":
    main()
