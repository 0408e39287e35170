"""Clipping beside quantised frozen layers: exact, or refused where samples mix."""

from functools import partial

import peft
import pytest
import torch
from quantized_models import (
    B,
    bitsandbytes,
    build_qlora,
    losses_of,
    plain_gradient_of_rank,
    quantized_layers,
    step_of_rank,
)
from small_models import FLAT, assert_exact, gradients, one_by_one, take_step
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpprof.private import (
    BookKeeping,
    FlashClipping,
    PerLayerClipping,
    UnsupportedError,
    make_private,
)
from dpprof.private.layers.quantized_layers import refuse_quantized

QUICK = [("llama", "nf4-double", BookKeeping), ("gemma2", "int8", FlashClipping)]
SLOW = [
    pytest.param(name, quantization, way, marks=pytest.mark.slow)
    for name in ("llama", "qwen2", "gemma2", "opt")
    for quantization in ("nf4", "nf4-double", "fp4", "fp4-double", "int8")
    for way in FLAT
    if (name, quantization, way) not in QUICK
]


def like_cuda(monkeypatch) -> None:
    """Have int8 layers quantise their inputs too, as on a GPU, by bitsandbytes' own code."""
    product = bitsandbytes.autograd._functions.MatMul8bitLt
    run = lambda x, w, bias, state: product.apply(x, w, None, bias, state)  # noqa: E731
    monkeypatch.setattr(bitsandbytes, "matmul", run)


@pytest.mark.parametrize(("name", "quantization", "way"), [*QUICK, *SLOW])
def test_each_sample_is_clipped_as_it_would_be_alone(name, quantization, way) -> None:
    model, batch = build_qlora(name, quantization)

    # The base computes in float32, of which a product over at most 80 numbers rounds this much.
    assert_exact(way, model, batch, partial(losses_of, model), tolerance=3e-6)


@pytest.mark.parametrize(
    ("quantization", "way"),
    [("nf4", BookKeeping)]
    + [
        pytest.param(quantization, way, marks=pytest.mark.slow)
        for quantization in ("nf4-double", "int8")
        for way in FLAT
    ],
)
def test_vectors_that_scale_a_quantised_base_are_clipped_alone(quantization, way) -> None:
    model, batch = build_qlora("llama", quantization, lora="ia3")

    assert_exact(way, model, batch, partial(losses_of, model), tolerance=3e-6)


def test_each_sample_is_clipped_alone_where_its_inputs_are_quantised_too(monkeypatch) -> None:
    like_cuda(monkeypatch)
    model, batch = build_qlora("llama", "int8")

    assert_exact(BookKeeping, model, batch, partial(losses_of, model), tolerance=3e-6)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_samples_of_any_size_stay_within_the_bound(quantization) -> None:
    """Also one whose squared norm is beyond float32."""
    model, batch = build_qlora("llama", quantization)
    sizes, bound = torch.tensor([1e-30, 1e30, 1e15, 1.0]), 0.1
    norms, _, _ = one_by_one(partial(losses_of, model), model, batch)
    clipping = BookKeeping(model, bound)
    clipping.backward(losses_of(model, *batch) * sizes)

    assert clipping.nonfinite_samples == 0
    assert gradients(model).norm() <= 3 * bound * (1 + 1e-6)  # of the three that are large
    expected = norms.float()[2:] * sizes[2:]
    assert torch.allclose(clipping.sample_norms[2:], expected, rtol=1e-5)


def gradient_of_first(model: nn.Module, batch, rows: slice) -> torch.Tensor:
    loss = losses_of(model, *(one[rows] for one in batch))[0]
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss, trained)])


@pytest.mark.parametrize("quantization", ["nf4", "fp4-double", "int8"])
def test_a_gradient_is_the_same_whatever_other_samples_a_batch_has(
    quantization, monkeypatch
) -> None:
    like_cuda(monkeypatch)
    model, batch = build_qlora("llama", quantization)
    alone, beside = (gradient_of_first(model, batch, slice(n)) for n in (1, B))
    few = 1e-6 * alone.norm()  # float32 products of more rows add in another order

    assert alone.norm() > 0
    assert (alone - beside).norm() <= few


def test_with_a_threshold_a_gradient_would_depend_on_other_samples(monkeypatch) -> None:
    """Which is why it is refused: beside another sample this one is rounded otherwise."""
    like_cuda(monkeypatch)
    model, batch = build_qlora("llama", "int8")
    for layer in quantized_layers(model).values():
        layer.state.threshold = 2.0
    alone, beside = (gradient_of_first(model, batch, slice(n)) for n in (1, 2))

    assert (alone - beside).norm() > 1e-4 * alone.norm()


def small(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Linear(64, 2))


