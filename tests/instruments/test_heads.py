"""Steps whose head is computed in chunks: the same gradients in less memory."""

import pytest
import torch
from factory import make_experiment
from steps import flat_gradient, prepare

from dpprof.devices.cpu import Cpu
from dpprof.instruments.estimate import estimate
from dpprof.instruments.memory import measure
from dpprof.instruments.setup import import_method, set_up
from dpprof.methods.losses import losses_of
from dpprof.spec.registry import UnsupportedError

WIDE = {"vocab_size": 5_000, "d_model": 16, "layers": 2, "heads": 2}


def _ignore(*_) -> None:
    pass


@pytest.mark.parametrize("method", ["standard", "flash-bk", "flash", "per-layer"])
def test_the_gradient_is_that_of_the_logits(method) -> None:
    fields = {"noise_multiplier": 0.0, "dtype": "float64", "batch_size": 3, "max_grad_norm": 0.5}
    found = []
    for head in ("logits", "chunked"):
        step, batch = prepare(method, head=head, **fields)
        step.compute_gradient(batch, _ignore)
        found.append(flat_gradient(step.module))

    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_hugging_faces_heads_have_the_loss_of_their_logits(name) -> None:
    losses = []
    for head in ("logits", "chunked"):
        fields = {"model": f"hf:tiny-{name}", "lora": "rank=2", "head": head, "seq_len": 12}
        experiment = make_experiment(method="flash-bk", **fields)
        training = set_up(experiment, import_method(experiment), Cpu(), _ignore)
        losses.append(losses_of(training.step, training.batch.labels_BT, *training.batch.inputs))

    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["standard", "flash-bk"])
def test_it_needs_less_memory_and_is_predicted_to_the_byte(method, monkeypatch) -> None:
    monkeypatch.setattr("dpprof.clipping.head.CHUNK_BYTES", 2**16)
    monkeypatch.setattr("dpprof.clipping.contributions.AT_ONCE_BYTES", 2**16)
    fields = {"method": method, "model": WIDE, "batch_size": 4, "seq_len": 32}
    real, fake = (
        look(make_experiment(**fields, head="chunked"), _ignore) for look in (measure, estimate)
    )
    usual = estimate(make_experiment(**fields), _ignore)

    assert fake.memory.peak_allocated_bytes == real.memory.peak_allocated_bytes
    assert fake.compute.executed_flops == real.compute.executed_flops
    assert fake.memory.peak_allocated_bytes < usual.memory.peak_allocated_bytes
    assert fake.compute.executed_flops > usual.compute.executed_flops  # of the second product
    held = [
        sum(one.memory.at_peak.components[name] for name in ("logits_and_loss", "output_gradients"))
        for one in (fake, usual)
    ]
    assert held[0] < held[1]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"method": "opacus-hooks"}, "opacus-hooks does not run with head chunked"),
        ({"method": "flash-bk", "model": "hf:tiny-gemma2"}, "head chunked knows no gemma2"),
    ],
)
def test_what_cannot_have_it_is_unsupported(fields, why) -> None:
    with pytest.raises(UnsupportedError, match=why):
        estimate(make_experiment(**fields, head="chunked"), _ignore)


def test_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="head chunked requires one process"):
        make_experiment(head="chunked", parallel="kind=ddp,world_size=2")
