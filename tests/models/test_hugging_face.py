"""Hugging Face models under fake tensors: as many parameters as published, and the real masks."""

import warnings
from pathlib import Path

import pytest
import torch
import yaml
from factory import make_experiment
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from dpprof.predict.memory.fake_tensors import fake_tensors
from dpprof.private.substitutes import substitute
from dpprof.subjects.batches import make_batch
from dpprof.subjects.methods.standard import Standard
from dpprof.subjects.models.build import build_model
from dpprof.subjects.setup import set_up

aten = torch.ops.aten


PUBLISHED = yaml.safe_load(Path(__file__).with_name("published_parameters.yaml").read_text())
"""Parameters by model."""

QUICK = ("gpt2", "smollm2-135m")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED],
)
def test_a_bundled_model_has_its_published_parameters(name) -> None:
    experiment = make_experiment(model=f"hf:{name}")
    with fake_tensors():
        facts = set_up(experiment, Standard, torch.device("cpu"), lambda *_: None).model

    assert facts.parameters_total == facts.parameters_trainable == PUBLISHED[name]
    assert facts.parameters_bytes == 4 * PUBLISHED[name]


def test_shared_weights_stay_shared_in_every_conversion_of_a_fake_model() -> None:
    with fake_tensors():
        model = build_model(make_experiment(model="hf:tiny-gpt2")).to("cpu").double()
        table, head = model.model.transformer.wte.weight, model.model.lm_head.weight

    assert isinstance(table, FakeTensor)
    assert head is table
    assert table.dtype is torch.float64


def masks_given(model: str, batch: list[slice], *, fake: bool, **fields) -> list[tuple | None]:
    """Return the shapes of the masks that attention gets for parts of a batch; None for none."""
    experiment = make_experiment(model=f"hf:{model}", batch_size=3, seq_len=8, **fields)
    attend, seen = functional.scaled_dot_product_attention, []

    def note(*args, attn_mask=None, **kwargs):
        seen.append(None if attn_mask is None else tuple(attn_mask.shape))
        return attend(*args, attn_mask=attn_mask, **kwargs)

    def run() -> None:
        training = set_up(experiment, Standard, torch.device("cpu"), lambda *_: None)
        for part in batch:
            training.step.module(*(one[part] for one in training.batch.inputs))

    with substitute(functional, "scaled_dot_product_attention", note), warnings.catch_warnings():
        if fake:
            with fake_tensors():
                run()
        else:
            run()
    return seen[::2]  # both layers get the same


EACH = [slice(0, 1), slice(1, 2), slice(2, 3)]


@pytest.mark.parametrize(
    ("model", "padding", "expected"),
    [
        ("tiny-llama", None, [None, None, None, None]),
        ("tiny-llama", 0.01, [None, None, None, None]),  # rounds to no padding
        ("tiny-llama", 0.2, [(3, 1, 8, 8), *3 * [(1, 1, 8, 8)]]),
        ("tiny-mistral", None, [(3, 1, 8, 8), *3 * [(1, 1, 8, 8)]]),  # windows of 6
    ],
)
def test_a_fake_mask_is_treated_as_the_real_one_is(model, padding, expected) -> None:
    fields = {} if padding is None else {"padding": {"fraction": padding}}
    real = masks_given(model, [slice(0, 3), *EACH], fake=False, **fields)

    assert masks_given(model, [slice(0, 3), *EACH], fake=True, **fields) == real == expected


def test_samples_without_padding_are_told_from_padded_ones_of_the_same_batch() -> None:
    fields = {"padding": {"fraction": 0.05}}
    real = masks_given("tiny-llama", EACH, fake=False, **fields)

    assert set(real) == {None, (1, 1, 8, 8)}
    assert masks_given("tiny-llama", EACH, fake=True, **fields) == real


class Reads(TorchDispatchMode):
    """Counts operators that read a tensor's elements on the host, which waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in {aten._local_scalar_dense, aten.nonzero}
        return func(*args, **(kwargs or {}))


def run_as(execution: str, model: str, **fields) -> tuple[int, torch.Tensor]:
    """Return what a forward pass reads on the host, and the logits of tokens."""
    fields |= {"model": f"hf:{model}", "batch_size": 3, "seq_len": 8, "device": "cuda"}
    experiment = make_experiment(**fields, execution=execution)
    torch.manual_seed(0)
    model = build_model(experiment)
    batch = make_batch(model, torch.device("cpu"), experiment)
    with torch.no_grad(), Reads() as reads:
        logits = model(*batch.inputs)
    return reads.count, logits[batch.mask_BT.bool()]


@pytest.mark.parametrize("padding", [None, {"fraction": 0.3}], ids=["whole", "padded"])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2", "tiny-mistral"])
def test_no_forward_of_a_graph_waits_for_the_device(model, padding) -> None:
    fields = {} if padding is None else {"padding": padding}
    of_loop, expected = run_as("eager", model, **fields)
    reads, logits = run_as("graph", model, **fields)

    assert reads == 0
    assert of_loop or model == "tiny-mistral"  # a model with a window has its mask in any case
    assert torch.equal(logits, expected)
