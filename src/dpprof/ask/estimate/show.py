"""What `dpprof estimate` says, as text."""

from dpprof.experiments.config.tasks import name_size
from dpprof.experiments.records.result import Result
from dpprof.experiments.records.step_costs import Allocator, find_unknown_workspaces

_GIB, _MOST = 2**30, 8


def format_estimate(result: Result) -> str:
    """Return a prediction as text.

    Args:
        result: A result of the instrument ``estimate``, with outcome ``ok``.
    """
    experiment, memory, compute = result.experiment, result.memory, result.compute
    assert memory is not None
    assert memory.at_peak is not None
    assert memory.peak_allocated_bytes is not None
    peak = memory.at_peak
    lines = [f"peak    {memory.peak_allocated_bytes / _GIB:.2f} GiB allocated, in {peak.phase}"]
    owned = sorted(peak.components.items(), key=lambda part: part[1], reverse=True)
    lines += [
        f"        {size / _GIB:8.2f} GiB  {name.replace('_', ' ')}"
        for name, size in owned[:_MOST]
        if size >= memory.peak_allocated_bytes / 1000
    ]
    if memory.allocator is not None:
        lines += _format_allocator(memory.allocator)
    told = (memory.assumed.get(key) for key in (experiment.dtype, "logits"))
    lines += [f"        {text}" for text in told if text]
    by_reason: dict[str, list[str]] = {}
    for op, why in find_unknown_workspaces(memory.assumed).items():
        by_reason.setdefault(why, []).append(op)
    lines += [f"        workspace of {', '.join(ops)}: {why}" for why, ops in by_reason.items()]
    if compute is not None:
        times = compute.dp_flop_multiplier
        over = "" if times is None else f", {times:.2f} times what the model needs"
        lines.append(f"FLOPs   {compute.executed_flops / 1e12:.2f} TFLOP a step{over}")
        if result.io is not None and result.io.launches is not None:
            lines.append(f"        in {result.io.launches:,} operators that start a kernel")
        if compute.roofline_step_s is not None:
            bound = f"at least {compute.roofline_step_s * 1e3:,.1f} ms by the roofline"
            step = result.time and result.time.predicted_step_s
            if step:
                interval = f"{step.low * 1e3:,.1f} to {step.high * 1e3:,.1f}"
                bound = f"{step.median * 1e3:,.1f} ms a step (90 % interval {interval}); {bound}"
            lines.append(f"time    {bound}")
    lines += _format_exchange(result)
    size = name_size(experiment.seq_len, experiment.image_size)
    where = f"{experiment.batch_size:,} x {size}, {experiment.dtype}"
    if experiment.parallel is not None:
        where += f", {experiment.parallel.text}; all of this is rank 0's"
    return "\n".join([f"{experiment.method}, {where}", *lines])


def _format_exchange(result: Result) -> list[str]:
    """Return the bytes that one of several ranks sends, by collective."""
    sent: dict[str, int] = {}
    for exchange in result.communication or []:
        sent[exchange.collective] = sent.get(exchange.collective, 0) + exchange.bytes_each_way
    total = sum(sent.values()) / _GIB
    lines = [f"sends   {total:.2f} GiB a step, and receives as much"] if sent else []
    return lines + [f"        {size / _GIB:8.2f} GiB  {name}" for name, size in sent.items()]


def _format_allocator(allocator: Allocator) -> list[str]:
    reserved, expandable = allocator.reserved_bytes, allocator.expandable_reserved_bytes
    otherwise = f"{expandable / _GIB:.2f} with expandable_segments:True"
    lines = [f"        {reserved / _GIB:.2f} GiB reserved by the caching allocator; {otherwise}"]
    if allocator.limit_bytes is not None and reserved > allocator.limit_bytes:
        limit = f"of {allocator.limit_bytes / _GIB:.2f} GiB"
        lines.append(
            f"        it fits {limit}, and releases its cache {allocator.retries} times a step"
            if allocator.fits
            else f"        out of memory {limit}: the allocator finds no room for a request"
        )
    return lines
