"""What a reader must know before believing the numbers, found by looking at them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import pandas as pd

from dpprof.analysis.collection import Collected
from dpprof.analysis.frames import make_frame
from dpprof.analysis.peak_composition import RECORDERS
from dpprof.methods.opacus_paths import OpacusPath
from dpprof.records.ceilings import Ceilings, device_name
from dpprof.records.result import Result
from dpprof.spec.registry import PREDICTIONS

_COLUMNS = ["kind", "experiment_id", "instrument", "finding"]
Row = dict[str, str]

TOLERATED_CORES = 0.25
"""A shell, a browser and Snakemake itself together keep less than this busy."""

TOLERATED_OTHER = 0.05
"""Of a trace's time that no op kind is known for."""


def find(
    collected: Collected, peaks: pd.DataFrame, costs: pd.DataFrame, kernels: pd.DataFrame
) -> pd.DataFrame:
    """Look for what is not as it should be, one row each.

    Kinds: ``peaks-differ`` (the allocator's peak is not the same in every process, which
    it should be, to the byte), ``fallback`` (Opacus took functorch where the method's name
    promises another way), ``contended`` (others kept cores busy that the run computed on),
    ``gpu-shared`` (others held memory of the GPU or computed on it before or after the run),
    ``devices-differ`` (replicates ran on devices of different names),
    ``memory-unreconciled`` (the allocator's peak is further from the recorded one than it may be),
    ``beyond-peak`` (a step computes more than the device could), ``other-kernels`` (more of a
    trace's time than there should be is of no known op kind), ``ceilings-contended`` (others
    kept cores busy while a device's ceilings were measured), ``ceilings-exceeded`` (kernels were
    faster than the fastest product that was measured), ``nonfinite-samples`` (a method left
    samples out, since their loss or gradient was not finite).

    Args:
        collected: The results of a config.
        peaks: The table ``peaks``.
        costs: The table ``costs``.
        kernels: The table ``kernels``.
    """
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for run, result in collected.found:
        if result.outcome == "ok":
            groups[run.id, run.instrument].append(result)
    rows: list[Row] = []
    for (name, instrument), results in groups.items():
        for kind, finding in _looked_at(results):
            row = {"kind": kind, "experiment_id": name}
            rows.append(row | {"instrument": instrument, "finding": finding})
    rows += _open_books(peaks)
    rows += _beyond_peak(costs)
    rows += _contended_ceilings(collected.ceilings)
    rows += _exceeded_ceilings(kernels)
    return make_frame(rows, _COLUMNS)


def _looked_at(results: list[Result]) -> Iterator[tuple[str, str]]:
    for look in (
        _unequal_peaks,
        _fallbacks,
        _contended,
        _shared_gpu,
        _unlike_devices,
        _other_kernels,
        _nonfinite_samples,
    ):
        yield from look(results)


def _unequal_peaks(results: Iterable[Result]) -> Iterator[tuple[str, str]]:
    for figure in ("peak_allocated_bytes", "first_step_peak_allocated_bytes"):
        peaks = {r.replicate: getattr(r.memory, figure) for r in results if r.memory}
        known = {replicate: peak for replicate, peak in peaks.items() if peak is not None}
        if len(set(known.values())) > 1:
            listed = ", ".join(f"r{replicate} {peak:,}" for replicate, peak in known.items())
            yield "peaks-differ", f"{figure} differs between processes: {listed}"


