"""Checks the config files that ``snakemake`` was given, before Snakemake loads them.

Snakemake first reads the workflow's profile, ``profiles/default``, and executes what it declares.
Only this profile comes before ``--configfile``.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dpprof.spec.config_files import read_config_file
from dpprof.spec.validation import InputError


def refuse_config_files(arguments: Sequence[str]) -> None:
    """End the process with an error message if a config file must not be loaded.

    ``arguments`` is Snakemake's command line, which its own parser has accepted.
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
    parser.add_argument(
        "--config", "-C", nargs="*"
    )  # otherwise argparse would read it as --configfile abbreviated
    found: list[Path] = parser.parse_known_args(arguments)[0].configfile
    return found
