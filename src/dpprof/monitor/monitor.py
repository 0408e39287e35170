"""A training loop's monitor: which steps are profiled, which are timed, and what is written.

    steps     0         1  2  ...  99    100       101  102  ...
              profiled  timed            profiled  timed
    written                              measured  carried

A profiled step has its FLOPs counted, which makes it slow, so its time says nothing. Time is taken
from the end of a profiled step to the start of the next, and the device is waited for at these two
ends alone. The first step, in which libraries warm up and code is compiled, is never timed.
"""

import math
import operator
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch

from dpprof.flops.counter import Counter
from dpprof.monitor.metrics import NAMES, Figure, Metrics, Window, Work, derive_metrics
from dpprof.monitor.peak import find_peak
from dpprof.monitor.sinks import Sink
from dpprof.spec.target import DTYPES, Dtype
from dpprof.spec.validation import one_of, refuse


class Monitor:
    """Measures a training loop, and writes what it found to sinks, at every step.

    A sink that raises an exception is warned of once and written to no more; the training goes on.

    Args:
        flops_profile_freq: Of so many steps one is profiled, the first step of all included.
        model_flops_per_token: FLOPs of the non-private step for each token, for MFU;
            ``dpprof.monitor.model_flops_per_token`` has them for a transformer.
        peak_flops_per_s: What the device of this process can do, dense. Where it is not given, it
            is taken from the data sheet of the current CUDA device, for ``dtype``.
        dtype: In what products of matrices are computed: ``float32``, ``tf32``, ``bfloat16``
            (float16 has the same peak) or ``float64``.
        sinks: Where metrics go; without any they are in ``metrics`` alone.
        first_step: The number of the first step, where a training is resumed.
        clock: Seconds since any moment; they must increase.

    Raises:
        ValueError: An argument is not allowed.

    Example:
        >>> from dpprof.monitor import Monitor
        >>> monitor = Monitor(flops_profile_freq=10)
        >>> monitor.metrics is None  # before the first step
        True
    """

    metrics: Metrics | None
    """What was measured last; None before anything was."""

    def __init__(
        self,
        *,
        flops_profile_freq: int = 100,
        model_flops_per_token: float | None = None,
        peak_flops_per_s: float | None = None,
        dtype: Dtype | None = None,
        sinks: Sequence[Sink] = (),
        first_step: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._freq = _check_count("flops_profile_freq", flops_profile_freq, least=1)
        self._model = _check_flops("model_flops_per_token", model_flops_per_token)
        self._peak = _check_flops("peak_flops_per_s", peak_flops_per_s)
        if dtype is not None and dtype not in DTYPES:
            raise refuse("dtype", dtype, one_of(DTYPES, dtype))
        for sink in sinks:
            if not callable(sink):
                raise refuse("sinks", sink, "each must be callable with a step and its values")
        self._dtype = dtype
        self._sinks = list(sinks)
        self._first = self._next = _check_count("first_step", first_step, least=0)
        self._clock = clock
        self._lap_s = 0.0
        self._window: Window | None = None
        self._warned = False
        self.metrics = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def reasons(self) -> dict[str, str]:
        """Why a metric is not written, by its name."""
        if self.metrics is None:
            least = self._first + self._freq
            return dict.fromkeys(NAMES, f"nothing is measured before step {least}")
        return dict(self.metrics.reasons)

    @contextmanager
    def step(self, *, samples: int, tokens: int) -> Iterator[None]:
        """Watch one step: the optimizer's, with all forward and backward passes that go with it.

        A step that raises an exception says nothing of how long steps take: the steps that
        would have been timed with it are not measured.

        Args:
            samples: Samples that this process trains on in this step; a Poisson batch may have
                none.
            tokens: Their tokens. Where there are no tokens, whatever unit
                ``model_flops_per_token`` is about.
        """
        samples = _check_count("samples", samples, least=0)
        tokens = _check_count("tokens", tokens, least=0)
        number = self._next
        self._next += 1
        profiled = (number - self._first) % self._freq == 0
        watch = self._profile if profiled else self._time
        try:
            yield from watch(number, samples, tokens)
        except BaseException:
            self._window = None
            raise
        self._write(number)

    def close(self) -> None:
        """Close the sinks that have a ``close``; further steps are measured, and not written."""
        for sink in self._sinks:
            try:
                getattr(sink, "close", _do_nothing)()
            except Exception as error:  # noqa: BLE001 (as in _write)
                warnings.warn(f"{sink!r} did not close: {error!r}", stacklevel=2)
        self._sinks.clear()

    def _time(self, _number: int, samples: int, tokens: int) -> Iterator[None]:
        yield
        if self._window is not None:
            self._window.add(samples, tokens)

    def _profile(self, number: int, samples: int, tokens: int) -> Iterator[None]:
        elapsed_s = self._lap()
        counter = Counter()
        with counter:
            yield
        within_s = self._lap()
        always = self._freq == 1
        if self._window is not None:
            if always:
                self._window.add(samples, tokens)
                elapsed_s += within_s
            self.metrics = derive_metrics(
                self._window,
                elapsed_s,
                self._tell_work(counter, tokens),
                step=number,
                includes_profiling=always,
            )
        self._window = Window()

    def _lap(self) -> float:
        """Wait for the device; return the seconds since this was last called."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        before_s, self._lap_s = self._lap_s, self._clock()
        return self._lap_s - before_s

    def _tell_work(self, counter: Counter, tokens: int) -> Work:
        model, peak = Figure(self._model), Figure(self._peak)
        if self._model is None:
            model = Figure(None, "model_flops_per_token was not given")
        if self._peak is None:
            peak = find_peak(self._dtype)
        return Work(model, _find_executed(counter, tokens), peak)

    def _write(self, number: int) -> None:
        metrics = self.metrics
        if metrics is None:
            return
        if metrics.measured_at_step != number and not metrics.carried:
            metrics = self.metrics = replace(metrics, carried=True)
        if metrics.beyond_peak and not self._warned:
            self._warned = True
            warnings.warn(
                f"MFU {metrics.mfu}, HFU {metrics.hfu} at step {number}: no device exceeds its "
                "peak; check peak_flops_per_s, dtype, model_flops_per_token and tokens",
                stacklevel=2,
            )
        for sink in tuple(self._sinks):
            try:
                sink(number, dict(metrics.scalars))
            except Exception as error:  # noqa: BLE001 (whatever a library raises on a full disk)
                self._sinks.remove(sink)
                text = f"{sink!r} failed at step {number} and is written to no more: {error!r}"
                warnings.warn(text, stacklevel=2)


def _find_executed(counter: Counter, tokens: int) -> Figure:
    """Return the executed FLOPs of a token."""
    if counter.unpriced is not None:
        return Figure(None, f"executed FLOPs are not known: {counter.unpriced}")
    if tokens == 0:
        return Figure(None, "the profiled step had no tokens")
    if counter.flops == 0:  # CUDA graphs are replayed past the dispatcher
        return Figure(None, "the profiled step showed no product of matrices")
    return Figure(counter.flops / tokens)


def _do_nothing() -> None:
    pass


def _check_count(name: str, value: Any, *, least: int) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if count < least or isinstance(value, bool):
        raise refuse(name, value, f"it must be a whole number of at least {least}")
    return count


def _check_flops(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse(name, value, "it must be a number above 0, or None where it is not known")
    if not (math.isfinite(value) and value > 0):
        raise refuse(name, value, "it must be a number above 0, or None where it is not known")
    return value
