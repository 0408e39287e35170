"""Steps whose head is computed in chunks: the same gradients in less memory."""

import json

import pytest
import torch
from factory import make_experiment
from steps import flat_gradient, prepare

from dpprof.measure.instruments.memory import measure
from dpprof.predict.estimate import estimate
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.methods.losses import losses_of
from dpprof.subjects.setup import import_method, set_up

WIDE = {"vocab_size": 5_000, "d_model": 16, "layers": 2, "heads": 2}


def _ignore(*_) -> None:
    pass


@pytest.mark.parametrize("method", ["standard", "flash-bk", "flash", "per-layer"])
def test_the_gradient_is_that_of_the_logits(method) -> None:
    fields = {"noise_multiplier": 0.0, "dtype": "float64", "batch_size": 3, "max_grad_norm": 0.5}
    found = []
    for head in ("logits", "chunked", "kept"):
        step, batch = prepare(method, head=head, **fields)
        step.compute_gradient(batch, _ignore)
        found.append(flat_gradient(step.module))

    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=1e-9, atol=1e-12)


SMALL = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
OTHERS = {
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
    "gemma2": {"final_logit_softcapping": 0.5, "head_dim": 8},
    "stablelm": {},
    "gptj": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "rotary_dim": 4},
    "bloom": {"n_layer": 1, "n_head": 2},
}


@pytest.mark.parametrize(
    "name",
    ["gpt2", *OTHERS, *(pytest.param(one, marks=pytest.mark.slow) for one in ("llama", "opt"))],
)
def test_hugging_faces_heads_have_the_loss_of_their_logits(name, tmp_path) -> None:
    model = f"hf:tiny-{name}"
    if name in OTHERS:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(SMALL | OTHERS[name] | {"model_type": name}), encoding="utf-8")
        model = f"hf:{path}"
    losses = []
    for head in ("logits", "chunked"):
        lora = "rank=2,target_modules=all-linear"
        fields = {"model": model, "lora": lora, "head": head, "seq_len": 12}
        experiment = make_experiment(method="flash-bk", **fields)
        training = set_up(experiment, import_method(experiment), torch.device("cpu"), _ignore)
        losses.append(losses_of(training.step, training.batch.labels, *training.batch.inputs))

    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("flash-bk", "chunked"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("flash-bk", "kept"), ("standard", "chunked"))
        ),
    ],
)
def test_it_needs_less_memory_and_is_predicted_to_the_byte(method, head, monkeypatch) -> None:
    monkeypatch.setattr("dpprof.private.layers.head.CHUNK_BYTES", 2**16)
    monkeypatch.setattr("dpprof.private.contributions.contributions.AT_ONCE_BYTES", 2**16)
    fields = {"method": method, "model": WIDE, "batch_size": 4, "seq_len": 32}
    real, fake = (
        look(make_experiment(**fields, head=head), _ignore) for look in (measure, estimate)
    )
    usual = estimate(make_experiment(**fields), _ignore)

    assert fake.memory.peak_allocated_bytes == real.memory.peak_allocated_bytes
    assert fake.compute.executed_flops == real.compute.executed_flops
    assert fake.memory.peak_allocated_bytes < usual.memory.peak_allocated_bytes
    if head == "chunked":
        assert fake.compute.executed_flops > usual.compute.executed_flops  # of the second product
    held = [
        sum(one.memory.at_peak.components[name] for name in ("logits_and_loss", "output_gradients"))
        for one in (fake, usual)
    ]
    assert held[0] < held[1]


def test_a_method_or_an_architecture_that_cannot_have_it_is_unsupported(tmp_path) -> None:
    with pytest.raises(UnsupportedError, match="opacus-hooks does not run with head chunked"):
        estimate(make_experiment(method="opacus-hooks", head="chunked"), _ignore)
    path = tmp_path / "config.json"
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 64, "rotary_dim": 2}
    path.write_text(json.dumps({"model_type": "codegen", "vocab_size": 300, **sizes}), "utf-8")
    experiment = make_experiment(method="flash-bk", model=f"hf:{path}", head="chunked")

    with pytest.raises(UnsupportedError, match="head chunked knows no codegen; it knows bloom, "):
        estimate(experiment, _ignore)
