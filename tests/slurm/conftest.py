"""A real Slurm on loopback, and a checkout whose jobs it runs, on GPUs that are only names."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from checkout import Checkout, quick_checkout
from fake_gpus import environment
from slurm.cluster import MISSING, Cluster

HERE = Path(__file__).parent

PROFILE = ("--workflow-profile", "profiles/slurm", "--slurm-status-command", "squeue")


class SlurmCheckout(Checkout):
    """A checkout on the head node of a cluster."""

    def sweep(self) -> subprocess.Popen[str]:
        """Start a sweep; what it says is appended to a file, since nobody reads it meanwhile."""
        with self.said.open("a") as file:
            return self.call(str(HERE / "impatient_snakemake.py"), *PROFILE, output=file.fileno())

    @property
    def said(self) -> Path:
        """The file with what sweeps have said."""
        return self.path.parent / "said"

    def plan(self, *batch_sizes: int) -> None:
        """Have the default config ask for a run of each of these batch sizes."""
        path = self.path / "config" / "config.yaml"
        config = yaml.safe_load(path.read_text())
        config["defaults"]["device"] = "cuda"
        config["sweeps"] = {"paced": {"method": "standard", "batch_size": list(batch_sizes)}}
        path.write_text(yaml.safe_dump(config))

    @property
    def stage(self) -> Path:
        """The folder in which runs and the test leave files for one another."""
        return self.path.parent / "stage"

    def let_go(self, batch_size: int) -> None:
        (self.stage / f"go-{batch_size}").touch()

    def begun(self) -> list[tuple[int, int]]:
        """Batch size and process of every run that has begun."""
        names = [path.name.split("-") for path in self.stage.glob("begun-*")]
        return [(int(batch_size), int(process)) for _, batch_size, process in names]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if MISSING:
        pytest.skip(f"Slurm is not installed: no {', '.join(MISSING)}; Debian has slurm-wlm, munge")
    if importlib.util.find_spec("snakemake_executor_plugin_slurm") is None:
        pytest.skip("snakemake-executor-plugin-slurm is not installed")
    one = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        one.start()
        yield one
    finally:
        one.stop()


@pytest.fixture(scope="module")
def on_cluster(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> SlurmCheckout:
    """A checkout in which nothing is trained, with three GPUs that are only names."""
    folder = tmp_path_factory.mktemp("head")
    target = quick_checkout(folder / "checkout").path
    instruments = target / "src" / "dpprof" / "measure" / "instruments"
    (instruments / "clean.py").rename(instruments / "quick_clean.py")
    shutil.copy(HERE / "paced_clean.py", instruments / "clean.py")
    one = SlurmCheckout(target)
    one.stage.mkdir()
    gpus = environment(folder, 3, source=target / "src")
    programs = [str(cluster.programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    one.environment = (
        cluster.environment
        | {name: gpus[name] for name in ("DPPROF_FAKE_GPUS", "DPPROF_LOCK_DIR", "PYTHONPATH")}
        | {"PATH": os.pathsep.join(programs), "DPPROF_TEST_STAGE": str(one.stage)}
    )
    return one
