"""Say how large a batch fits on a GPU that need not be here, for every method."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dpprof.cli.capacities import add_capacity_options, find_capacities, read_capacity_options
from dpprof.cli.common import Parser, ending_in_a_sentence
from dpprof.launch.progress import tell_result
from dpprof.records.result import Result
from dpprof.system.console import printable
from dpprof.system.files import check_writable, write_atomically

_MIB = 2**20


def make_parser() -> Parser:
    """Make the options: the methods, then one for every other field of an experiment."""
    parser = Parser(
        prog="dpprof capacity",
        description=__doc__,
        epilog="example: dpprof capacity --model 1b --target h200 "
        "--seq-len 1024. --memory-limit-bytes replaces the target's memory.",
    )
    add_capacity_options(parser)
    return parser


def describe(result: Result) -> dict[str, object]:
    """Spell what was found for a method, for programs."""
    message = result.error.message if result.error else None
    found = result.capacity.model_dump(mode="json") if result.capacity else None
    method, outcome = result.experiment.method, result.outcome
    return {"method": method, "outcome": outcome, "message": message, "capacity": found}


def tabulate(results: list[Result]) -> str:
    """Lay out what was found, for people."""
    width = max(len(result.experiment.method) for result in results)
    lines = [f"{'method':{width}}  largest batch  predicted peak  safe batch"]
    for result in results:
        capacity, method = result.capacity, result.experiment.method
        if capacity is None:
            why = result.error.message if result.error else "no reason is known"
            lines.append(f"{method:{width}}  {result.outcome}: {why}")
            continue
        largest = f"{capacity.batch_size:,}" + ("+" if capacity.limited_by == "search" else "")
        safe = "none" if capacity.safe_batch_size is None else f"{capacity.safe_batch_size:,}"
        peak = f"{capacity.peak_bytes / _MIB:,.0f} MiB"
        lines.append(f"{method:{width}}  {largest:>13}  {peak:>14}  {safe:>10}")
    budgets = {r.capacity.budget_bytes for r in results if r.capacity}
    lines += [f"memory: {budget / _MIB:,.0f} MiB; safe leaves a tenth of it" for budget in budgets]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    arguments = make_parser().parse_args(argv)
    with ending_in_a_sentence():
        experiments = read_capacity_options(arguments)
        if arguments.json is not None:
            check_writable(arguments.json)
        results = find_capacities(experiments, Path(), again=arguments.again, tell=tell_result)
        if arguments.json is not None:
            text = json.dumps([describe(result) for result in results], indent=1)
            write_atomically(arguments.json, text + "\n")
    print(printable(tabulate(results)))
    sys.exit(0 if any(result.capacity for result in results) else 1)
