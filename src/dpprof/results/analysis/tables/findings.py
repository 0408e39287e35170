"""The table ``findings``: what a reader must know before trusting the numbers."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.records.ceilings import CEILINGS, device_name
from dpprof.experiments.records.result import Result
from dpprof.results.analysis.collection import Collected
from dpprof.results.analysis.conditions import (
    Surroundings,
    find_shared_hosts,
    find_usual,
    list_unusual,
    machine_of,
    surroundings_of,
)
from dpprof.results.analysis.groups import RECORDERS
from dpprof.subjects.methods.opacus.opacus_paths import OpacusPath


class Finding(NamedTuple):
    """A row of the table."""

    kind: str
    experiment_id: str  # the device where it is about ceilings, or about hosts that runs shared
    instrument: str
    finding: str


TOLERATED_CORES = 0.25  # that others may keep busy: a shell, a browser and Snakemake use fewer
TOLERATED_OTHER = 0.05  # share of a trace's time that may lack a known op kind


def find_caveats(
    collected: Collected, tables: Mapping[str, pd.DataFrame], privacy: Privacy | None
) -> list[Finding]:
    """Return the findings; docs/how-to/read-the-report.md explains each kind."""
    every = [result for _, result in collected.runs]
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for run, result in collected.runs:
        if result.outcome == "ok":
            groups[run.id, run.instrument].append(result)
    machines, usual = find_usual(every, machine_of), find_usual(every, surroundings_of)
    rows = [
        Finding(kind, name, instrument, finding)
        for (name, instrument), results in groups.items()
        for kind, finding in (*_look_at(results), *_compare_conditions(results, machines, usual))
    ]
    rows += _look_at_sweep(collected, tables, every)
    warnings = privacy.warnings if privacy else []
    rows += [Finding("weak-privacy-budget", "privacy", "", warning) for warning in warnings]
    return rows


def _look_at(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    for figure in ("peak_allocated_bytes", "first_step_peak_allocated_bytes"):
        peaks = {r.replicate: getattr(r.memory, figure) for r in results if r.memory}
        sizes = {replicate: peak for replicate, peak in peaks.items() if peak is not None}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"r{replicate} {peak:,}" for replicate, peak in sizes.items())
            yield "peaks-differ", f"{figure} differs between processes: {listed}"
    layers = {
        layer
        for r in results
        if r.experiment.method != "opacus-functorch"
        for layer, path in (r.samplers or {}).items()
        if OpacusPath.FUNCTORCH in path
    }
    if layers:
        yield "fallback", f"Opacus fell back to functorch for {', '.join(sorted(layers))}"
    if busy := _list_runs(results, _tell_busy_cores):
        yield "contended", f"other processes kept cores busy ({busy}), so its times are too long"
    if shared := _list_runs(results, _tell_shared_gpu):
        yield (
            "gpu-shared",
            f"other processes used the GPU ({shared}), so its times may be too long",
        )
    shares = [r.kernels.other_share for r in results if r.kernels]
    if shares and max(shares) > TOLERATED_OTHER:
        yield "other-kernels", f"{max(shares):.0%} of its kernels' time has no known op kind"
    if left_out := sum(r.nonfinite_samples or 0 for r in results):
        yield (
            "nonfinite-samples",
            f"{left_out:,} samples were left out because their loss or gradient was not finite",
        )


def _list_runs(results: Iterable[Result], tell: Callable[[Result], str]) -> str:
    return ", ".join(filter(None, map(tell, results)))


def _tell_busy_cores(result: Result) -> str:
    cores = result.provenance.get("host", {}).get("cores_logical")
    others = result.attempts[-1].others_busy_cores
    timed = result.time is not None and result.time.median_s is not None
    if not timed or cores is None or others is None:
        return ""
    free = cores - (result.device.get("threads") or 1)
    return f"{others:.1f} in r{result.replicate}" if others > free + TOLERATED_CORES else ""


def _tell_shared_gpu(result: Result) -> str:
    attempt = result.attempts[-1]
    looks = [look for look in (attempt.others_before, attempt.others_after) if look is not None]
    if not any(look.matter for look in looks):
        return ""
    memory, load = (max(getattr(o, name) or 0 for o in looks) for name in ("memory_bytes", "load"))
    return f"{memory / 2**30:.1f} GiB, busy {load:.0%} at r{result.replicate}"


def _compare_conditions(
    results: Sequence[Result], machines: Mapping[str, str], usual: Mapping[str, Surroundings]
) -> Iterator[tuple[str, str]]:
    most = machines.get(results[0].experiment.device)
    others = [(r, machine) for r in results if (machine := machine_of(r)) not in {None, most}]
    if others:
        listed = ", ".join(f"r{r.replicate} on {machine}" for r, machine in others)
        finding = f"it was measured {listed}, and most of the sweep on {most}"
        yield "devices-differ", f"{finding}: its times and peaks do not count"
    unusual = [(r, facts) for r in results if (facts := list_unusual(r, usual))]
    if unusual:
        listed = ", ".join(f"r{r.replicate} with {' and '.join(facts)}" for r, facts in unusual)
        finding = f"it was measured {listed}, as most of the sweep was"
        yield "settings-differ", f"{finding}: compare it with care"


def _look_at_sweep(
    collected: Collected, tables: Mapping[str, pd.DataFrame], results: Iterable[Result]
) -> Iterator[Finding]:
    peaks, costs = tables["peaks"], tables["costs"]
    judged = peaks[peaks["instrument"].isin(RECORDERS) & peaks["valid"].eq(False)]
    for _, row in judged.drop_duplicates(["experiment_id", "instrument"]).iterrows():
        gap = int(row["gap_bytes"])
        apart = f"{abs(gap):,} bytes {'more' if gap > 0 else 'less'} than recorded"
        finding = f"the allocator's peak is {apart}, beyond the bound of {row['bound_bytes']:,.0f}"
        yield Finding("memory-unreconciled", row["experiment_id"], row["instrument"], finding)
    for _, row in costs[costs["beyond_peak"].eq(True)].iterrows():
        finding = (
            f"MFU is {row['mfu']:.2f} and HFU {row['hfu']:.2f}, which is impossible: the peak is "
            f"too low ({row['peak_source']}), or the time or the FLOPs are wrong"
        )
        yield Finding("beyond-peak", row["experiment_id"], row["instrument"], finding)
    for device, is_gpu, shared, measured, most in find_shared_hosts(results):
        where = "on other GPUs of their host" if is_gpu else "in other slots of the processor"
        what = "the host's cores, its PCIe and its power" if is_gpu else "its caches and memory"
        finding = (
            f"{shared:,} of {measured:,} runs were measured while others ran {where}, at "
            f"most {most} at once: they share {what}, so their times may be too long"
        )
        yield Finding("shared-host", device, "", finding)
    for ceilings in collected.ceilings:
        busy = ceilings.others_busy_cores or 0.0
        if ceilings.device.get("type") == "cpu" and busy > TOLERATED_CORES:
            finding = (
                f"other processes kept {busy:.1f} cores busy while its ceilings were measured: "
                "the ceilings are too low, MFU and shares of the ceilings too high"
            )
            yield Finding("ceilings-contended", device_name(ceilings.device), CEILINGS, finding)
    # Compute-bound kernels alone: caches can lift memory-bound ones above the bandwidth.
    bound = tables["kernels"].loc[lambda rows: rows["bound"].eq("compute")]
    share = bound["flops_per_s"].astype(float) / bound["ceiling_flops_per_s"].astype(float)
    for name, shares in share[share > 1].groupby(bound["ceilings_of"]):
        finding = (
            f"kernels ran at up to {shares.max():.1f} times the fastest measured matrix product, "
            "so the device was slower while its ceilings were measured: shares of its ceilings, "
            "MFU and HFU are too high"
        )
        yield Finding("ceilings-exceeded", str(name), CEILINGS, finding)
