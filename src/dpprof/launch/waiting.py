"""Waiting for a device: for how long, and how often it is told."""

import math
import os
import re
import time
from collections.abc import Callable
from typing import TypeVar

from dpprof.launch.scheduler import scheduler_job
from dpprof.planning.job_resources import WAIT_UNDER_A_SCHEDULER_S
from dpprof.spec.validation import refuse

T = TypeVar("T")

MAX_WAIT = "DPPROF_MAX_WAIT_S"
"""The environment variable with the longest wait for a device, in seconds."""

_FIRST_S, _RAREST_S = 60.0, 3600.0


def longest_wait_s(stated: str | None = None) -> float:
    """Return how long to wait for a device, in seconds; without a limit it is infinite.

    ``stated``, the value of ``--max-wait-s``, comes before ``DPPROF_MAX_WAIT_S``.

    Raises:
        InputError: The value is no number of seconds; the message names option or variable.
    """
    for key, text in (("--max-wait-s", stated), (MAX_WAIT, os.environ.get(MAX_WAIT))):
        if text:
            if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
                raise refuse(key, text, "it must be a number of seconds from 0, such as 600")
            return float(text)
    return WAIT_UNDER_A_SCHEDULER_S if scheduler_job() else math.inf


def wait_for(
    look: Callable[[], T | None],
    tell: Callable[[float], None],
    *,
    longest_s: float,
    every_s: float,
) -> T | None:
    """Look until something is found and return it; None if ``longest_s`` seconds were not enough.

    ``tell`` is called with the seconds waited so far: at the second look, after 1, 2, 4 ...
    minutes, and then every hour, so that a log of a night says what is waited for.
    """
    start_s, due_s = time.monotonic(), every_s
    while (found := look()) is None:
        waited_s = time.monotonic() - start_s
        if waited_s >= longest_s:
            return None
        if waited_s >= due_s:
            tell(waited_s)
            due_s = max(_FIRST_S, min(2 * due_s, due_s + _RAREST_S))
        time.sleep(min(every_s, longest_s - waited_s))
    return found
