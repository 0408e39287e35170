"""Plans a config as files that Snakemake can compare: specs, code digests and a manifest.

All of them are content-addressed. A spec's name ends in its digest, so the file never changes, and
any number of configs can share one results folder. A manifest lists the runs of one config and has
its own digest in its name.
"""

import contextlib
import datetime as dt
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.naming import refuse_code
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.registry import PREDICTIONS, refuse_target
from dpprof.experiments.config.sweep import Config, Run, expand, parse_config, stated_keys
from dpprof.experiments.config.validation import InputError, read_model
from dpprof.experiments.planning.artifacts import (
    PLAN,
    PLAN_FILES,
    RECORD_KINDS,
    RESULTS,
    RUN,
    TABLES,
    Artifact,
    RecordKind,
    ceilings_of,
    code_of_run,
    code_path,
    spec_path,
    stand_in_path,
    traces_path,
    verdict_on,
)
from dpprof.experiments.planning.code_digest import derived_digests, verified_as
from dpprof.experiments.planning.stand_ins import StandIn
from dpprof.experiments.records.answers import take_kept
from dpprof.experiments.records.ceilings import device_name
from dpprof.experiments.records.result import result_path
from dpprof.system import files
from dpprof.system.hardware import available_cores, cpu_name, resolve_device, visible_gpus


class PlannedRun(BaseModel, frozen=True, extra="forbid"):
    """One line of a manifest."""

    id: str
    instrument: str
    replicate: int
    method: str
    sweeps: tuple[str, ...]

    def path(self, root: Path) -> Path:
        """Return the path of the run's result."""
        return result_path(root, self.instrument, self.id, self.replicate)


class Manifest(BaseModel, frozen=True, extra="forbid"):
    """The runs of one config, in canonical order, and its privacy budget."""

    schema_version: Literal[1] = 1
    privacy: Privacy | None = None
    runs: tuple[PlannedRun, ...]

    @cached_property
    def text(self) -> str:
        """The manifest's file content, one run per line."""
        lines = ",\n".join(files.canonical_json(run.model_dump(mode="json")) for run in self.runs)
        privacy = self.privacy and files.canonical_json(self.privacy.model_dump(mode="json"))
        budget = f'"privacy":{privacy},' if privacy else ""
        return f'{{"schema_version":{self.schema_version},{budget}"runs":[\n{lines}\n]}}\n'

    @cached_property
    def path(self) -> Path:
        """The manifest's path, relative to the working folder."""
        return PLAN / f"manifest-{files.sha256_hex(self.text)[:16]}.json"

    @property
    def due_path(self) -> Path:
        """The path of the file that records when this config's tables last became due."""
        return self.path.with_name(self.path.stem.replace("manifest-", "due-") + ".txt")


@dataclass(frozen=True)
class Plan:
    """A config, resolved."""

    config: Config
    manifest: Manifest
    experiments: dict[str, Experiment]

    @property
    def devices(self) -> list[str]:
        """The names of devices with ceilings: those measured on, and those predicted here."""
        measured = (run for run in self.manifest.runs if run.instrument not in PREDICTIONS)
        kinds = {self.experiments[run.id].device for run in measured}
        kinds |= {"cpu"} if self.predicted_here else set()
        return sorted(name_here(kind) for kind in kinds)

    @cached_property
    def predicted_here(self) -> list[str]:
        """The ids of experiments whose step time is predicted for this machine's processor."""
        runs = (run for run in self.manifest.runs if run.instrument in PREDICTIONS)
        ids = dict.fromkeys(run.id for run in runs)
        return [name for name in ids if self.experiments[name].device == "cpu"]

    @cached_property
    def artifacts(self) -> list[Artifact]:
        """What rules make for this config: results, verdicts and ceilings."""
        experiments = self.experiments
        pairs = sorted({(verified_as(e), e.method) for e in experiments.values()})
        return [
            *(
                Artifact(RUN, run.path(Path()), code_of_run(run.instrument, experiments[run.id]))
                for run in self.manifest.runs
            ),
            *(verdict_on(*pair) for pair in pairs),
            *(ceilings_of(name) for name in self.devices),
        ]

    @cached_property
    def stand_ins(self) -> dict[Path, StandIn]:
        """The small models that stand for Hugging Face models in verdicts, by their files."""
        stand_ins = filter(None, map(StandIn.of, self.experiments.values()))
        return {stand_in_path(stand_in.label): stand_in for stand_in in stand_ins}

    def paths(self, kind: RecordKind) -> list[Path]:
        """Return the paths of the records of one kind."""
        return [artifact.path for artifact in self.artifacts if artifact.kind is kind]


