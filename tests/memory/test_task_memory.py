"""Every task: recorded memory equals the estimate to the byte, with every method that trains it."""

import itertools

import pytest
import torch
from factory import make_experiment
from memory_steps import record_and_estimate
from small_models import STAGES

from dpprof.experiments.config import registry
from dpprof.measure.instruments.memory import measure
from dpprof.predict.estimate import estimate
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.sample_losses import sample_losses
from dpprof.subjects.setup import import_method, set_up

MODELS = {
    "opacus-cnn": {"model": "opacus-cnn"},
    "resnet20-gn": {"model": "resnet20-gn", "image_size": 16},
    "resnet": {"model": STAGES},
    "vit": {"model": "hf:tiny-vit"},
    **{
        f"{name} {task}": {"model": {"hf": f"tiny-{name}", "task": task}, "seq_len": 24}
        for name, task in itertools.product(
            ("bert", "roberta"),
            (
                *("sequence-classification", "token-classification", "masked-lm"),
                "question-answering",
            ),
        )
    },
    "llama classes": {
        "model": {"hf": "tiny-llama", "task": "sequence-classification"},
        "seq_len": 24,
    },
    "llama answers": {
        "model": {"hf": "tiny-llama", "task": "question-answering"},
        "seq_len": 24,
    },
    "t5": {"model": "hf:tiny-t5", "seq_len": 24},
    "bart": {"model": "hf:tiny-bart", "seq_len": 24},
}
OPACUS = [name for name in registry.names("methods") if name.startswith("opacus")]
REFUSED = {
    # Opacus takes no weights that are used twice, or no such arguments of a layer.
    **{(model, name): "" for model in ("bart", "t5") for name in OPACUS},
    **{(f"{one} masked-lm", name): "" for one in ("bert", "roberta") for name in OPACUS},
    # Per-layer clipping takes no parameters beside other modules, and none of two layers.
    **{
        (model, "per-layer"): ""
        for model in ("vit", "bert masked-lm", "roberta masked-lm", "t5", "bart")
    },
    # Its layers normalise over the batch.
    **{("resnet", name): "" for name in registry.names("methods") if name != "standard"},
    # Expanded weights refuse tables with padding, and parameters beside other modules.
    **{
        (model, "opacus-ew"): ""
        for model in MODELS
        if model.startswith(("bert", "roberta", "llama", "vit"))
    },
}
QUICK = [
    ("opacus-cnn", "flash-bk", {}),
    ("bert sequence-classification", "opacus-ghost", {"padding": 0.3}),
    ("t5", "flash-bk", {"decoder_len": 9}),
    ("bert question-answering", "flash-bk", {"padding": 0.3}),
    ("vit", "standard", {"loop": "hf-trainer", "optimizer": "sgd-momentum"}),
]
SLOW = [
    (model, method, padding)
    for model, method, padding in itertools.product(
        MODELS, registry.names("methods"), ({}, {"padding": 0.3})
    )
    if (model, method) not in REFUSED and not (padding and "seq_len" not in MODELS[model])
]
SLOW += [
    ("vit", "flash-bk", {"checkpointing": "non-reentrant"}),
    ("bert masked-lm", "flash-bk", {"lora": "rank=2"}),
    ("t5", "standard", {"dtype": "bfloat16"}),
    ("resnet20-gn", "flash-bk", {"optimizer": "sgd"}),
]
SLOW += [
    (model, method, {"loop": loop, "dtype": "bfloat16"})
    for model, method in itertools.product(("opacus-cnn", "vit"), ("standard", "flash-bk"))
    for loop in ("opacus-tutorial", "timm")
]
SLOW += [
    (model, "standard", {"loop": "hf-trainer"})
    for model in MODELS
    if not isinstance(MODELS[model]["model"], str) or MODELS[model]["model"].startswith("hf:")
]


SLOW += [
    ("bert question-answering", "standard", {"loop": "hf-trainer"}),
    ("llama answers", "standard", {"loop": "hf-trainer", "padding": 0.3}),
    ("llama answers", "flash-bk", {"loop": "hf-trainer"}),
]


@pytest.mark.parametrize(
    ("model", "method", "fields"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_an_estimate_equals_what_is_recorded(model, method, fields) -> None:
    usual = {"seq_len": None, "noise_multiplier": 0.1, "method": method, "batch_size": 3}
    real, fake = record_and_estimate(make_experiment(**usual | MODELS[model] | fields))

    assert fake.compute.flops_by_phase == real.compute.flops_by_phase
    assert fake.compute.model_flops == real.compute.model_flops


def test_a_model_that_cannot_be_traced_is_recorded_and_says_what_is_unknown() -> None:
    experiment = make_experiment(model="hf:tiny-convnext", seq_len=None)
    compute = measure(experiment, lambda _: None).compute

    assert compute.executed_flops > 0
    assert compute.model_flops is compute.dp_flop_multiplier is None
    assert compute.reason.startswith("a plain step cannot be counted")
    with pytest.raises(UnsupportedError, match="the instrument memory runs it"):
        estimate(experiment, lambda _: None)


def test_padded_samples_have_no_model_flops_and_cudnns_workspace_is_unknown() -> None:
    padded = make_experiment(**MODELS["bert masked-lm"], padding=0.3)
    images = make_experiment(model="opacus-cnn", seq_len=None, device="cuda", target="h100")
    of_text, of_images = (estimate(one, lambda _: None) for one in (padded, images))

    assert of_text.compute.model_flops is None
    assert of_text.compute.reason.startswith("of padded samples, model FLOPs are known for causal")
    assert of_images.memory.assumed["workspace of convolution"].startswith(
        "unknown, and counted as"
    )
    assert "workspace of convolution_backward" in of_images.memory.assumed
    assert of_images.time.predicted_step_s.rests_on["data sheet"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["standard", "flash-bk"])
def test_the_loss_of_an_answer_is_transformers_own(method) -> None:
    """The mean of two cross-entropies: of where an answer starts, and where it ends."""
    experiments = [
        make_experiment(**MODELS["llama answers"] | fields)
        for fields in ({"method": method, "loss": "labels"}, {"method": "standard"})
    ]
    trainings = [
        set_up(one, import_method(one), torch.device("cpu"), lambda *_: None) for one in experiments
    ]
    by_labels, of_logits = (training.step.module for training in trainings)
    batch = trainings[0].batch
    logits_B2T = of_logits(*batch.inputs[:-1])

    expected = sample_losses(logits_B2T, batch.labels).mean()
    torch.testing.assert_close(by_labels(*batch.inputs).mean(), expected)


def test_a_decoder_reads_as_many_tokens_as_are_asked_for() -> None:
    experiment = make_experiment(model="hf:tiny-t5", seq_len=24, decoder_len=9, batch_size=3)
    *_, batch, _ = set_up(
        experiment, import_method(experiment), torch.device("cpu"), lambda *_: None
    )

    assert batch.x.shape == (3, 24)
    assert batch.decoder_BT.shape == batch.labels.shape == (3, 9)
    assert torch.equal(batch.decoder_BT[:, 1:], batch.labels[:, :-1])
