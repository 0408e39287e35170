"""Recurrent models: recorded memory equals the estimate to the byte, with every method."""

import itertools

import pytest
import torch
from factory import make_experiment
from memory_steps import record_and_estimate

from dpprof.experiments.config import registry
from dpprof.measure.instruments.memory import measure
from dpprof.measure.verification.verify import verify_case
from dpprof.predict.estimate import estimate
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.models.build import build_model

OWN = ("char-lstm", "char-gru", "char-rnn", "ptb-lstm-small")
DEEPCOPIED = [("ptb-lstm-small", f"opacus-{name}") for name in ("ghost", "adaptive")]
QUICK = [("char-lstm", "standard"), ("char-gru", "flash-bk")]
CASES = [
    case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product(OWN, registry.names("methods"))
    if case not in DEEPCOPIED
]


def ask(model, method, **fields):
    attention = "opacus" if method.startswith("opacus") else "sdpa"
    usual = {"batch_size": 3, "seq_len": 6, "noise_multiplier": 0.1, "attention": attention}
    return make_experiment(**{"model": model, "method": method, **usual, **fields})


@pytest.mark.parametrize(("model", "method"), CASES)
def test_an_estimate_equals_what_is_recorded(model, method) -> None:
    real, fake = record_and_estimate(ask(model, method))

    assert fake.compute.flops_by_phase == real.compute.flops_by_phase


@pytest.mark.slow
@pytest.mark.parametrize(("model", "method"), DEEPCOPIED)
def test_an_estimate_equals_what_is_recorded_but_for_an_operators_name(model, method) -> None:
    """Its peak has what deepcopy made, by set_ of real tensors and by clone of fake ones."""
    experiment = ask(model, method)
    real, fake = (run(experiment, lambda _: None).memory for run in (measure, estimate))

    assert fake.peak_allocated_bytes == real.peak_allocated_bytes
    assert fake.first_step_peak_allocated_bytes == real.first_step_peak_allocated_bytes
    assert fake.at_peak.components == real.at_peak.components
    bytes_of = [
        [(x.component, x.bytes, x.storages) for x in m.at_peak.largest] for m in (real, fake)
    ]
    assert bytes_of[0] == bytes_of[1]


SIZES = {"kind": "GRU", "vocab_size": 40, "embedding": 6, "hidden": 5, "layers": 2}


@pytest.mark.parametrize(
    ("method", "classes"),
    [
        ("flash-bk", None),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("standard", 3), ("flash", 3))),
    ],
)
def test_a_network_of_stated_sizes_takes_what_is_predicted(method, classes) -> None:
    _, fake = record_and_estimate(ask(SIZES | {"classes": classes}, method))

    table, cells = 40 * 6, 3 * 5 * (6 + 5 + 2) + 3 * 5 * (5 + 5 + 2)
    assert fake.model.parameters_total == table + cells + (classes or 40) * (5 + 1)


@pytest.mark.parametrize(
    ("name", "parameters"), [("char-lstm", 118_226), ("ptb-lstm-small", 4_653_200)]
)
def test_a_model_has_the_parameters_of_its_source(name, parameters) -> None:
    with torch.device("meta"):
        models = [build_model(ask(name, "standard", attention=kind)) for kind in ("sdpa", "opacus")]

    # char-lstm: 259 x 64 + 512 x (64 + 128) + 2 x 512 + 18 x 129. ptb-lstm-small: 2 x 10,000 x 200
    # + 10,000 + 2 x (800 x 400 + 2 x 800).
    assert [sum(p.numel() for p in model.parameters()) for model in models] == [parameters] * 2


def test_what_cannot_be_asked_says_what_can() -> None:
    with pytest.raises(UnsupportedError, match=r"build its DPGRU \(attention opacus"):
        estimate(ask("char-gru", "opacus-hooks", attention="sdpa"), lambda _: None)
    with pytest.raises(UnsupportedError, match="a recurrent network, which is not built with"):
        build_model(ask("char-gru", "flash-bk", checkpointing="reentrant"))


def test_cudnns_tensors_are_said_to_be_unknown() -> None:
    on_gpu = ask("char-lstm", "standard", device="cuda", target="h100")
    memory = estimate(on_gpu, lambda _: None).memory

    assert "cuDNN runs it whole" in memory.assumed["workspace of lstm"]


@pytest.mark.parametrize(
    ("method", "attention"),
    [
        ("flash-bk", "sdpa"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("flash", "sdpa"), ("flash-bk", "opacus"), ("opacus-ghost", "opacus"))
        ),
    ],
)
def test_a_method_has_the_gradient_of_the_references(method, attention) -> None:
    case = verify_case("char-lstm", method, attention, 4)

    assert (case.outcome, case.reason) == ("passed", None)
