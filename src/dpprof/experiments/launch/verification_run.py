"""Runs a verification in a separate process, and always writes one file."""

from functools import partial
from pathlib import Path

from dpprof.experiments.launch.device_slots import cpu_slot
from dpprof.experiments.launch.isolated import isolate
from dpprof.experiments.planning.code_digest import verdict_digest
from dpprof.experiments.planning.stand_ins import StandIn
from dpprof.experiments.records import verdict
from dpprof.experiments.records.record import write_record

VERIFICATION_TIMEOUT_S = 300
"""A verification takes seconds; one that takes longer than this counts as hung."""

_VERIFY = "dpprof.measure.verification.verify:verify"


def verify_apart(model: str | StandIn, method: str, output: Path) -> verdict.Verdict:
    """Verify a method on a model and write one complete JSON.

    ``model`` is a result of ``verified_as``, or the stand-in of a Hugging Face model itself.

    A verification may run at the same time as predictions, but waits for measurements to end.

    Raises:
        OSError: The verdict cannot be written; this is checked before the verification.
    """
    label = model if isinstance(model, str) else model.label
    what = model if isinstance(model, str) else model.canonical
    digest = partial(verdict_digest, label, method)
    with isolate(output, [cpu_slot(1, shared=True)], digest, __file__) as isolation:
        isolation.begin()
        ended = isolation.run(
            verdict.Findings, _VERIFY, what, method, timeout_s=VERIFICATION_TIMEOUT_S
        )
        facts = isolation.finish()
    mechanism, cases = ended.answer or verdict.Findings(None, [])
    passed, reason = verdict.judge(cases)
    deciding = verdict.judged(cases)
    return write_record(
        output,
        verdict.Verdict,
        {
            "model": label,
            "method": method,
            "mechanism": mechanism,
            "passed": passed,
            "reason": reason
            if ended.answer
            else ended.explain("verification", VERIFICATION_TIMEOUT_S),
            "tolerance": verdict.TOLERANCE,
            "holes": verdict.name_holes(cases),
            "max_relative_error": _largest([case.max_relative_error for case in deciding]),
            "max_relative_error_of_norms": _largest(
                [case.max_relative_error_of_norms for case in deciding]
            ),
            "references": sorted({name for case in cases for name in case.references}),
            "cases": cases,
            "code_digest": facts["code_digest"],
            "wall_s": facts["wall_s"],
            "provenance": {key: facts["provenance"][key] for key in ("git", "python", "packages")},
        },
    )


def _largest(errors: list[float | None]) -> float | None:
    return max((error for error in errors if error is not None), default=None)
