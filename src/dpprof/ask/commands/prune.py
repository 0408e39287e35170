"""List files in results/ that none of the given configs asks for; --delete deletes them."""

import sys
from collections.abc import Sequence
from pathlib import Path

from dpprof.ask.commands.common import Parser, ending_in_a_sentence, path
from dpprof.experiments.config.config_files import read_config_file
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.planning.planner import Plan, files_beyond, make_plan


def plan_of(config: Path) -> Plan:
    """Plan a config, and name its file where it cannot be meant."""
    raw = read_config_file(config)
    try:
        return make_plan({} if raw is None else raw)
    except InputError as error:
        raise InputError(f"{config}: {error}") from None


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = Parser("prune", __doc__)
    parser.add_argument(
        "configs",
        nargs="*",
        type=path,
        help="configs whose results to keep (default, for listing: config/config.yaml)",
    )
    parser.add_argument(
        "--delete", action="store_true", help="delete instead of listing; needs configs by name"
    )
    arguments = parser.parse_args(argv)
    if arguments.delete and not arguments.configs:
        parser.error("--delete: name every config whose results to keep")
    configs = arguments.configs or [Path("config/config.yaml")]
    if not arguments.configs and not configs[0].exists():
        parser.error(f"{configs[0]} is not here; name the configs whose results to keep")
    with ending_in_a_sentence():
        beyond = files_beyond(Path(), [plan_of(config) for config in configs])
        for file in beyond:
            print(file)
            if arguments.delete:
                file.unlink()
    done = "deleted" if arguments.delete else "would be deleted; add --delete to do it"
    print(f"{len(beyond)} files {done}", file=sys.stderr)
