"""What each release of Opacus changed: peak memory, FLOPs and bytes moved of every method.

One step of one experiment runs under each release: it is recorded on a CPU, where the peak is the
allocator's to the byte, and predicted for an H100. Nothing in it is timed and all of it is exact,
so whatever differs was changed by the release. pip installs a release into a folder of its own,
without its dependencies, and that folder precedes the environment; torch and everything else stay
the same. Each release is compared with the one before, as by ``dpprof compare --across versions
--metrics memory,flops``.
"""

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from dpprof.ask.commands.common import ending_in_a_sentence
from dpprof.experiments.config import registry
from dpprof.experiments.records.result import result_path
from dpprof.results.analysis.gate.folders import ResultsFolder, read_results_folder
from dpprof.system.console import say
from dpprof.system.files import write_atomically
from release_tables import PLACES, Sweep, tabulate, tell_changes, tell_failures
from script import describe_place, make_parser, publish

RELEASES = ("1.4.1", "1.5", "1.5.1", "1.5.2", "1.5.3", "1.5.4", "1.6.0")
FIELDS: Mapping[str, Any] = {
    "noise_multiplier": 0.5,  # with 1, opacus-adaptive refuses 8 samples
    "cpu_threads": 1,
    "warmup_steps": 1,
    "timed_steps": 1,
}

WHY: Mapping[str, str] = {
    "1.5.2": """\
`torch.einsum` took the place of `opt_einsum.contract` (pull request 663, "Opacus release
v1.5.2"). Here both run the same operators.""",
    "1.5.3": """\
The two-pass methods run from here on. dpprof takes both passes by `DPLossFastGradientClipping`,
which came with pull request 668, "Towards making the interface of ghost clipping same as that of
PyTorch"; adaptive clipping came with 711, "Adaptive Clipping (with Ghost Clipping)".""",
    "1.5.4": """\
Hooks became full backward hooks (pull request 720, "Replace register_backward_hook with
register_full_backward_hook"). A full hook runs when a layer's backward pass is over, so the
gradient of the layer's input is alive while per-sample gradients or norms are computed. At the
peak, in the head, `dpprof explain` finds it: B x T x d values. `opacus-ew` has no hooks.

Ghost clipping's norm of a bias became the root of the sum of a Gram matrix, not of its squares
(pull request 751, "Fix Fast Gradient Clipping bias gradient calculation for three dim data"): one
product less for each bias. Up to 1.5.3 the norms of biases were wrong where samples have several
tokens.""",
    "1.6.0": """\
The loss of a sample is now the sum over its tokens, divided by the number of those that are not
`ignore_index` (issue 792, "Fast gradient clipping ignores masking", and pull request 808 in
Opacus's changelog). It was a mean over all. These B numbers are kept for the backward pass. The
casts for mixed precision (pull request 764, "Support mixed and low precision training") do
nothing in float32. What they cost in bfloat16 is not in these tables.""",
}
"""What of a release explains its figures."""


def install(release: str, folder: Path) -> Path | None:
    """Install a release into a folder, unless it is there; None: the environment has it.

    Raises:
        SystemExit: pip cannot install it.
    """
    if release == importlib.metadata.version("opacus"):
        return None
    packages = folder / "packages"
    if not packages.exists():
        what = ("--no-deps", "--target", packages, f"opacus=={release}")
        run("-m", "pip", "install", "--quiet", *what, environment=os.environ)
    return packages


def run(*arguments: str | Path, environment: Mapping[str, str]) -> None:
    """Run Python; where it fails, it has said why.

    Raises:
        SystemExit: It failed.
    """
    command = [sys.executable, *map(str, arguments)]
    if status := subprocess.run(command, check=False, env=environment).returncode:
        sys.exit(f"{' '.join(command)}: exit status {status}")


def run_release(release: str, folder: Path, sweep: Sweep) -> ResultsFolder:
    """Run all methods under a release; results that are there by the same code are kept.

    Raises:
        SystemExit: A result was made with another release, or pip or dpprof failed.
    """
    packages = install(release, folder)
    paths = [str(packages or ""), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for place in PLACES:
        for method in sweep.methods:
            say(f"Opacus {release}: {method}, {place.title}")
            experiment = sweep.experiment(place, method)
            spec = folder / "specs" / f"{experiment.id}.json"
            write_atomically(spec, experiment.canonical)
            output = result_path(folder, place.instrument, experiment.id, 0)
            options: list[str | Path] = ["--keep", "--instrument", place.instrument, "--spec", spec]
            options += ["--output", output, "--log", output.with_suffix(".log")]
            command = "from dpprof.ask.commands.main import main; main()"
            run("-c", command, "profile", *options, environment=environment)
    found = read_results_folder(folder)
    for (name, _), (result,) in found.runs.items():
        version = result.provenance["packages"]["opacus"]
        if version != release:
            sys.exit(f"{folder}: {name} was run with Opacus {version}, not {release}")
    return found


def write_report(folders: Mapping[str, ResultsFolder], sweep: Sweep) -> Iterator[str]:
    """Write the tables, and what each release changed."""
    size = ", ".join(f"{key} {value}" for key, value in sweep.fields.items())
    yield f"\n{describe_place('torch', 'numpy')}; {size}; float32.\n"
    yield "FLOPs are those of products, elementwise operators and reductions. Bytes moved are what"
    yield "operators read and write at least. Bold: not what it was with the release before, though"
    yield "two decimals may hide by how much."
    yield from tabulate(folders, sweep)
    if failures := list(tell_failures(folders)):
        yield "\nWhat failed; dpprof promises to work with Opacus 1.6 alone:\n"
        yield from failures
    yield "\n## What each release changed\n"
    yield "In bytes and FLOPs. Parts are components of the peak, and op kinds in a phase of the"
    yield "step; those below a quantity sum to its change. On a GPU, what whole blocks take beyond"
    yield "tensors is in all else."
    for (before, one), (after, other) in pairwise(folders.items()):
        yield f"\n### {before} to {after}\n"
        changed, same = tell_changes(one, other, sweep)
        if after in WHY:
            yield f"{WHY[after]}\n"
        for rows, methods in changed.items():
            names = ", ".join(f"`{method}`" for method in methods)
            yield f"| {names} | {' | '.join(place.title for place in PLACES)} |"
            yield "| --- |" + " ---: |" * len(PLACES)
            yield from (f"| {' | '.join(row)} |" for row in rows)
            yield ""
        if same:
            told = ", ".join(f"`{method}`" for method in same)
            yield f"Unchanged to the last byte and FLOP: {told}."


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--releases", default=",".join(RELEASES), help="comma-separated, the oldest first"
    )
    parser.add_argument("--methods", help="comma-separated (default: all of dpprof's)")
    parser.add_argument("--model", default="small")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument(
        "--folder", type=Path, help="keeps releases and results, and continues a run"
    )
    arguments = parser.parse_args()
    own = [name for name in registry.names("methods") if registry.is_own("methods", name)]
    methods = arguments.methods.split(",") if arguments.methods else own
    size = {key: getattr(arguments, key) for key in ("model", "batch_size", "seq_len")}
    sweep = Sweep(methods, {**size, **FIELDS})
    with ending_in_a_sentence(), tempfile.TemporaryDirectory() as temporary:
        root = arguments.folder or Path(temporary)
        folders = {
            release: run_release(release, root / release, sweep)
            for release in arguments.releases.split(",")
        }
        table = "\n".join(write_report(folders, sweep))
    publish((__doc__ or "").rstrip("\n"), table, arguments.output)


if __name__ == "__main__":
    main()
