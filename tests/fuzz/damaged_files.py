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

from dpprof.launch.progress import Progress
from dpprof.planning.planner import make_plan, write_plan
from dpprof.report.page.live import LivePage
from dpprof.spec import registry
from dpprof.spec.config_files import read_config_file
from dpprof.spec.validation import InputError

Step = list[str] | Callable[[], int]
"""The arguments of ``dpprof``, or what another part does in a process of its own."""


class Reading(NamedTuple):
    """A damaged file and what reads it."""

    file: str
    """Relative to the working folder."""

    content: bytes | None
    """None where something else is in its place."""

    place: int
    """What that is."""

    steps: tuple[Step, ...]

    def furnish(self) -> None:
        """Copy the sweep into the working folder and damage the file."""
        shutil.copytree(finished_sweep(), Path(), dirs_exist_ok=True)
        if self.content is None:
            displace(Path(self.file), self.place)
        else:
            Path(self.file).write_bytes(self.content)


@functools.cache
def finished_sweep() -> Path:
    """Return a folder with a finished sweep, made once."""
    folder = Path(tempfile.mkdtemp(prefix="dpprof-fuzz-"))
    atexit.register(shutil.rmtree, folder)
    finish_sweep(folder)
    return folder


def watch() -> int:
    """Look at the sweep and write the page as ``dpprof watch`` does."""
    try:
        LivePage(Path()).renew()
    except (InputError, OSError) as error:
        print(ascii(str(error)))
        return 1
    return 0


def replan() -> int:
    """Plan the sweep's config over the plan that is there."""
    try:
        write_plan(make_plan(read_config_file(Path("my.yaml")), device=lambda: "cpu"))
    except (InputError, OSError) as error:
        print(ascii(str(error)))
        return 1
    return 0


def follow() -> int:
    """Tell the progress of a run as its supervisor does."""
    os.environ["DPPROF_PROGRESS"] = "results/plan/progress.jsonl"
    progress = Progress.current()
    if progress is not None:
        progress.announce("x clean r0")
        progress.running()
    return 0


Reader = Callable[[random.Random, str], tuple[Step, ...]]
"""Draws steps that read a file of the sweep."""

REPORT = ["report", "--tables=results/tables", "--output-dir=results"]


def _tables(draw: random.Random, _file: str) -> tuple[Step, ...]:
    results = finished_sweep() / "results"
    manifest = next(results.glob("plan/manifest-*.json")).name
    limits = next(results.glob("ceilings/*.json")).name
    found = ["tables", f"--manifest=results/plan/{manifest}", "--output-dir=results/tables"]
    found += [f"--ceilings=results/ceilings/{limits}", *draw.choice([[], ["--partial"]])]
    return (found, REPORT)


def _explain(draw: random.Random, file: str) -> tuple[Step, ...]:
    others = sorted((finished_sweep() / "results" / "memory").iterdir())
    other = f"results/memory/{draw.choice(others).name}"
    both = draw.choice([[file, other], [other, file]])
    options = draw.choice([["--format=json"], ["--format=markdown"], ["--depth=operator"], []])
    return (["explain", *both, *options, *draw.choice([[], ["--output=results/x.png"]])],)


def _compare(draw: random.Random, _file: str) -> tuple[Step, ...]:
    options = draw.choice([["--format=json"], ["--format=markdown", "--output=results/c.md"], []])
    both = draw.choice([["results", "other"], ["other", "results"]])
    return (["compare", *both, *options, *draw.choice([[], ["--thresholds=thresholds.yaml"]])],)


def _forget(draw: random.Random, _file: str) -> tuple[Step, ...]:
    options = ["--outdated", "--unverified", "--outcome=oom,killed"]
    return (["forget", *draw.sample(options, draw.randrange(1, 4))],)


def _figure(draw: random.Random, _file: str) -> tuple[Step, ...]:
    name = draw.choice(registry.names("figures"))
    return (["figure", f"--figure={name}", "--tables=results/tables", "--output=results/x.png"],)


def _profile(_draw: random.Random, file: str) -> tuple[Step, ...]:
    return (["profile", f"--spec={file}", "--output=results/x.json"],)


def _ceilings(_draw: random.Random, file: str) -> tuple[Step, ...]:
    return (["ceilings", "--device=cpu", f"--operators-of={file}", "--output=results/x.json"],)


def _verify(_draw: random.Random, file: str) -> tuple[Step, ...]:
    return (["verify", f"--stand-in={file}", "--method=standard", "--output=results/x.json"],)


def _always(*steps: Step) -> Reader:
    return lambda _draw, _file: steps


_WATCH, _REPORT = _always(watch), _always(REPORT)
_PLAN = [_tables, _forget, _always(watch, replan)]
_PEAKS = [_tables, _tables, _compare, _forget, _WATCH, _explain, _explain]
READERS: dict[str, tuple[float, list[Reader]]] = {
    "results/[cpk][lhe]*/*.r*.json": (4, [_tables, _tables, _compare, _forget, _WATCH]),
    "results/[mec][esa][mtp]*/*.r*.json": (4, _PEAKS),
    "results/tables/*.csv": (1.5, [_REPORT, _figure]),
    "results/tables/sha256sums.txt": (0.3, [_REPORT, _figure]),
    "results/tables/manifest.txt": (0.3, [_always(replan)]),
    "results/plan/manifest-*.json": (2, _PLAN),
    "results/plan/progress.jsonl": (1, [_always(follow, watch)]),
    "results/plan/specs/*": (1, [_profile, _ceilings, *_PLAN]),
    "results/plan/stand-ins/*": (0.5, [_verify]),
    "results/plan/code/*": (0.7, _PLAN),
    "results/plan/due-*": (0.3, _PLAN),
    "results/verify/*.json": (1.5, [_tables, _tables, _forget, _WATCH]),
    "results/ceilings/*.json": (1.5, [_tables, _tables, _WATCH]),
    "results/figures/*.json": (0.7, [_REPORT]),
    "results/logs/*/*.log": (0.7, [_REPORT]),
    "other/results/*/*.r*.json": (1, [_compare]),
    "thresholds.yaml": (1, [_compare]),
    "my.yaml": (1, [_always(["prune", "my.yaml", "--delete"]), _always(replan)]),
}
"""How often files of a pattern are damaged, and what reads them: clean, phases and kernels; memory,
estimate and capacity; and the others."""


def make_reading(draw: random.Random) -> Reading:
    """Damage one file of a finished sweep."""
    root = finished_sweep()
    (pattern,) = draw.choices(list(READERS), [weight for weight, _ in READERS.values()])
    path = draw.choice(sorted(root.glob(pattern)))
    file = str(path.relative_to(root))
    displaced = draw.random() < 0.05
    content = None if displaced else damage(path.read_bytes(), path.suffix, draw)
    reader = draw.choice(READERS[pattern][1])
    return Reading(file, content, draw.randrange(5), reader(draw, file))
