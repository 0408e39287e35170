"""A copy of the checkout in which real snakemake runs."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import yaml

ROOT = Path(__file__).resolve().parents[1]


PLUGIN = ROOT / "tests" / "plugin"


QUICK = {
    "quick_clean.py": "measure/instruments/clean.py",
    "quick_setup.py": "subjects/setup.py",
    "quick_limits.py": "measure/devices/limits.py",
    "quick_verify.py": "measure/verification/verify.py",
}
"""What is put in place of modules that would take time."""


TABLES = "results/tables/manifest.txt"
"""A target that needs every result, but no figure and no report, which take as long again."""


_WITHOUT_SLURM = """
import pkgutil, sys
every = pkgutil.iter_modules
pkgutil.iter_modules = lambda: (one for one in every() if "plugin_slurm" not in one.name)
from snakemake.cli import main
sys.exit(main())
"""
"""Snakemake without a plugin that tests/slurm has, and whose import takes as long as pandas's."""


_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", ".snakemake", "__pycache__", "*.egg-info", ".*_cache", "tests"
)


def _leave_out(folder: str, names: list[str]) -> set[str]:
    results = {"results"} if Path(folder) == ROOT else set()
    return _NOT_COPIED(folder, names) | results


@dataclass
class Checkout:
    path: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def _environment(self) -> dict[str, str]:
        bin_folder = str(Path(sys.executable).parent)
        return (
            os.environ
            | {
                "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
                "DPPROF_LOCK_DIR": str(self.path),
            }
            | self.environment
        )

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Start snakemake in a process group of its own, as a terminal would."""
        return self.call("-c", _WITHOUT_SLURM, *options)

    def call(self, *arguments: str, output: int = subprocess.PIPE) -> subprocess.Popen[str]:
        """Start Python in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.path,
            env=self._environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def snakemake(self, *options: str, status: int = 0) -> str:
        process = self.start(*options)
        try:
            said, _ = process.communicate(timeout=300)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert process.returncode == status, said
        return said

    def planned(self, *options: str) -> dict[str, list[str]]:
        """The first output of every job that snakemake would run, by rule."""
        said = self.snakemake("-n", *options)
        job = r"^(?:local)?rule (\w+):\n(?:    .*\n)*?    output: ([^ ,\n]+)"
        found: dict[str, list[str]] = {}
        for rule, output in re.findall(job, said, re.MULTILINE):
            found.setdefault(rule, []).append(Path(output).name)
        return found

    def dpprof(self, *arguments: str) -> None:
        """Run a command of this checkout's dpprof."""
        source = {"PYTHONPATH": str(self.path / "src")}
        command = [sys.executable, "-m", "dpprof", *arguments]
        subprocess.run(command, cwd=self.path, env=self._environment | source, check=True)

    def use(self, config: str) -> None:
        """Make one of the test configs the default config."""
        shutil.copy(ROOT / "config" / "test" / config, self.path / "config" / "config.yaml")

    def draw_one_figure(self) -> None:
        """Leave one figure for all."""
        declared = self.path / "pyproject.toml"
        others = re.compile(r'.* = "dpprof\.results\.figures\.(?!tradeoff:draw").*\n')
        text = declared.read_text()
        assert others.search(text)
        declared.write_text(others.sub("", text))

    def config(self) -> dict[str, object]:
        """The content of the default config."""
        return yaml.safe_load((self.path / "config" / "config.yaml").read_text())

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.path / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def results(self) -> dict[str, tuple[int, bytes]]:
        """Age and content of every result file, by the file's name."""
        found = (self.path / "results" / "clean").glob("*.json")
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in found}

    def table(self, name: str) -> pd.DataFrame:
        return pd.read_csv(self.path / "results" / "tables" / f"{name}.csv")

    def report(self) -> str:
        """The report as text, without the escapes of Markdown."""
        return (self.path / "results" / "report.md").read_text().replace("\\", "")

    def forget_snakemakes_records(self) -> None:
        """Delete .snakemake and touch every tracked file, as a new clone would."""
        shutil.rmtree(self.path / ".snakemake")
        time.sleep(0.01)
        for path in self.path.rglob("*"):
            if path.is_file() and "results" not in path.relative_to(self.path).parts:
                path.touch()


def copy_checkout(target: Path) -> Checkout:
    """Copy the checkout, whose default config becomes the micro sweep."""
    shutil.copytree(ROOT, target, ignore=_leave_out)
    fresh = Checkout(target)
    fresh.use("micro.yaml")
    return fresh


def quick_checkout(target: Path) -> Checkout:
    """Copy the checkout with an instrument that trains nothing, and one figure for all.

    Ceilings and verdicts are invented too, and the report's page has no charts.
    """
    fresh = copy_checkout(target)
    for name, module in QUICK.items():
        shutil.copy(ROOT / "tests" / "workflow" / name, target / "src" / "dpprof" / module)
    fresh.draw_one_figure()
    fresh.edit("src/dpprof/results/report/page/write.py", "vl_convert.javascript_bundle()", '""')
    return fresh
