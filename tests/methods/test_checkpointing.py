"""Activation checkpointing changes what is kept, never the gradient."""

import pytest
import torch
from factory import make_experiment
from steps import gradient

from dpprof.experiments.config import registry
from dpprof.measure.instruments.memory import measure
from dpprof.predict.estimate import estimate
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.models.transformer import choose_evenly

REFUSED = {
    "non-reentrant": {name for name in registry.names("methods") if name.startswith("opacus-")},
    "reentrant": {"microbatch", "opacus-ew"},
}
CASES = [
    (method, checkpointing)
    for checkpointing, refused in REFUSED.items()
    for method in registry.names("methods")
    if method not in refused
]
FIELDS = {
    "batch_size": 3,
    "seq_len": 16,
    "noise_multiplier": 0.1,
    "model": {"vocab_size": 50, "d_model": 16, "layers": 1, "heads": 2},
}


@pytest.mark.parametrize(("method", "checkpointing"), CASES)
def test_the_gradient_is_the_same(method, checkpointing) -> None:
    fields = FIELDS | {"dtype": "float64", "max_grad_norm": 1.5}
    torch.manual_seed(0)
    plain = gradient(method, **fields)
    torch.manual_seed(0)
    found = gradient(method, checkpointing=checkpointing, **fields)

    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-12)


REPRESENTATIVES = {
    ("flash", "non-reentrant"),
    ("opacus-ghost", "reentrant"),
}


@pytest.mark.parametrize(
    ("method", "checkpointing"),
    [
        case if case in REPRESENTATIVES else pytest.param(*case, marks=pytest.mark.slow)
        for case in CASES
    ],
)
def test_the_timeline_has_what_is_computed_again(method, checkpointing) -> None:
    fields = FIELDS | {"method": method}
    plain = estimate(make_experiment(**fields), lambda _: None)
    experiment = make_experiment(checkpointing=checkpointing, **fields)
    real, fake = (look(experiment, lambda _: None) for look in (measure, estimate))
    peak = real.memory.at_peak.components

    assert fake.memory.at_peak == real.memory.at_peak
    assert fake.compute.executed_flops == real.compute.executed_flops
    assert real.compute.executed_flops > 1.1 * plain.compute.executed_flops
    # Opacus's two passes reduce the loss outside the model, to one float32.
    assert real.memory.attribution.evidence["phase"] in (0, 4)
    assert peak["unattributed"] == 0


@pytest.mark.parametrize(
    ("method", "checkpointing"),
    [(method, kind) for kind, refused in REFUSED.items() for method in sorted(refused)],
)
def test_what_cannot_work_is_refused(method, checkpointing) -> None:
    with pytest.raises(UnsupportedError, match=r"checkpointing"):
        gradient(method, checkpointing=checkpointing, **FIELDS)


def test_a_deep_model_keeps_its_blocks_inputs_alone() -> None:
    B, T, D, layers = 4, 32, 16, 3
    fields = {
        "method": "standard",
        "batch_size": B,
        "seq_len": T,
        "model": {"vocab_size": 16, "d_model": D, "layers": layers, "heads": 2},
    }

    def saved_bytes(checkpointing: str) -> int:
        experiment = make_experiment(checkpointing=checkpointing, **fields)
        timeline = estimate(experiment, lambda _: None).memory.timeline
        return max(timeline.components["saved_activations"])

    plain = saved_bytes("none")
    for checkpointing in ("non-reentrant", "reentrant"):
        assert layers * B * T * D * 4 <= saved_bytes(checkpointing) < 0.5 * plain


FOUR = {"vocab_size": 16, "d_model": 16, "layers": 4, "heads": 2}


@pytest.mark.parametrize(
    ("fields", "way"),
    [
        ({"model": FOUR, "method": "flash-bk"}, "reentrant"),
        (
            {"model": {"hf": "tiny-llama", "num_hidden_layers": 4}, "method": "flash-bk"},
            "non-reentrant",
        ),
        ({"model": {"hf": "tiny-t5", "num_layers": 4}, "method": "standard"}, "reentrant"),
    ],
)
def test_a_share_of_the_blocks_is_computed_again(fields, way) -> None:
    """Every second of four blocks: half of what all cost more, and as recorded."""
    fields = fields | {"batch_size": 3, "seq_len": 16, "noise_multiplier": 0.1}
    half = make_experiment(checkpointing=way, checkpointed_share=0.5, **fields)
    none, every = make_experiment(**fields), make_experiment(checkpointing=way, **fields)
    flops = [
        estimate(experiment, lambda _: None).compute.executed_flops
        for experiment in (none, half, every)
    ]
    real, fake = (look(half, lambda _: None).memory.at_peak for look in (measure, estimate))

    assert flops[1] - flops[0] == flops[2] - flops[1] > 0
    assert fake == real


@pytest.mark.parametrize(
    ("count", "share", "chosen"),
    [
        (4, 0.5, "0101"),
        (6, 1 / 3, "001001"),
        (5, 0.6, "01011"),
        (3, 1, "111"),
        (8, 0.01, "00000001"),
    ],
)
def test_checkpointed_blocks_are_spread_evenly(count, share, chosen) -> None:
    assert "".join("01"[kept] for kept in choose_evenly(count, share)) == chosen
