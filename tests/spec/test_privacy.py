"""What a privacy budget may be, and what is said of one that cannot be meant."""

import pytest
from pydantic import ValidationError
from snapshots import assert_sentences

from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.validation import InputError, explain, spelling_options

USUAL = {"samples": "1e6", "tokens": "2e9", "epsilon": 8, "delta": "1e-7"}


def test_large_numbers_are_whole_however_they_are_written() -> None:
    for million in (1_000_000, "1e6", "1000000", "1E+6", 1e6, "1.0e6", " 1e6 "):
        assert Privacy.model_validate(USUAL | {"samples": million}).samples == 10**6
    assert Privacy.model_validate(USUAL | {"tokens": "1e15"}).tokens == 10**15


def test_one_epsilon_or_many() -> None:
    assert Privacy.model_validate(USUAL).epsilon == [8.0]
    assert Privacy.model_validate(USUAL | {"epsilon": [8, "2"]}).epsilon == [8.0, 2.0]


def refusal_of(change: dict[str, object]) -> str:
    with pytest.raises(ValidationError) as error:
        Privacy.model_validate(USUAL | change)
    with spelling_options():
        return str(explain(error.value, Privacy, options=True))


def test_bad_input_is_one_sentence() -> None:
    assert_sentences("spec/privacy", refusal_of)


def test_tokens_must_fill_a_batch_or_the_least_steps() -> None:
    few = Privacy.model_validate(USUAL | {"tokens": 4_194_303, "batch_size": 4096})
    with pytest.raises(InputError) as error:
        few.refuse_few_tokens(1024, "--tokens")
    assert str(error.value) == (
        "--tokens: 4194303 is not allowed; it must be at least 4,194,304 tokens for a batch of "
        "4,096"
    )

    fewer = Privacy.model_validate(USUAL | {"tokens": 1_023_999})
    with pytest.raises(InputError, match="at least 1,024,000 tokens for least_steps, 1,000 batche"):
        fewer.refuse_few_tokens(1024, "--tokens")
    Privacy.model_validate(USUAL | {"tokens": 1_024_000}).refuse_few_tokens(1024, "--tokens")


@pytest.mark.parametrize(("delta", "weak"), [(1e-7, False), (1e-6, False), (2e-6, True)])
def test_a_delta_above_one_over_the_samples_is_told(delta, weak) -> None:
    warnings = Privacy.model_validate(USUAL | {"delta": delta}).warnings

    assert bool(warnings) == weak
    if weak:
        assert "delta 2e-06 is above 1 / samples, 1e-06: publishing each sample" in warnings[0]
        assert warnings[0].endswith("would publish 2 of them on average")
