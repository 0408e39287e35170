"""A look at the config files that ``snakemake`` was given, before Snakemake loads them.

Snakemake reads the workflow's profile, ``profiles/default``, before anything else, and executes
what is declared there; that is the only place that comes before ``--configfile``.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dpprof.spec.config_files import read_config_file
from dpprof.spec.validation import InputError


def refuse_config_files(arguments: Sequence[str]) -> None:
    """End the process with a sentence where a config file must not be loaded.

    Args:
        arguments: Snakemake's command line, which its own parser has accepted.
    """
    for path in _config_files(arguments):
        try:
            read_config_file(path)
        except (InputError, OSError) as error:
            sys.exit(f"error: {error}")


def _config_files(arguments: Sequence[str]) -> list[Path]:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--configfile", "--configfiles", nargs="+", action="extend", default=[], type=Path
    )
    parser.add_argument("--config", "-C", nargs="*")  # or it would be taken for the other's stem
    found: list[Path] = parser.parse_known_args(arguments)[0].configfile
    return found
