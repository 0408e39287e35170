"""Says what a sweep is about to do, and about how long each part takes, before it begins."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dpprof.launch.progress import format_duration


class Part(NamedTuple):
    """A part of a sweep: jobs of one kind."""

    one: str
    many: str
    seconds: float
    """Of one job, with a small model on a common processor."""

    alone: bool
    """Whether nothing runs beside such a job."""


PARTS = {
    "ceilings": Part("device's ceilings", "devices' ceilings", 45, alone=True),
    "measurement": Part("measurement", "measurements", 8, alone=True),
    "prediction": Part("prediction", "predictions", 8, alone=False),
    "verify": Part("verification", "verifications", 6, alone=False),
    "tables": Part("set of tables", "sets of tables", 4, alone=True),
    "figure": Part("figure", "figures", 3, alone=False),
    "report": Part("report", "reports", 12, alone=True),
}
"""In the order in which most of them run."""


def tell_to_do(jobs: Mapping[str, int], cores: int) -> Iterator[str]:
    """Say how many jobs of each part there are, and about how long they take.

    Args:
        jobs: Number of jobs by part; parts that are not in ``PARTS`` are not spoken of.
        cores: On how many cores jobs share that may run beside one another.

    Example:
        >>> for line in tell_to_do({"verify": 4, "report": 1}, cores=2):
        ...     print(line)
        to do, about 24 s with small models on a processor:
          4 verifications, about 12 s
          1 report, about 12 s
    """
    seconds = {
        name: part.seconds * (jobs[name] if part.alone else math.ceil(jobs[name] / cores))
        for name, part in PARTS.items()
        if jobs.get(name)
    }
    if not seconds:
        return
    yield f"to do, about {format_duration(sum(seconds.values()))} with small models on a processor:"
    for name, taken in seconds.items():
        what = PARTS[name].one if jobs[name] == 1 else PARTS[name].many
        yield f"  {jobs[name]} {what}, about {format_duration(taken)}"