def name_here(kind: str) -> str:
    """Return the name of this host's processor or of its first visible GPU.

    Without a visible GPU, as on the head node of a cluster, the name is ``cuda``. The ceilings
    file itself names its device.
    """
    if kind == "cpu":
        return device_name({"type": kind, "name": cpu_name(), "cores": available_cores()})
    return device_name({"type": kind, "name": next((gpu.name for gpu in visible_gpus()), None)})


def _check_names(config: Config) -> None:
    grids = {"defaults": config.defaults}
    grids |= {f"sweeps.{name}": sweep for name, sweep in config.sweeps.items()}
    grids |= {f"exclude.{position}": entry for position, entry in enumerate(config.exclude)}
    for where, grid in grids.items():
        for key, group in registry.NAMING.items():
            for name in stated_keys(grid).get(key, []):
                if isinstance(name, str):
                    refuse_code(name, f"{where}.{key}")
                    registry.check(group, name, f"{where}.{key}")


def make_plan(raw: dict[str, Any], device: Callable[[], str] = resolve_device) -> Plan:
    """Return the runs of a config; write nothing.

    ``device`` returns the device for ``device: auto``.

    Raises:
        InputError: The config is not valid; the message has one sentence per problem.
    """
    config = parse_config(raw, registry.names_by_key())
    _check_names(config)
    sweeps_of: dict[Run, list[str]] = {}
    for name, runs in expand(config, device).items():
        for run in dict.fromkeys(runs):
            refuse_target(run.experiment, run.instrument, f"sweeps.{name}.target")
            sweeps_of.setdefault(run, []).append(name)
    experiments: dict[str, Experiment] = {}
    for run in sweeps_of:
        other = experiments.setdefault(run.experiment.id, run.experiment)
        if other != run.experiment:
            raise InputError(
                f"two experiments have the id {other.id}, because their digests agree in the first "
                "eight digits; change any value of one of them, for example its seed"
            )
    planned = [
        PlannedRun(
            id=run.experiment.id,
            instrument=run.instrument,
            replicate=run.replicate,
            method=run.experiment.method,
            sweeps=tuple(sorted(names)),
        )
        for run, names in sweeps_of.items()
    ]
    planned.sort(key=lambda run: (run.replicate, run.id, run.instrument))
    _refuse_budget(config, sweeps_of)
    return Plan(config, Manifest(privacy=config.privacy, runs=tuple(planned)), experiments)


def _refuse_budget(config: Config, runs: Iterable[Run]) -> None:
    """Refuse a privacy budget that no capacity can price, or whose tokens are too few."""
    if config.privacy is None:
        return
    asked = [run.experiment for run in runs if run.instrument == "capacity"]
    if not asked:
        raise InputError(
            "privacy: hours are told from capacity results; give a sweep the instrument capacity "
            "and a target"
        )
    for experiment in asked:
        config.privacy.refuse_few_tokens(experiment.tokens_per_sample, "privacy.tokens")


def write_plan(plan: Plan, *, elsewhere: bool = False) -> None:
    """Write specs, code digests and the manifest where their content differs.

    ``elsewhere`` says that results are not in ``results`` but, for example, in a storage of
    Snakemake's.
    """
    for experiment in plan.experiments.values():
        _write_once(spec_path(experiment.id), experiment.canonical + "\n")
    for path, stand_in in plan.stand_ins.items():
        _write_once(path, stand_in.canonical + "\n")
    for name, digest in derived_digests().items():
        files.write_if_changed(code_path(name), digest + "\n")
    resting_on: dict[str, list[Artifact]] = {}
    for artifact in plan.artifacts:
        resting_on.setdefault(artifact.code.name, []).append(artifact)
    for artifacts in resting_on.values():
        _write_code(artifacts, elsewhere=elsewhere)
    files.write_if_changed(plan.manifest.path, plan.manifest.text)
    _mark_tables_due(plan, elsewhere=elsewhere)


