"""The table ``findings``: what a reader must know before trusting the numbers."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import pandas as pd

from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.records.ceilings import CEILINGS, Ceilings, device_name
from dpprof.experiments.records.result import Result
from dpprof.results.analysis.collection import Collected
from dpprof.results.analysis.conditions import (
    Usual,
    find_shared_hosts,
    find_usual_machines,
    machine_of,
)
from dpprof.results.analysis.groups import RECORDERS
from dpprof.subjects.methods.opacus.opacus_paths import OpacusPath


class Finding(NamedTuple):
    """A row of the table."""

    kind: str
    experiment_id: str
    """The device where the finding is about ceilings, or about hosts that runs shared."""

    instrument: str
    finding: str


TOLERATED_CORES = 0.25
"""Cores that other processes may keep busy: a shell, a browser and Snakemake use fewer."""

TOLERATED_OTHER = 0.05
"""Share of a trace's time that may lack a known op kind."""


def find_caveats(
    collected: Collected, tables: Mapping[str, pd.DataFrame], privacy: Privacy | None
) -> list[Finding]:
    """Return the findings; docs/how-to/read-the-report.md explains each kind."""
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for run, result in collected.runs:
        if result.outcome == "ok":
            groups[run.id, run.instrument].append(result)
    usual = find_usual_machines(result for _, result in collected.runs)
    looks = (
        *(_unequal_peaks, _fallbacks, _contended, _shared_gpu),
        *(_other_kernels, _nonfinite_samples, partial(_other_machines, usual=usual)),
        partial(_other_settings, usual=Usual(result for _, result in collected.runs)),
    )
    rows = [
        Finding(kind, name, instrument, finding)
        for (name, instrument), results in groups.items()
        for look in looks
        for kind, finding in look(results)
    ]
    rows += _not_reconciled(tables["peaks"])
    rows += _beyond_peak(tables["costs"])
    rows += _shared_hosts(result for _, result in collected.runs)
    rows += _contended_ceilings(collected.ceilings)
    rows += _exceeded_ceilings(tables["kernels"])
    warnings = privacy.warnings if privacy else []
    rows += [Finding("weak-privacy-budget", "privacy", "", warning) for warning in warnings]
    return rows


def _unequal_peaks(results: Iterable[Result]) -> Iterator[tuple[str, str]]:
    for figure in ("peak_allocated_bytes", "first_step_peak_allocated_bytes"):
        peaks = {r.replicate: getattr(r.memory, figure) for r in results if r.memory}
        sizes = {replicate: peak for replicate, peak in peaks.items() if peak is not None}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"r{replicate} {peak:,}" for replicate, peak in sizes.items())
            yield "peaks-differ", f"{figure} differs between processes: {listed}"


def _nonfinite_samples(results: Iterable[Result]) -> Iterator[tuple[str, str]]:
    left_out = sum(r.nonfinite_samples or 0 for r in results)
    if left_out:
        yield (
            "nonfinite-samples",
            f"{left_out:,} samples were left out because their loss or gradient was not finite",
        )


def _fallbacks(results: Iterable[Result]) -> Iterator[tuple[str, str]]:
    layers = {
        layer
        for r in results
        if r.experiment.method != "opacus-functorch"
        for layer, path in (r.samplers or {}).items()
        if OpacusPath.FUNCTORCH in path
    }
    if layers:
        yield "fallback", f"Opacus fell back to functorch for {', '.join(sorted(layers))}"


def _contended(results: Iterable[Result]) -> Iterator[tuple[str, str]]:
    busy: dict[int, float] = {}
    for r in results:
        cores = r.provenance.get("host", {}).get("cores_logical")
        others = r.attempts[-1].others_busy_cores
        timed = r.time is not None and r.time.median_s is not None
        if timed and cores is not None and others is not None:
            free = cores - (r.device.get("threads") or 1)
            if others > free + TOLERATED_CORES:
                busy[r.replicate] = others
    if busy:
        listed = ", ".join(f"{cores:.1f} in r{number}" for number, cores in busy.items())
        yield "contended", f"other processes kept cores busy ({listed}), so its times are too long"


def _shared_gpu(results: Iterable[Result]) -> Iterator[tuple[str, str]]:
    seen: dict[int, tuple[int, float]] = {}
    for r in results:
        attempt = r.attempts[-1]
        looks = [look for look in (attempt.others_before, attempt.others_after) if look is not None]
        if any(look.matter for look in looks):
            memory = max(look.memory_bytes or 0 for look in looks)
            seen[r.replicate] = memory, max(look.load or 0.0 for look in looks)
    if seen:
        listed = ", ".join(
            f"{memory / 2**30:.1f} GiB, busy {load:.0%} at r{number}"
            for number, (memory, load) in seen.items()
        )
        finding = f"other processes used the GPU ({listed}), so its times may be too long"
        yield "gpu-shared", finding


