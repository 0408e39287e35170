"""What a verdict amounts to, and that its file can be trusted."""

import pytest
from factory import make_experiment, write_synthetic_verdict

from dpprof.experiments.records.record import ResultError
from dpprof.experiments.records.verdict import Case, judge, name_holes, read_verdict, verdict_path

PASSED, FAILED, REFUSED, UNKNOWN = (
    Case.model_validate({"attention": "sdpa", "batch_size": 4, "outcome": name, "reason": name})
    for name in ("passed", "failed", "unsupported", "unknown")
)


@pytest.mark.parametrize(
    ("cases", "passed", "reason"),
    [
        ([PASSED, PASSED], True, None),
        ([PASSED, REFUSED], True, "unsupported"),
        ([PASSED, UNKNOWN, FAILED], False, "failed"),
        ([PASSED, UNKNOWN], None, "unknown"),
        ([REFUSED, REFUSED], None, "unsupported"),
        ([], None, "nothing was compared"),
    ],
)
def test_cases_amount_to_a_verdict(cases, passed, reason) -> None:
    found, why = judge(cases)

    assert found is passed
    assert why in (reason, f"attention sdpa, B = 4: {reason}")


def in_scenario(name, case):
    return case.model_copy(update={"scenario": name})


def test_what_decides_is_the_gradient_and_not_the_guarantee() -> None:
    guarantees = ("frozen later", "thawed later", "non-finite", "empty", "accumulated")
    lost = [in_scenario(name, FAILED) for name in guarantees]

    assert judge([PASSED, *lost]) == (True, None)
    assert judge(lost) == (None, "nothing was compared")
    for name in ("ignored labels", "frozen"):
        passed, reason = judge([PASSED, in_scenario(name, FAILED)])
        assert passed is False
        assert reason == f"attention sdpa, B = 4, {name}: failed"


def test_holes_are_what_failed_and_nothing_that_was_refused() -> None:
    cases = [in_scenario("empty", REFUSED), in_scenario("thawed later", UNKNOWN)]
    cases += [in_scenario("non-finite", FAILED), in_scenario("accumulated", PASSED), FAILED]

    assert name_holes(cases) == ["one non-finite sample: failed"]


def test_a_verdict_stands_for_the_attention_that_it_covers(tmp_path) -> None:
    cases = [PASSED, REFUSED.model_copy(update={"attention": "eager"})]
    verdict = write_synthetic_verdict(tmp_path, make_experiment(), cases=cases)

    assert verdict.stands_for("sdpa").verified is True
    assert verdict.stands_for("eager").verified is None
    assert verdict.stands_for("eager").reason == "attention eager, B = 4: unsupported"
    assert verdict.stands_for("opacus").verified is None


def test_a_failure_anywhere_is_one_for_every_attention(tmp_path) -> None:
    cases = [PASSED, FAILED.model_copy(update={"attention": "eager"})]
    verdict = write_synthetic_verdict(tmp_path, make_experiment(), False, cases=cases)

    assert verdict.stands_for("sdpa").verified is False


@pytest.fixture
def path(tmp_path):
    write_synthetic_verdict(tmp_path, make_experiment())
    return verdict_path(tmp_path, "built-in", "standard")


def test_a_verdict_under_anothers_name_is_found(path, tmp_path) -> None:
    path.rename(verdict_path(tmp_path, "built-in", "microbatch"))

    with pytest.raises(ResultError, match="is about another pair, standard on built-in"):
        read_verdict(tmp_path, "built-in", "microbatch")
