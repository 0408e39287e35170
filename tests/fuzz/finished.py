"""A small finished sweep in a folder, whose files tests damage; nothing in it was measured."""

import json
import platform
from pathlib import Path
from typing import Any

from factory import (
    make_capacity,
    make_experiment,
    make_held,
    make_kernels,
    write_runs,
    write_synthetic_ceilings,
    write_synthetic_verdict,
)

from dpprof.ask.commands.main import main
from dpprof.experiments.config import registry
from dpprof.experiments.launch.progress import run_name
from dpprof.experiments.planning.artifacts import (
    PLAN,
    RUN,
    code_of_verdict,
    spec_path,
    stand_in_path,
)
from dpprof.experiments.planning.code_digest import verified_as
from dpprof.experiments.planning.planner import Manifest
from dpprof.experiments.planning.stand_ins import StandIn
from dpprof.results.report.rendering.document import Drawing
from dpprof.system.files import canonical_json

SIZES = {"parameters": 800, "saved_activations": 150, "noise": 50}
METHODS = ("standard", "flash-bk", "opacus-hooks")
HUGGING_FACE = {"hf": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}
HUGGING_FACE |= {"num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG = """\
defaults: {model: tiny, seq_len: 4, device: cpu}
sweeps: {one: {method: standard, batch_size: 2, instruments: clean}}
"""


def finish_sweep(folder: Path) -> None:
    """Leave in a folder what a sweep leaves, tables and figures' captions included.

    Beside ``results`` are ``other/results``, of which two peaks differ, a config and thresholds.
    """
    runs = _write_results(folder, SIZES)
    _write_results(folder / "other", SIZES | {"noise": 60})
    _write_plan(folder, runs)
    (folder / "my.yaml").write_text(CONFIG)
    (folder / "thresholds.yaml").write_text("{memory: 1%, components: {noise: 2%}, time: 10%}\n")
    write_synthetic_ceilings(folder)
    manifest = str(next((folder / PLAN).glob("manifest-*.json")))
    limits = [str(path) for path in (folder / "results" / "ceilings").glob("*.json")]
    output = str(folder / "results" / "tables")
    main(["tables", f"--manifest={manifest}", f"--output-dir={output}", "--ceilings", *limits])
    figures = folder / "results" / "figures"
    figures.mkdir()
    for name in registry.names("figures"):
        drawing = Drawing(name=name, caption=f"Caption of {name}.", missing="it is not drawn")
        (figures / f"{name}.json").write_text(drawing.model_dump_json() + "\n")


def _write_results(root: Path, sizes: dict[str, int]) -> Manifest:
    """Write results of all instruments, an out of memory among them; return what they are of."""
    failed = make_experiment(method="flash")
    runs: list[Any] = [(failed, "clean", {"outcome": "oom", "message": "no room"})]
    for rank, method in enumerate(METHODS, 1):
        recorded = make_held(sizes | {"noise": sizes["noise"] * rank}, "blocks.0")
        odd = {"others_busy_cores": 1.5, "samplers": {"Linear": "x"}} if rank > 1 else {}
        for batch, replicate in ((2, 0), (2, 1), (4, 0), (4, 1)):
            one = make_experiment(method=method, batch_size=batch)
            step_s = (rank * batch, rank * batch + 0.1, rank * batch + 0.2)
            fields = {"replicate": replicate, "step_s": step_s, "nonfinite_samples": rank}
            runs.append((one, "clean", fields | odd))
        phases = {"phases_s": {"forward": [1.0], "backward": [2.0]}, "components": sizes}
        kernels = make_kernels({("forward", "gemm"): 1.0, ("step", "optimizer"): 0.5})
        there = make_experiment(method=method, device="cuda", target="h100")
        runs += [
            (one, "phases", phases | {"peak_allocated_bytes": 1000}),
            (one, "memory", {"recorded": recorded}),
            (one, "kernels", {"kernels": kernels}),
            (there, "estimate", {"recorded": recorded}),
            (there, "capacity", {"recorded": recorded | make_capacity()}),
        ]
    write_synthetic_verdict(root, failed, passed=False, reason="it is wrong", holes=["tied: lost"])
    logs = root / "results" / "logs" / "clean"
    logs.mkdir(parents=True)
    (logs / f"{failed.id}.r0.log").write_text("no room\n")
    return write_runs(root, *runs)


def _write_plan(root: Path, manifest: Manifest) -> None:
    """Write what planning writes of these runs, and their progress."""
    plan = root / PLAN
    for folder in ("specs", "code", "stand-ins"):
        (plan / folder).mkdir(parents=True)
    (root / manifest.path).write_text(manifest.text)
    (root / manifest.due_path).write_text("due\n")
    names = [run_name(run.id, run.instrument, run.replicate) for run in manifest.runs]
    began = {"pid": 1, "host": platform.node(), "at_s": 1e9}
    told = [dict.fromkeys(names, "custom standard"), {"began": None, **began}]
    told += [{"began": names[0], **began}, {names[0]: 1.5}, {"began": names[1], **began}]
    (plan / "progress.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in told))
    for path in (root / "results").glob(f"{RUN.pattern}.json"):
        one = RUN.read(path)
        subject = verified_as(one.experiment), one.experiment.method
        for code in (RUN.code_of(one), code_of_verdict(*subject)):
            (root / code.path).write_text("0" * 64 + "\n")
        spec = canonical_json(one.experiment.model_dump(mode="json"))
        (root / spec_path(one.experiment_id)).write_text(spec + "\n")
    stand_in = StandIn.of(make_experiment(model=HUGGING_FACE))
    assert stand_in is not None
    (root / stand_in_path(stand_in.label)).write_text(stand_in.canonical + "\n")