def _nonfinite_samples(results: Iterable[Result]) -> Iterator[tuple[str, str]]:
    left_out = sum(r.nonfinite_samples or 0 for r in results)
    if left_out:
        yield (
            "nonfinite-samples",
            f"{left_out:,} samples were left out, as their loss or gradient was not finite",
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
        cores = r.provenance["host"].get("cores_logical")
        others = r.attempts[-1].others_busy_cores
        if r.time is not None and cores is not None and others is not None:
            free = cores - r.device.get("threads", 1)
            if others > free + TOLERATED_CORES:
                busy[r.replicate] = others
    if busy:
        listed = ", ".join(f"{cores:.1f} in r{number}" for number, cores in busy.items())
        yield "contended", f"others kept cores busy ({listed}), so its times are too long"


def _shared_gpu(results: Iterable[Result]) -> Iterator[tuple[str, str]]:
    seen: dict[int, tuple[int, float]] = {}
    for r in results:
        attempt = r.attempts[-1]
        looks = [one for one in (attempt.others_before, attempt.others_after) if one is not None]
        if any(one.matter for one in looks):
            memory = max(one.memory_bytes or 0 for one in looks)
            seen[r.replicate] = memory, max(one.load or 0.0 for one in looks)
    if seen:
        listed = ", ".join(
            f"{memory / 2**30:.1f} GiB, busy {load:.0%} at r{number}"
            for number, (memory, load) in seen.items()
        )
        yield "gpu-shared", f"others were on the GPU ({listed}), so its times may be too long"


def _unlike_devices(results: Iterable[Result]) -> Iterator[tuple[str, str]]:
    names = {r.replicate: str(r.device.get("name")) for r in results}
    if len(set(names.values())) > 1 and not {r.instrument for r in results} & set(PREDICTIONS):
        listed = ", ".join(f"r{replicate} {name}" for replicate, name in names.items())
        yield "devices-differ", f"its replicates ran on unlike devices: {listed}"


def _other_kernels(results: Iterable[Result]) -> Iterator[tuple[str, str]]:
    shares = [r.kernels.other_share for r in results if r.kernels]
    if shares and max(shares) > TOLERATED_OTHER:
        yield "other-kernels", f"no op kind is known for {max(shares):.0%} of its kernels' time"


def _beyond_peak(costs: pd.DataFrame) -> Iterator[Row]:
    beyond = costs[costs["beyond_peak"].eq(True)]
    for _, row in beyond.iterrows():
        yield {
            "kind": "beyond-peak",
            "experiment_id": str(row["experiment_id"]),
            "instrument": str(row["instrument"]),
            "finding": f"MFU is {row['mfu']:.2f} and HFU {row['hfu']:.2f}, which cannot be: the "
            f"peak is too low ({row['peak_source']}), or the time or a FLOP is wrong",
        }


def _contended_ceilings(known: Iterable[Ceilings]) -> Iterator[Row]:
    for ceilings in known:
        busy = ceilings.others_busy_cores or 0.0
        if ceilings.device.get("type") == "cpu" and busy > TOLERATED_CORES:
            yield {
                "kind": "ceilings-contended",
                "experiment_id": device_name(ceilings.device),
                "instrument": "ceilings",
                "finding": f"others kept {busy:.1f} cores busy while its ceilings were measured: "
                "these are too low, and MFU and shares of them too high",
            }


def _exceeded_ceilings(kernels: pd.DataFrame) -> Iterator[Row]:
    """Look at what computing binds; what memory binds may be faster than it, out of caches."""
    bound = kernels[kernels["bound"].eq("compute")]
    share = bound["flops_per_s"].astype(float) / bound["ceiling_flops_per_s"].astype(float)
    for device, shares in share[share > 1].groupby(bound["ceilings_of"]):
        yield {
            "kind": "ceilings-exceeded",
            "experiment_id": str(device),
            "instrument": "ceilings",
            "finding": f"kernels ran at up to {shares.max():.1f} times the fastest product that "
            "was measured, so the device was slower then than it is at times: shares of its "
            "ceilings, MFU and HFU are too high",
        }


def _open_books(peaks: pd.DataFrame) -> Iterator[Row]:
    judged = peaks[peaks["instrument"].isin(RECORDERS) & peaks["valid"].eq(False)]
    for _, row in judged.drop_duplicates(["experiment_id", "instrument"]).iterrows():
        gap = int(row["gap_bytes"])
        told = f"{abs(gap):,} bytes {'more' if gap > 0 else 'less'} than recorded"
        yield {
            "kind": "memory-unreconciled",
            "experiment_id": str(row["experiment_id"]),
            "instrument": str(row["instrument"]),
            "finding": f"the allocator's peak is {told}, beyond the bound of "
            f"{int(row['bound_bytes']):,}",
        }
