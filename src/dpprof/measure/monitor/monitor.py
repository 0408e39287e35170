"""Monitors a training loop: which steps are profiled, which are timed, and what is written.

    steps     0         1  2  ...  99    100       101  102  ...
              profiled  timed            profiled  timed
    written                              measured  carried

Counting the FLOPs of a profiled step makes it slow, so it is not timed. The timer runs from the end
of a profiled step to the start of the next, and waits for the device only then. The first step, in
which libraries warm up and code is compiled, is never timed.
"""

import math
import operator
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dpprof.experiments.config.datasheets import find_by_device_name
from dpprof.experiments.config.target import DTYPES, Dtype
from dpprof.experiments.config.validation import one_of, refuse
from dpprof.measure.monitor.metrics import METRIC_NAMES, Metrics, Quantity, derive_metrics
from dpprof.measure.monitor.sinks import Sink
from dpprof.predict.flops.counter import FlopCounter
from dpprof.private.number_formats import KEPT_LOGITS

_NOTABLE = 2**20
"""Logits of fewer bytes are not worth a warning."""


class LogitsWatch(FlopCounter):  # type: ignore[no-untyped-call]
    """Counts FLOPs, and follows what the head of a model computed: the logits of a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self._products: dict[int, tuple[StorageWeakRef, int]] = {}
        self._logits: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; logits are the last product as wide as what a softmax gets."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = getattr(func, "_opname", "")
        if name in ("mm", "addmm", "bmm") and isinstance(out, Tensor):
            storage = out.untyped_storage()
            ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._products[out.shape[-1]] = ref, storage.nbytes()
        elif name == "_log_softmax" and args[0].shape[-1] in self._products:
            ref, nbytes = self._products[args[0].shape[-1]]
            self._logits[ref] = nbytes
        return out

    def tell_held(self) -> str | None:
        """Return a sentence where logits are held still; None where they are free, or small."""
        held = 0
        for ref, nbytes in self._logits.items():
            held += 0 if ref.expired() else nbytes  # type: ignore[no-untyped-call]
        return f"{held / 2**20:,.0f} MiB of {KEPT_LOGITS}" if held >= _NOTABLE else None


class Monitor:
    """Measures a training loop, and writes metrics to sinks at every step.

    Where a loop still holds logits as a profiled step ends, the monitor warns once, with their size
    and what to write instead. If a sink raises an exception, the monitor warns once and stops
    writing to it; training goes on.

    Args:
        flops_profile_freq: Profile one of this many steps, beginning with the first.
        model_flops_per_token: FLOPs of the non-private step for each token, for MFU;
            ``dpprof.measure.monitor.model_flops_per_token`` computes them for a transformer.
        peak_flops_per_s: Dense peak of this process's device; by default that of the current CUDA
            device's data sheet, for ``dtype``.
        dtype: Dtype of matrix products: ``float32``, ``tf32``, ``bfloat16``, ``float16`` or
            ``float64``.
        sinks: Where metrics are written; without any they are only in ``metrics``.
        first_step: The number of the first step, if training is resumed.
        clock: Returns increasing seconds.

    Raises:
        ValueError: An argument is not allowed.

    Example:
        >>> from dpprof.measure.monitor import Monitor
        >>> monitor = Monitor(flops_profile_freq=10)
        >>> monitor.metrics is None  # before the first step
        True
    """

    metrics: Metrics | None
    """The last measurement; None before the first."""

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
        self._model = _check_flops("model_flops_per_token", model_flops_per_token) or Quantity(
            None, "model_flops_per_token was not given"
        )
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
        self._window: Counter[str] | None = None
        self._warned = self._told_of_logits = False
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
            return dict.fromkeys(METRIC_NAMES, f"nothing is measured before step {least}")
        return dict(self.metrics.reasons)

    @contextmanager
    def step(self, *, samples: int, tokens: int) -> Iterator[None]:
        """Watch one optimizer step, with all its forward and backward passes.

        If it raises an exception, the steps that are timed together with it are not measured.

        Args:
            samples: Samples of this process in this step; a Poisson batch may have none.
            tokens: Their tokens, or other units that ``model_flops_per_token`` counts.
        """
        samples = _check_count("samples", samples, least=0)
        tokens = _check_count("tokens", tokens, least=0)
        number = self._next
        self._next += 1
        counter = LogitsWatch() if (number - self._first) % self._freq == 0 else None
        try:
            elapsed_s = self._lap() if counter else 0.0
            with counter or nullcontext():
                yield
            if counter:
                held = None if self._told_of_logits else counter.tell_held()
                if held is not None:  # the loop needs as much more memory
                    self._told_of_logits = True
                    warnings.warn(held, stacklevel=3)
                self._measure(number, counter, elapsed_s, samples, tokens)
            elif self._window is not None:
                self._window.update(steps=1, samples=samples, tokens=tokens)
        except BaseException:
            self._window = None
            raise
        self._write(number)

    def close(self) -> None:
        """Close the sinks that have a ``close``; later steps are measured but not written."""
        for sink in self._sinks:
            try:
                getattr(sink, "close", lambda: None)()
            except Exception as error:  # noqa: BLE001 (as in _write)
                warnings.warn(f"{sink!r} did not close: {error!r}", stacklevel=2)
        self._sinks.clear()

    def _measure(
        self, number: int, counter: FlopCounter, elapsed_s: float, samples: int, tokens: int
    ) -> None:
        """Derive metrics of the steps that were timed up to a profiled one; begin to time others.

        ``elapsed_s`` is how long they took. At a frequency of 1 the profiled step is timed too.
        """
        within_s = self._lap()
        always = self._freq == 1
        if self._window is not None:
            if always:
                self._window.update(steps=1, samples=samples, tokens=tokens)
                elapsed_s += within_s
            self.metrics = derive_metrics(
                self._window,
                elapsed_s,
                model=self._model,
                executed=_find_executed(counter, tokens),
                peak=self._peak or find_datasheet_peak(self._dtype),
                step=number,
                includes_profiling=always,
            )
        self._window = Counter()

    def _lap(self) -> float:
        """Wait for the device, and return the seconds since the last call."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        before_s, self._lap_s = self._lap_s, self._clock()
        return self._lap_s - before_s

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
            except Exception as error:  # noqa: BLE001 (of any library, such as on a full disk)
                self._sinks.remove(sink)
                text = f"{sink!r} failed at step {number} and gets no more metrics: {error!r}"
                warnings.warn(text, stacklevel=2)


