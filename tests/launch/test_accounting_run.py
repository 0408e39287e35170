"""Accounting in a process of its own: its answer, and what is said where there is none."""

import pytest

from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.launch import accounting_run
from dpprof.experiments.launch.accounting_run import account_apart, account_once

PRIVACY = Privacy.model_validate(
    {"samples": 1000, "tokens": 10_000, "epsilon": 8, "delta": 1e-4}
    | {"batch_size": 100, "accountant": "rdp"}
)


@pytest.fixture(scope="module")
def plans():
    """Ask the accountant once."""
    return account_apart(PRIVACY, [4.0, 8.0])


def test_there_is_a_plan_for_every_number_of_tokens(plans) -> None:
    four, eight = plans

    assert (four.tokens_per_sample, four.planned.steps) == (4, 25)
    assert (eight.tokens_per_sample, eight.planned.steps) == (8, 13)
    assert four.planned.noise_multiplier > eight.planned.noise_multiplier


def test_an_accountant_that_takes_too_long_is_one_sentence(monkeypatch) -> None:
    monkeypatch.setattr(accounting_run, "ACCOUNTING_TIMEOUT_S", 0.05)
    slow = PRIVACY.model_copy(update={"accountant": "prv"})

    with pytest.raises(InputError) as error:
        account_apart(slow, [4.0])

    assert str(error.value) == (
        "no noise is known: the accountant prv took longer than 0.05 s; rdp is fast"
    )


def test_an_accountant_whose_process_dies_is_one_sentence(monkeypatch) -> None:
    monkeypatch.setattr(accounting_run, "_ACCOUNT", "os:_exit")
    monkeypatch.setattr(accounting_run.json, "dumps", lambda _: 3)
    monkeypatch.setattr(Privacy, "model_dump_json", lambda _: 3)

    with pytest.raises(InputError, match="the accountant rdp's process ended with exit code 1 bef"):
        account_apart(PRIVACY, [4.0])


def test_accountants_are_asked_again_for_another_budget_and_not_for_another_price(
    plans, tmp_path, monkeypatch
) -> None:
    asked, plan = [], plans[:1]
    monkeypatch.setattr(
        accounting_run, "account_apart", lambda privacy, _: asked.append(privacy) or plan
    )
    dearer = PRIVACY.model_copy(update={"price_per_hour": 9.0})
    stricter = PRIVACY.model_copy(update={"delta": 1e-5})

    assert account_once(tmp_path, PRIVACY, [4.0]) == account_once(tmp_path, dearer, [4.0]) == plan
    assert asked == [PRIVACY]
    account_once(tmp_path, stricter, [4.0])
    account_once(tmp_path, PRIVACY, [8.0])
    account_once(tmp_path, PRIVACY, [4.0], again=True)
    assert asked == [PRIVACY, stricter, PRIVACY, PRIVACY]


def test_a_kept_plan_that_was_edited_is_found_anew(plans, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(accounting_run, "account_apart", lambda *_: plans[:1])
    [plan] = account_once(tmp_path, PRIVACY, [4.0])
    [kept] = tmp_path.glob("results/accounting/*.json")
    before = kept.read_text()
    kept.write_text(before.replace(str(plan.planned.noise_multiplier), "0.001"))

    assert account_once(tmp_path, PRIVACY, [4.0]) == [plan]
    assert kept.read_text() == before != ""
