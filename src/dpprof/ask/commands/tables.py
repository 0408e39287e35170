"""Read the results that a manifest lists and write tidy CSV tables."""

from collections.abc import Sequence
from pathlib import Path

from dpprof.ask.commands.common import Parser, ending_in_a_sentence, path
from dpprof.experiments.accounting.plan import momentum_of
from dpprof.experiments.config.refusals import INDEPENDENT
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.launch.accounting_run import account_mechanisms_once, account_once
from dpprof.experiments.planning.artifacts import RESULTS
from dpprof.experiments.planning.planner import Manifest, read_manifest
from dpprof.experiments.records.result import drop_copies
from dpprof.results.analysis.advice.budget import Planned
from dpprof.results.analysis.collection import Collected, collect
from dpprof.results.analysis.tables.build import begin_timeline, build_tables
from dpprof.results.analysis.tables.columns import TABLES
from dpprof.results.analysis.tables.frames import write_frame, write_sums
from dpprof.system.console import say
from dpprof.system.files import open_atomically, write_atomically


def _plan_noise(manifest: Manifest, collected: Collected, root: Path) -> Planned | None:
    """Compute the noise for the manifest's privacy budget; None where it has none."""
    if manifest.privacy is None:
        return None
    asked = [result.experiment for _, result in collected.runs if result.instrument == "capacity"]
    lengths = sorted({experiment.tokens_per_sample for experiment in asked})
    if not lengths:
        return None
    correlated: dict[tuple[float, float], dict[str, None]] = {}
    for each in asked:
        if each.noise_strategy != INDEPENDENT:
            key = each.tokens_per_sample, momentum_of(each.optimizer)
            correlated.setdefault(key, {})[each.noise_strategy] = None
    try:
        plans = dict(zip(lengths, account_once(root, manifest.privacy, lengths), strict=True))
        mechanisms = {
            (tokens, momentum, noise.mechanism): noise
            for (tokens, momentum), names in correlated.items()
            if plans[tokens].planned.step_noise
            for noise in account_mechanisms_once(
                *(root, manifest.privacy, plans[tokens].planned, list(names)), momentum=momentum
            )
        }
    except InputError as error:
        return Planned(manifest.privacy, reason=str(error))
    return Planned(manifest.privacy, plans, mechanisms=mechanisms)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = Parser("tables", __doc__)
    parser.add_argument("--manifest", type=path, required=True, help="the list of runs to tabulate")
    parser.add_argument("--output-dir", type=path, required=True, help="where the tables go")
    parser.add_argument(
        "--root", type=path, help="the folder that holds results (default: that of the manifest)"
    )
    parser.add_argument(
        "--ceilings", type=path, nargs="*", default=[], help="ceilings of devices to tabulate"
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="list missing and damaged results, and leave them out",
    )
    arguments = parser.parse_and_log(argv, "what is printed")
    with ending_in_a_sentence():
        manifest = read_manifest(arguments.manifest)
        # The manifest lies in results/plan, beside the results that it lists. Links are not
        # followed: results may be one, to a folder of another name.
        planned_in = arguments.manifest.absolute().parents[2]
        root = arguments.root or planned_in
        with open_atomically(arguments.output_dir / "timeline.csv") as file:
            collected = collect(
                manifest,
                root,
                planned_in=planned_in,
                partial=arguments.partial,
                ceilings=arguments.ceilings,
                on_result=begin_timeline(file),
            )
        for error in collected.damaged:
            say(f"{error}; it is left out, since the report is partial")
        planned = _plan_noise(manifest, collected, root)
        tables = build_tables(collected, planned)
        del tables["timeline"]  # it is written already
        for name, table in tables.items():
            write_atomically(arguments.output_dir / f"{name}.csv", write_frame(name, table))
        write_sums(arguments.output_dir, [f"{name}.csv" for name in TABLES])
        write_atomically(arguments.output_dir / "manifest.txt", f"{arguments.manifest.name}\n")
        drop_copies(root / RESULTS)
