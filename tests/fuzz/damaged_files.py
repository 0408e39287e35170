"""Cases of a finished sweep with one file damaged, and the commands that read that file."""

import atexit
import functools
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from damage import damage, displace
from finished import finish_sweep

from dpprof.experiments.config import registry
from dpprof.experiments.config.config_files import read_config_file
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.launch.progress import Progress
from dpprof.experiments.planning.planner import make_plan, write_plan
from dpprof.results.report.page.live import LivePage


class Reading(NamedTuple):
    """A damaged file and what reads it."""

    file: str
    """Relative to the working folder."""

    content: bytes | None
    """None where something else is in its place."""

    place: int
    """What that is."""

    steps: "tuple[list[str] | Callable[[], None], ...]"
    """Arguments of ``dpprof``, or what another part does in a process of its own."""

    def furnish(self) -> None:
        """Copy the sweep into the working folder and damage the file."""
        shutil.copytree(finished_sweep(), Path(), dirs_exist_ok=True)
        if self.content is None:
            displace(Path(self.file), self.place)
        else:
            Path(self.file).write_bytes(self.content)

    def run(self, command: Callable[[list[str]], int]) -> int:
        """Take the steps until something refuses the file; return the exit status."""
        for step in self.steps:
            if isinstance(step, list):
                status = command(step)
                if status:
                    return status
                continue
            try:
                step()
            except (InputError, OSError) as error:
                print(ascii(str(error)))
                return 1
        return 0


@functools.cache
def finished_sweep() -> Path:
    """Return a folder with a finished sweep, made once."""
    folder = Path(tempfile.mkdtemp(prefix="dpprof-fuzz-"))
    atexit.register(shutil.rmtree, folder)
    finish_sweep(folder)
    return folder


def watch() -> None:
    """Look at the sweep and write the page as ``dpprof watch`` does."""
    LivePage(Path()).renew()


def replan() -> None:
    """Plan the sweep's config over the plan that is there."""
    write_plan(make_plan(read_config_file(Path("my.yaml")), device=lambda: "cpu"))


def follow() -> None:
    """Report the progress of a run as its supervisor does."""
    os.environ["DPPROF_PROGRESS"] = "results/plan/progress.jsonl"
    progress = Progress.current()
    if progress is not None:
        progress.announce("x clean r0")
        progress.running()


Reader = tuple[str | Callable[[], None], ...]
"""Steps. In a command line, ``|`` separates alternatives, FILE is the damaged file, and a pattern
stands for any file that fits it."""

REPORT = "report --tables=results/tables --output-dir=results"
FOUND = "--manifest=results/plan/manifest-*.json --ceilings=results/ceilings/*.json"
TABLES: Reader = (f"tables {FOUND} --output-dir=results/tables --partial|", REPORT)
EXPLAIN = "--format=json|--depth=operator| --output=results/x.png|"
EXPLAINS: list[Reader] = [
    (f"explain FILE results/memory/*.json {EXPLAIN}",),
    (f"explain results/memory/*.json FILE {EXPLAIN}",),
]
COMPARE = "--format=json|--format=markdown| --output=results/c.md| --thresholds=thresholds.yaml|"
COMPARES: list[Reader] = [
    (f"compare results other {COMPARE}",),
    (f"compare other results {COMPARE}",),
]
FORGET: Reader = ("forget --outdated| --unverified| --outcome=oom,killed|",)
FIGURES = "|".join(f"--figure={name}" for name in registry.names("figures"))
OF_TABLES: list[Reader] = [
    (REPORT,),
    (f"figure {FIGURES} --tables=results/tables --output=results/x.png",),
]
OF_PLAN: list[Reader] = [TABLES, FORGET, (watch, replan)]
OF_RUNS: list[Reader] = [TABLES, *COMPARES, FORGET, (watch,)]
PROFILE: Reader = ("profile --spec=FILE --output=results/x.json",)
CEILINGS: Reader = ("ceilings --device=cpu --operators-of=FILE --output=results/x.json",)
VERIFY: Reader = ("verify --stand-in=FILE --method=standard --output=results/x.json",)
READERS: dict[str, tuple[float, list[Reader]]] = {
    "results/[cpk][lhe]*/*.r*.json": (4, OF_RUNS),
    "results/[mec][esa][mtp]*/*.r*.json": (4, [*OF_RUNS, *EXPLAINS]),
    "results/tables/*.csv": (1.5, OF_TABLES),
    "results/tables/sha256sums.txt": (0.3, OF_TABLES),
    "results/tables/manifest.txt": (0.3, [(replan,)]),
    "results/plan/manifest-*.json": (2, OF_PLAN),
    "results/plan/progress.jsonl": (1, [(follow, watch)]),
    "results/plan/specs/*": (1, [PROFILE, CEILINGS, *OF_PLAN]),
    "results/plan/stand-ins/*": (0.5, [VERIFY]),
    "results/plan/code/*": (0.7, OF_PLAN),
    "results/plan/due-*": (0.3, OF_PLAN),
    "results/verify/*.json": (1.5, [TABLES, FORGET, (watch,)]),
    "results/ceilings/*.json": (1.5, [TABLES, (watch,)]),
    "results/figures/*.json": (0.7, [(REPORT,)]),
    "results/logs/*/*.log": (0.7, [(REPORT,)]),
    "other/results/*/*.r*.json": (1, COMPARES),
    "thresholds.yaml": (1, COMPARES),
    "my.yaml": (1, [("prune my.yaml --delete",), (replan,)]),
}
"""How often files of a pattern are damaged, and what reads them: clean, phases and kernels; memory,
estimate and capacity; and the others."""


def _fill(line: str, file: str, draw: random.Random) -> list[str]:
    """Return the arguments of a command line."""
    root = finished_sweep()
    parts = [draw.choice(part.split("|")).replace("FILE", file) for part in line.split()]
    filled = []
    for part in filter(None, parts):
        option, equals, value = part.rpartition("=")
        if "*" in value and part != file:
            value = str(draw.choice(sorted(root.glob(value))).relative_to(root))
        filled.append(f"{option}{equals}{value}")
    return filled


def make_reading(draw: random.Random) -> Reading:
    """Damage one file of a finished sweep."""
    root = finished_sweep()
    (pattern,) = draw.choices(list(READERS), [weight for weight, _ in READERS.values()])
    path = draw.choice(sorted(root.glob(pattern)))
    file = str(path.relative_to(root))
    displaced = draw.random() < 0.05
    content = None if displaced else damage(path.read_bytes(), path.suffix, draw)
    steps = draw.choice(READERS[pattern][1])
    filled = tuple(_fill(one, file, draw) if isinstance(one, str) else one for one in steps)
    return Reading(file, content, draw.randrange(5), filled)
