"""Predictions against what others measured on their GPUs."""

import pytest
from published import page
from published.cases import CASES, Case

NEARLY = 0.1
"""Percent."""

OTHER_VERSION = 0.5
"""Percent, where the source's PyTorch was older."""

RESERVED = 0.2
"""Percent, of what the simulated allocator reserves."""

_OLD = {"opacus"}


def choose(*families: str) -> list:
    return [
        pytest.param(case, id=case.id, marks=[pytest.mark.slow] if case.slow else [])
        for case in CASES
        if case.family in families
    ]


def limit(case: Case) -> float:
    if case.source in _OLD:
        return OTHER_VERSION
    return RESERVED if case.counter == "reserved" else NEARLY


def check(case: Case) -> None:
    """A known difference must stay what it is: who removes it removes it from the data."""
    if case.differs is not None:
        assert case.difference() == pytest.approx(case.differs, abs=0.01)
    else:
        assert case.predict() == pytest.approx(case.published, rel=limit(case) / 100)


@pytest.mark.parametrize("case", choose("attention"))
def test_attention_keeps_what_it_kept_on_a_gpu(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", choose("operators"))
def test_an_operators_peak_is_that_of_a_gpu(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", choose("small"))
def test_a_few_layers_peak_is_that_of_a_gpu(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", choose("llama_like", "llama_like_small", "mini_gpt"))
def test_a_transformers_step_takes_what_it_took_on_a_gpu(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", choose("gpt2"))
def test_a_process_reserves_what_it_reserved_on_a_gpu(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", choose("opacus_layers"))
def test_opacus_takes_what_it_took_on_a_gpu(case: Case) -> None:
    check(case)


@pytest.mark.slow
def test_an_epoch_reserves_no_more_than_two_steps() -> None:
    case = next(case for case in CASES if case.id == "gpt2-fused-attention")
    longer = case._replace(settings=case.settings | {"steps": 3, "tokens": 50})
    assert longer.predict() == case.predict()


def test_the_page_shows_what_is_computed() -> None:
    text = page.PAGE.read_text()
    cases = [case for case in CASES if not case.slow]
    assert [page.row(case) for case in cases if page.row(case) not in text] == []
    assert page.unexplained(cases) == []


@pytest.mark.slow
def test_the_whole_page_is_what_is_computed() -> None:
    assert page.PAGE.read_text() == page.render()
    assert page.unexplained(CASES) == []