def _other_machines(
    results: Sequence[Result], usual: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    others = {
        r.replicate: machine
        for r in results
        if (machine := machine_of(r)) not in {None, usual.get(r.experiment.device)}
    }
    if others:
        listed = ", ".join(f"r{replicate} on {machine}" for replicate, machine in others.items())
        most = usual[results[0].experiment.device]
        finding = f"it was measured {listed}, and most of the sweep on {most}"
        yield "devices-differ", f"{finding}: its times and peaks do not count"


def _other_settings(results: Iterable[Result], usual: Usual) -> Iterator[tuple[str, str]]:
    listed = [
        f"r{result.replicate} with {' and '.join(unusual)}"
        for result in results
        if (unusual := usual.list_unusual(result))
    ]
    if listed:
        finding = f"it was measured {', '.join(listed)}, as most of the sweep was"
        yield "settings-differ", f"{finding}: compare it with care"


def _other_kernels(results: Iterable[Result]) -> Iterator[tuple[str, str]]:
    shares = [r.kernels.other_share for r in results if r.kernels]
    if shares and max(shares) > TOLERATED_OTHER:
        yield "other-kernels", f"{max(shares):.0%} of its kernels' time has no known op kind"


def _beyond_peak(costs: pd.DataFrame) -> Iterator[Finding]:
    for _, row in costs[costs["beyond_peak"].eq(True)].iterrows():
        finding = (
            f"MFU is {row['mfu']:.2f} and HFU {row['hfu']:.2f}, which is impossible: the peak is "
            f"too low ({row['peak_source']}), or the time or the FLOPs are wrong"
        )
        yield Finding("beyond-peak", row["experiment_id"], row["instrument"], finding)


def _shared_hosts(results: Iterable[Result]) -> Iterator[Finding]:
    for device, is_gpu, shared, measured, most in find_shared_hosts(results):
        where = "on other GPUs of their host" if is_gpu else "in other slots of the processor"
        what = "the host's cores, its PCIe and its power" if is_gpu else "its caches and memory"
        finding = (
            f"{shared:,} of {measured:,} runs were measured while others ran {where}, at "
            f"most {most} at once: they share {what}, so their times may be too long"
        )
        yield Finding("shared-host", device, "", finding)


def _contended_ceilings(measured: Iterable[Ceilings]) -> Iterator[Finding]:
    for ceilings in measured:
        busy = ceilings.others_busy_cores or 0.0
        if ceilings.device.get("type") == "cpu" and busy > TOLERATED_CORES:
            finding = (
                f"other processes kept {busy:.1f} cores busy while its ceilings were measured: "
                "the ceilings are too low, MFU and shares of the ceilings too high"
            )
            yield Finding("ceilings-contended", device_name(ceilings.device), CEILINGS, finding)


def _exceeded_ceilings(kernels: pd.DataFrame) -> Iterator[Finding]:
    """Check compute-bound kernels only: caches can lift memory-bound ones above bandwidth."""
    bound = kernels[kernels["bound"].eq("compute")]
    share = bound["flops_per_s"].astype(float) / bound["ceiling_flops_per_s"].astype(float)
    for device, shares in share[share > 1].groupby(bound["ceilings_of"]):
        finding = (
            f"kernels ran at up to {shares.max():.1f} times the fastest measured matrix product, "
            "so the device was slower while its ceilings were measured: shares of its ceilings, "
            "MFU and HFU are too high"
        )
        yield Finding("ceilings-exceeded", str(device), CEILINGS, finding)


def _not_reconciled(peaks: pd.DataFrame) -> Iterator[Finding]:
    judged = peaks[peaks["instrument"].isin(RECORDERS) & peaks["valid"].eq(False)]
    for _, row in judged.drop_duplicates(["experiment_id", "instrument"]).iterrows():
        gap = int(row["gap_bytes"])
        apart = f"{abs(gap):,} bytes {'more' if gap > 0 else 'less'} than recorded"
        finding = f"the allocator's peak is {apart}, beyond the bound of {row['bound_bytes']:,.0f}"
        yield Finding("memory-unreconciled", row["experiment_id"], row["instrument"], finding)