_LONG_AGO_S = 315_532_800
"""The age of files whose name is a digest of their content, which never changes: 1980."""


def _write_once(path: Path, text: str) -> None:
    """Write a file that is named by its content, older than everything that is made from it.

    So results that were copied here, without the plan that they were measured by, are not older.
    There is no fsync, which takes long for ten thousand: what a crash loses is written again.
    """
    if files.write_if_changed(path, text, durable=False):
        os.utime(path, (_LONG_AGO_S, _LONG_AGO_S))


def _write_code(artifacts: Sequence[Artifact], *, elsewhere: bool) -> None:
    """Write the digest of the code that records rest on, if it is not the one on disk.

    Snakemake makes again what is older than this file. Records that carry the digest are current
    all the same, whatever was planned before and whenever they were copied here: they become
    newer than the file. Such records that come with the package are put in their place, unless
    results are elsewhere.

    Raises:
        OSError: The file, or the age of a record, cannot be written.
    """
    code = artifacts[0].code
    digest = code.digest()
    files.write_if_changed(code.path, digest + "\n")
    planned_ns = code.path.stat().st_mtime_ns
    for artifact in artifacts:
        if not elsewhere:
            take_kept(artifact.path, holding=f'"code_digest": "{digest}"')
        if _is_restored(artifact.path, digest, planned_ns):
            os.utime(artifact.path)


def _is_restored(path: Path, digest: str, planned_ns: int) -> bool:
    """Return whether a record of the code with a digest is no newer than the plan."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if path.stat().st_mtime_ns <= planned_ns:
            return bool(files.read_json(path).get("code_digest") == digest)
    return False


def _mark_tables_due(plan: Plan, *, elsewhere: bool) -> None:
    """Rewrite an input of the tables when they must be built again.

    Snakemake ignores a missing intermediate file as long as its outputs exist. Without its own
    records it does not know which config the tables belong to. So without this file it would not
    notice a deleted result, verdict or ceilings file, or another config's tables. A partial report
    is always due, because it uses the results that exist at the time. What is elsewhere is left
    to Snakemake.
    """
    manifest = plan.manifest
    missing = 0 if elsewhere else sum(not artifact.path.is_file() for artifact in plan.artifacts)
    tables_are_of = TABLES / "manifest.txt"
    name = manifest.path.name.encode()
    others = tables_are_of.is_file() and tables_are_of.read_bytes().strip() != name
    if missing or others or plan.config.partial or not manifest.due_path.is_file():
        why = f"{missing} files missing, partial={plan.config.partial}, others={others}"
        now = dt.datetime.now(dt.UTC).isoformat()
        files.write_atomically(manifest.due_path, f"{why} at {now}\n")


def read_manifest(path: Path) -> Manifest:
    """Read a manifest file.

    Raises:
        InputError: The file is not a manifest.
    """
    return read_model(path, Manifest, "a manifest")


def files_beyond(root: Path, plans: Sequence[Plan]) -> list[Path]:
    """Return the files of runs under ``results`` that none of the plans needs.

    These are result files, traces, verdicts, ceilings, logs, specs, code digests and manifests.
    Tables, figures and the report belong to the last config and are not included.
    """
    keep = {code_path(name) for name in derived_digests()}
    keep |= {spec_path(name) for plan in plans for name in plan.experiments}
    for plan in plans:
        keep |= {plan.manifest.path, plan.manifest.due_path, *plan.stand_ins}
        for artifact in plan.artifacts:
            keep |= {artifact.path, artifact.log, artifact.code.path}
    traced = {traces_path(run.id, run.replicate) for plan in plans for run in plan.manifest.runs}
    patterns = [f"{kind.pattern}.json" for kind in RECORD_KINDS]
    patterns += [f"logs/{kind.pattern}.log" for kind in RECORD_KINDS]
    patterns += [f"{PLAN.name}/{pattern}" for pattern in PLAN_FILES]

    def find(pattern: str) -> set[Path]:
        return {path.relative_to(root) for path in (root / RESULTS).glob(pattern)}

    beyond = set[Path]().union(*map(find, patterns)) - keep
    beyond |= {path for path in find("traces/*/*/*") if path.parent not in traced}
    return sorted(root / path for path in beyond)
