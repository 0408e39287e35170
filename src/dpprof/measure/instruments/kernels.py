"""Instrument ``kernels``: the time of a step by kernel, from a trace.

``torch.profiler`` traces a few steps after warm-up: on CUDA every kernel and its launch, on a CPU
every operator. It records neither shapes nor stacks, because for these it keeps tensors alive. The
times include the profiler's own cost, which the report states.
"""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.launch.worker_report import traces_folder
from dpprof.experiments.records.result import Kernels, Measurement, Observed
from dpprof.measure.devices.device import Device
from dpprof.measure.instruments.opening import open_experiment, peak_rss_bytes
from dpprof.measure.traces import trace_files
from dpprof.measure.traces.kernel_summary import NoKernelsError, state_kernels
from dpprof.private.norms.code_paths import CodePath, finds_norms
from dpprof.subjects.methods.training_step import Enter
from dpprof.subjects.setup import Training, set_up
from dpprof.system.console import say

TRACED_STEPS = 3
"""The most steps that are traced; a longer trace is larger without more information."""

_ELSEWHERE = "it would include the tracer; the instrument clean measures it"
_NOT_LAUNCHED = {"kernels.waiting_s": "operators of a CPU are not launched ahead"}
_REASONS = {"time": _ELSEWHERE, "throughput": _ELSEWHERE, "memory": _ELSEWHERE}


def _annotate(
    _layer: nn.Module, path: CodePath, sampler: Callable[..., Any], inputs: tuple[Any, ...]
) -> Any:
    if not finds_norms(path):
        return sampler(*inputs)
    with record_function(trace_files.NORMS):
        return sampler(*inputs)


def measure(experiment: Experiment, enter: Enter) -> Measurement:
    """Trace one experiment in this process."""
    method, device = open_experiment(experiment)
    training = set_up(experiment, method, device.torch_device, lambda *_: None)
    for _ in range(experiment.warmup_steps):
        training.step.run(training.batch, enter)
    device.synchronize()
    device.reset_peaks()
    steps = min(TRACED_STEPS, experiment.timed_steps)
    document = _trace(training, device, enter, steps)
    peak_bytes, allocated = peak_rss_bytes(), device.peaks().allocated_bytes
    trace, on_cuda = trace_files.read_trace(document), device.torch_device.type == "cuda"
    folder = traces_folder()
    written, why_no_trace = _leave_trace(folder, document)
    kernels, why_no_kernels = None, {}
    try:
        kernels = Kernels(
            **state_kernels(trace, on_cuda=on_cuda),
            trace=str(folder / trace_files.TRACE_NAME) if folder and written else None,
            trace_bytes=written and written.bytes,
            trace_steps=written.steps if written else 0,
        )
    except NoKernelsError as error:
        why_no_kernels = {"kernels": str(error)}
    if folder and kernels:
        try:
            trace_files.write_events(folder, kernels)
        except (OSError, ImportError) as error:
            say(f"TensorBoard's events could not be written: {error}")
    traced = trace_files.find_steps(trace)
    why_no_waiting = _NOT_LAUNCHED if kernels and kernels.waiting_s is None else {}
    return Measurement(
        model=training.model,
        norm_plan=training.step.norm_plan,
        nonfinite_samples=training.step.nonfinite_samples,
        kernels=kernels,
        observed=Observed(
            step_s=sum(end - start for start, end in traced) / len(traced),
            steps=len(traced),
            peak_rss_bytes=peak_bytes,
            peak_allocated_bytes=allocated,
        ),
        reasons=_REASONS | training.step.reasons | why_no_trace | why_no_kernels | why_no_waiting,
    )


def _trace(training: Training, device: Device, enter: Enter, steps: int) -> dict[str, Any]:
    """Trace some steps after a discarded one, in which the tracer warms up."""
    on_cuda = device.torch_device.type == "cuda"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        # The tracer warns that it clears its event list, which is slow to build and not used here.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        with profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])],
            schedule=schedule(wait=0, warmup=1, active=steps),
            on_trace_ready=lambda tracer: tracer.export_chrome_trace(str(path)),
        ) as tracer:
            for _ in range(1 + steps):
                with record_function(trace_files.STEP), training.step.watch_samplers(_annotate):
                    training.run_phases(
                        enter, lambda phase: record_function(f"{trace_files.PHASE}{phase}")
                    )
                    device.synchronize()
                tracer.step()
        return trace_files.parse_trace(path.read_bytes())


def _leave_trace(
    folder: Path | None, document: dict[str, Any]
) -> tuple[trace_files.Written | None, dict[str, str]]:
    """Write the trace, or return why there is none; a missing file does not fail the run."""
    if folder is None:
        return None, {"kernels.trace": "no folder was given for it"}
    try:
        written = trace_files.write_trace(folder, document)
    except OSError as error:
        return None, {"kernels.trace": f"it could not be written: {error}"}
    too_large = {
        "kernels.trace": f"one step alone takes more than {trace_files.TRACE_LIMIT_BYTES:,} bytes"
    }
    return written, {} if written else too_large