def _find_executed(counter: FlopCounter, tokens: int) -> Quantity:
    if counter.unpriced is not None:
        return Quantity(None, f"executed FLOPs are unknown: {counter.unpriced}")
    if tokens == 0:
        return Quantity(None, "the profiled step had no tokens")
    if counter.flops == 0:  # the dispatcher does not see CUDA graphs
        return Quantity(None, "the profiled step ran no matrix product")
    return Quantity(counter.flops / tokens)


def find_datasheet_peak(dtype: Dtype | None) -> Quantity:
    """Look up the current CUDA device in the data sheets; dense FLOP/s.

    There is no default dtype, as the peaks of a device differ by up to fifteen times.
    """
    missing = "peak_flops_per_s was not given, and "
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return Quantity(None, missing + "a CPU has no data sheet")
    name = torch.cuda.get_device_name()
    target = find_by_device_name(name)
    if target is None:
        return Quantity(None, missing + f"there is no data sheet of {name}")
    if dtype is None:
        return Quantity(None, missing + "neither was dtype")
    peak = target.peak(dtype)
    return Quantity(peak, "" if peak else missing + f"the data sheet of {name} lacks {dtype}")


def _check_count(name: str, value: Any, *, least: int) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if count < least or isinstance(value, bool):
        raise refuse(name, value, f"it must be a whole number of at least {least}")
    return count


def _check_flops(name: str, value: Any) -> Quantity | None:
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value > 0):
        raise refuse(name, value, "it must be a number above 0, or None if it is unknown")
    return Quantity(value)
