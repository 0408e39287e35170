"""Hugging Face models as experiments build them: what they map, and what of them is trained."""

import pytest
import torch
from factory import make_experiment
from snapshots import assert_sentences, refusals_of
from transformers import OPTForCausalLM

from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.sample_losses import UNLABELLED, sample_losses
from dpprof.subjects.batches import make_batch
from dpprof.subjects.models.build import apply_dtype, build_model
from dpprof.subjects.models.hugging_face import build_hugging_face

LLAMA = {"model": "hf:tiny-llama", "batch_size": 4, "seq_len": 12}


def trained(**fields):
    model = build_model(make_experiment(**LLAMA | fields))
    return {name for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "opt"])
def test_the_loss_is_the_library_s_own(name) -> None:
    experiment = make_experiment(**LLAMA | {"model": f"hf:tiny-{name}", "padding": 0.4})
    model = build_hugging_face(experiment).eval()
    batch = make_batch(model, torch.device("cpu"), experiment)
    ours = sample_losses(model(*batch.inputs), batch.labels)

    for row in range(4):  # alone, so that its mean is over its own tokens
        inputs = dict(zip(("input_ids", "attention_mask"), batch.inputs, strict=True))
        sample = {key: one[row : row + 1] for key, one in inputs.items()}
        shifted = batch.labels[row : row + 1]
        # The library predicts labels one to the right of each token.
        labels = torch.cat([torch.tensor([[UNLABELLED]]), shifted[:, :-1]], 1)
        whole = model.model(**sample, labels=labels, use_cache=False)
        last = labels.ne(UNLABELLED).sum()
        theirs = whole.loss * last
        if shifted[0, -1] != UNLABELLED:  # the label that the shift cuts off
            theirs += torch.nn.functional.cross_entropy(whole.logits[0, -1], shifted[0, -1])
            last += 1
        assert ours[row].item() == pytest.approx((theirs / last).item(), rel=1e-5)


@pytest.mark.parametrize("before", [True, False])
def test_opt_keeps_samples_in_the_first_axis_and_computes_the_same(before) -> None:
    config = {"hf": "tiny-opt", "do_layer_norm_before": before}
    experiment = make_experiment(**LLAMA | {"model": config})
    model = build_hugging_face(experiment).double()
    batch = make_batch(model, torch.device("cpu"), experiment)
    library = OPTForCausalLM(model.model.config).double()
    library.load_state_dict(model.model.state_dict())
    seen = []
    block = model.model.model.decoder.layers[1]
    positions = model.model.model.decoder.embed_positions
    for layer in (positions, block.final_layer_norm, block.fc1, block.fc2):
        layer.register_forward_hook(
            lambda _layer, inputs, _output: seen.extend(one.shape for one in inputs)
        )
    mask = {"attention_mask": batch.mask_BT}

    assert torch.equal(model(*batch.inputs), library(batch.x, **mask).logits)
    assert {shape[:2] for shape in seen} == {(4, 12)}


def test_padding_has_no_mask_and_no_label() -> None:
    experiment = make_experiment(**LLAMA, padding=0.4)
    batch = make_batch(build_model(experiment), torch.device("cpu"), experiment)
    lengths = experiment.sample_lengths(4)

    assert sum(lengths) == experiment.tokens_in(4) < 4 * 12
    assert batch.mask_BT is not None
    assert batch.mask_BT.sum(1).tolist() == lengths
    assert batch.labels.ne(UNLABELLED).sum(1).tolist() == lengths


def test_adapters_alone_are_trained_unless_more_is_asked() -> None:
    adapters = trained(lora={"rank": 2, "target_modules": ["q_proj"]})

    assert len(adapters) == 2 * 2
    assert all("q_proj.lora_" in name for name in adapters)
    everything = trained(lora={"rank": 2, "target_modules": ["q_proj"]}, trainable="all")
    assert len(everything) == len(trained()) + len(adapters)


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ("head", {"model.lm_head.weight"}),
        (
            r"layers\.1\.mlp",
            {f"model.model.layers.1.mlp.{one}_proj.weight" for one in ("gate", "up", "down")},
        ),
    ],
)
def test_parts_are_trained_by_name_or_by_regular_expression(part, found) -> None:
    assert trained(trainable=part) == found


def test_biases_are_trained_alone() -> None:
    names = trained(model="hf:tiny-gpt2", trainable="bias")

    assert names
    assert all(name.endswith(".bias") for name in names)


def test_parts_of_dpprof_s_own_model_are_trained_too() -> None:
    model = build_model(make_experiment(model="tiny", trainable="head"))

    assert [name for name, one in model.named_parameters() if one.requires_grad] == ["head.weight"]


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "opt", "phi"])
def test_biases_are_trained_beside_weights_in_16_bits(name) -> None:
    in_16_bits = {"dtype": "bfloat16", "parameters_dtype": "bfloat16"}
    experiment = make_experiment(
        **LLAMA | {"model": f"hf:tiny-{name}"}, trainable="bias", **in_16_bits
    )
    model = apply_dtype(build_model(experiment), experiment, torch.device("cpu"))
    batch = make_batch(model, torch.device("cpu"), experiment)
    sample_losses(model(*batch.inputs), batch.labels).sum().backward()

    for parameter_name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter_name.endswith(".bias")


def test_frozen_parameters_are_stored_in_16_bits_and_trained_ones_are_not() -> None:
    experiment = make_experiment(
        **LLAMA, lora={"rank": 2}, dtype="bfloat16", parameters_dtype="bfloat16"
    )
    model = build_model(experiment)  # before it is on its device

    for parameter in model.parameters():
        expected = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert parameter.dtype is expected


def test_what_cannot_be_built_is_told_in_one_sentence() -> None:
    refuse = refusals_of(lambda **fields: build_model(make_experiment(**LLAMA | fields)))
    assert_sentences("models/built", refuse)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lora": {"rank": 2, "target_modules": ["nothing"]}}, "lora: peft cannot add the adapte"),
        ({"model": {"hf": "x", "model_type": "nope"}}, "knows no architecture nope"),
        ({"model": {"hf": "tiny-llama", "num_attention_heads": 3}}, "transformers"),
    ],
)
def test_what_libraries_refuse_is_told_in_one_sentence(fields, said) -> None:
    with pytest.raises(UnsupportedError, match=f"^[^\n]*{said}[^\n]*$"):
        build_model(make_experiment(**LLAMA | fields))