def int8(threshold: float = 0.0, **options) -> nn.Module:
    options = {"has_fp16_weights": False} | options
    return bitsandbytes.nn.Linear8bitLt(64, 64, threshold=threshold, **options)


def nf4() -> nn.Module:
    return bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4", compute_dtype=torch.float32)


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False).to("cpu")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: frozen(int8(6.0)), "Linear8bitLt has a threshold of 6.0: columns of its input"),
        (lambda: int8(has_fp16_weights=True), "of Linear8bitLt is trained, and a layer with a"),
        (lambda: nf4().to("cpu"), "bias of Linear4bit is trained, and a layer with a quantised"),
    ],
)
@pytest.mark.parametrize("way", [BookKeeping, PerLayerClipping])
def test_what_mixes_samples_or_trains_a_quantised_weight_is_refused(make, said, way) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        way(small(make()), 1.0)

    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_other_formats_are_refused_by_name() -> None:
    model = small(nn.Linear(64, 64).requires_grad_(False))
    model.quantization_method = "gptq"
    adapter = type("AwqLoraLinear", (nn.Module,), {"__module__": "peft.tuners.lora.awq"})
    tensor = type("Float8Tensor", (nn.Parameter,), {"__module__": "torchao.quantization"})
    layer = nn.Linear(2, 2)
    layer.weight = tensor(torch.ones(2, 2), requires_grad=False)

    for module, name in ((model, "gptq"), (adapter(), "awq"), (layer, "torchao")):
        with pytest.raises(UnsupportedError, match=f"is quantised by {name}, of which it is not"):
            refuse_quantized(module)
    refuse_quantized(nn.Linear(2, 2))


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_adapters_that_compute_with_the_quantised_weight_itself_are_refused(quantization) -> None:
    model, batch = build_qlora("llama", quantization)
    dora = peft.LoraConfig(r=2, target_modules=["o_proj"], use_dora=True)
    peft.inject_adapter_in_model(dora, model.model, adapter_name="dora")
    clipping = BookKeeping(model, 1.0)

    said = r"o_proj computes with .* of a Linear[48]bit"
    with pytest.raises(UnsupportedError, match=said) as told:
        clipping.backward(losses_of(model, *batch))
    assert "\n" not in str(told.value)


def test_a_threshold_that_is_set_later_is_refused_at_the_next_forward() -> None:
    model = small(frozen(int8()))
    BookKeeping(model, 1.0)
    model(torch.ones(2, 64))
    model[0].state.threshold = 6.0

    with pytest.raises(UnsupportedError, match=r"has a threshold of 6\.0"):
        model(torch.ones(2, 64))


def test_gradients_are_the_same_after_an_evaluation() -> None:
    """Some CPUs pack a weight for inference, and then nothing flows back through it."""
    model = nn.Sequential(nn.Linear(64, 64), frozen(nf4()))
    clipping, x = BookKeeping(model, 1.0), torch.randn(2, 64)
    clipping.backward(model(x).sum(1))
    before = clipping.sample_norms
    with torch.no_grad():
        model.eval()(x)
    model.train().zero_grad()
    clipping.backward(model(x).sum(1))

    assert before.min() > 0
    assert torch.equal(clipping.sample_norms, before)
    model[1].weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(RuntimeError, match="packed for inference") as refusal:
        model(x)
    assert "\n" not in str(refusal.value)


def test_make_private_trains_adapters_over_a_quantised_base() -> None:
    model, batch = build_qlora("llama", "nf4")
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    loader = DataLoader(TensorDataset(*batch), batch_size=2)
    optimizer = bitsandbytes.optim.AdamW8bit(trained)
    of_model = partial(losses_of, model)
    private = make_private(
        model, optimizer, loader, of_model, noise_multiplier=1.0, max_grad_norm=1.0
    )
    for rows in private.data_loader:
        take_step(private.optimizer, of_model(*rows))

    assert all(not torch.equal(p, old) for p, old in zip(trained, before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["nf4-double", "int8"])
def test_replicas_on_two_ranks_take_the_step_of_one(quantization, pools) -> None:
    steps = pools[2].compute(step_of_rank, quantization, 0.3)

    for moved, expected in steps:
        assert (moved - expected).norm() <= 5e-6 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["nf4", "nf4-double"])
def test_shards_on_two_ranks_have_the_plain_gradient_of_one(quantization, pools) -> None:
    for sharded, whole in pools[2].compute(plain_gradient_of_rank, quantization):
        torch.testing.assert_close(sharded, whole, rtol=1e-5, atol=1e-7)


def test_after_remove_the_layers_are_what_they_were() -> None:
    model = small(frozen(nf4()))
    BookKeeping(model, 1.0).remove()

    assert type(model[0]) is bitsandbytes.nn.Linear4bit
