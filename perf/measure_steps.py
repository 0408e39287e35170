"""Adds whole steps that were measured on a GPU to evidence.csv.

    snakemake --configfile perf/measure_steps.yaml
    python perf/measure_steps.py results/clean

A row of the same GPU and experiment goes.
"""

import argparse
import csv
from pathlib import Path

from dpprof.ask.measured import list_rows
from dpprof.experiments.config import registry
from dpprof.experiments.config.datasheets import find_by_device_name
from dpprof.experiments.records.result import Result, read_result
from evidence import DATA


def collect(folder: Path) -> None:
    """Add the results of a folder to the rows."""
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for path in sorted(folder.rglob("*.json")):
        result = read_result(path)
        if result.outcome == "ok" and result.instrument == "clean":
            rows = _replace(rows, result)
    with DATA.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _replace(rows: list[dict[str, str]], result: Result) -> list[dict[str, str]]:
    """Return the rows with those of a result in place of others of its experiment."""
    assert result.memory is not None
    assert result.time is not None
    gpu = result.device["name"]
    target = find_by_device_name(gpu)
    numbers = [int(row["id"].rpartition("-")[2]) for row in rows if row["source"] == "measured"]
    versions = f"driver {result.device['driver']}, torch {result.provenance['packages']['torch']}"
    values = {
        ("step time", "s"): result.time.median_s,
        ("peak memory", "bytes"): result.memory.peak_allocated_bytes,
        ("reserved memory", "bytes"): result.memory.peak_reserved_bytes,
        ("energy", "J"): result.energy and result.energy.joules_per_step,
    }
    new = list_rows(
        result.experiment,
        values,
        id=f"measured-{max(numbers) + 1:03d}",
        source="measured",
        gpu=gpu,
        target=next(n for n in registry.names("targets") if registry.load("targets", n) == target),
        read_from=f"dpprof profile, {result.started_at}, {versions}",
    )
    same = ("source", "gpu", "target", "model", "method", "settings")
    return [row for row in rows if any(row[name] != new[0][name] for name in same)] + new


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a folder of results to add to the rows")
    collect(parser.parse_args().folder)


if __name__ == "__main__":
    main()
