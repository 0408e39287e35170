"""Hugging Face models and peft's adapters: exact, or refused whatever is done to them."""

import copy
import csv
import pickle
from pathlib import Path

import peft
import pytest
import torch
from small_models import assert_exact, is_clear
from torch import nn

from dpprof.ask.questions import make_experiment
from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.planning.stand_ins import StandIn
from dpprof.measure.verification.float32_islands import lift_float32
from dpprof.measure.verification.subjects import describe_case, prepare
from dpprof.private import BookKeeping
from dpprof.private.layers.layers import run_embedding
from dpprof.private.layers.layers_without_rule import run_any_layer
from dpprof.private.layers.patching import is_patched
from dpprof.private.layers.rules import find_rule
from dpprof.private.layers.sample_losses import sample_losses
from dpprof.private.refusals.coverage import trained_in
from dpprof.subjects.batches import make_batch
from dpprof.subjects.methods.training_step import Batch
from dpprof.subjects.models.build import apply_dtype, build_model

ROOT = Path(__file__).parents[2]
MODELS = ["gpt2", "llama", "qwen2", "mistral", "gemma2", "gpt-neox", "opt", "phi"]
IN_16_BITS = {"dtype": "bfloat16", "parameters_dtype": "bfloat16"}
VARIANTS = {
    "whole": {},
    "tied": {"model": "{{hf: tiny-{}, tie_word_embeddings: true}}"},
    "norms": {"trainable": "norm|ln"},
    "head": {"trainable": "head"},
    "adapters": {"lora": "rank=2"},
    "adapters everywhere": {"lora": "rank=2,target_modules=all-linear"},
    "DoRA": {"lora": "rank=2,use_dora=true"},
    "16 bits": {"lora": "rank=2,target_modules=all-linear", **IN_16_BITS},
    "norms in 16 bits": {"trainable": "norm|ln", **IN_16_BITS},
    "reentrant checkpoint": {"lora": "rank=2", "checkpointing": "reentrant"},
    "checkpoint": {"lora": "rank=2", "checkpointing": "non-reentrant"},
}
CHEAP = {
    ("llama", "whole"),
    ("gemma2", "whole"),
    ("llama", "DoRA"),
    ("llama", "reentrant checkpoint"),
    ("gpt2", "16 bits"),
    ("qwen2", "norms in 16 bits"),
}
CASES = [
    case if case in CHEAP else pytest.param(*case, marks=pytest.mark.slow)
    for case in [(name, variant) for name in MODELS for variant in VARIANTS]
]
pytestmark = pytest.mark.filterwarnings("ignore")


def build(name: str, **options: str):
    """Build a model whose weights are away from their initial values, and a padded batch."""
    options = {"model": "hf:tiny-{}", "dtype": "float64", **options}
    options["model"] = options["model"].format(name)
    fixed = {"method": "flash-bk", "batch_size": "3", "seq_len": "7", "device": "cpu"}
    experiment = make_experiment({**fixed, "padding": "0.3", **options})
    torch.manual_seed(0)
    model = apply_dtype(build_model(experiment), experiment, torch.device("cpu")).train()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5
            parameter.add_(noise.to(parameter.dtype))
    return model, make_batch(model, torch.device("cpu"), experiment)


def losses_of(model, batch):
    return sample_losses(model(*batch.inputs), batch.labels)


def compare(model, batch, way=BookKeeping, tolerance: float = 1e-6) -> None:
    run = lambda *parts: losses_of(model, Batch(*parts))  # noqa: E731
    assert_exact(way, model, tuple(batch), run, bound=0.5, tolerance=tolerance)
    for parameter in model.parameters():
        assert parameter.requires_grad or parameter.grad is None
        assert parameter.grad is None or parameter.grad.dtype == parameter.dtype


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_gradients_are_those_of_samples_one_at_a_time(name, variant, way) -> None:
    options = VARIANTS[variant]
    compare(*build(name, **options), way, tolerance=0.03 if "16 bits" in variant else 1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_has_a_fast_rule(name) -> None:
    model, _ = build(name)
    rules = [find_rule(layer).rule for layer in model.modules() if trained_in(layer)]

    assert rules
    assert run_any_layer not in rules


@pytest.mark.parametrize("options", [VARIANTS["16 bits"], VARIANTS["norms in 16 bits"]])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_forward_of_a_model_in_16_bits_stays_the_same(name, options) -> None:
    model, batch = build(name, **options)
    expected = model(*batch.inputs)
    clipping = BookKeeping(model, 1.0)

    assert torch.equal(model(*batch.inputs), expected)
    for layer in model.modules():
        assert is_patched(layer) == bool(trained_in(layer))
    clipping.remove()
    assert torch.equal(model(*batch.inputs), expected)


def wrap(**options):
    """Return a tiny Llama in peft's own wrapper, and a batch."""
    model, batch = build("llama")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **options)
    model.model = peft.get_peft_model(model.model, config)
    return model.double(), batch


def through_pickle(layer):
    return pickle.loads(pickle.dumps(layer))  # noqa: S301 (our own)


def add_second(model) -> None:
    config = peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False)
    model.model.add_adapter("second", config)
    model.model.set_adapter("second")


@pytest.mark.parametrize("is_there", [False, True])
def test_an_adapter_that_is_added_or_chosen_later_is_refused(is_there, way) -> None:
    model, batch = wrap()
    if is_there:
        add_second(model)
        model.model.set_adapter("default")
    clipping = way(model, 1.0)
    clipping.backward(losses_of(model, batch))
    model.zero_grad()
    if is_there:
        model.model.set_adapter("second")
    else:
        add_second(model)

    with pytest.raises(RuntimeError, match=r"second.*is trained and not clipped"):
        clipping.backward(losses_of(model, batch))
    clipping.remove()
    compare(model, batch, way)


def test_disabled_or_merged_adapters_leave_nothing_to_train(way) -> None:
    model, batch = wrap()
    clipping = way(model, 1.0)
    with model.model.disable_adapter(), pytest.raises(RuntimeError):
        clipping.backward(losses_of(model, batch))
    model.model = model.model.merge_and_unload()

    with pytest.raises(RuntimeError):
        clipping.backward(losses_of(model, batch))
    assert is_clear(model)


@pytest.mark.parametrize("modules", [["lm_head"], ["norm"], ["embed_tokens"]])
def test_modules_to_save_are_clipped_with_the_adapters(modules, way) -> None:
    compare(*wrap(modules_to_save=modules), way)


@pytest.mark.parametrize("target", ["lm_head", "q_proj"])
def test_adapters_beside_a_tied_matrix_that_is_trained_too(target, way) -> None:
    model, batch = build("llama", model="{{hf: tiny-{}, tie_word_embeddings: true}}")
    config = peft.LoraConfig(r=2, target_modules=[target], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model.model)
    model.double().requires_grad_(True)
    tied = model.model.model.embed_tokens.weight
    assert sum(tied is p for m in model.modules() for p in m.parameters(recurse=False)) == 2

    compare(model, batch, way)


@pytest.mark.parametrize("make", [copy.deepcopy, through_pickle])
def test_a_copy_of_a_layer_with_its_bases_rule_is_plain(make) -> None:
    model, batch = build("gemma2")
    clipping = BookKeeping(model, 1.0)
    table = next(layer for layer in model.modules() if isinstance(layer, nn.Embedding))
    other = make(table)
    tokens = batch.inputs[0]

    assert find_rule(other) == (run_embedding, nn.Embedding)  # it is not patched
    assert torch.equal(other(tokens), table(tokens))
    other(tokens).sum().backward()
    assert other.weight.grad.any()
    clipping.remove()
    assert type(table) is type(other)
    assert not is_patched(table)


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma3", "Olmo2"])
def test_norms_of_heads_have_a_fast_rule(kind) -> None:
    module = pytest.importorskip(f"transformers.models.{kind.lower()}.modeling_{kind.lower()}")
    norm = getattr(module, f"{kind}RMSNorm")(4)
    assert find_rule(norm).rule is not run_any_layer


with (ROOT / "docs/numbers/data/architectures.csv").open(encoding="utf-8", newline="") as file:
    ARCHITECTURES = [
        row["architecture"] for row in csv.DictReader(file) if row["whole"] == "verified"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_first_batch_of_an_architecture_is_verified(kind, way) -> None:
    experiment = describe_case(
        StandIn(model=Architecture(hf=kind, model_type=kind)), "flash", "sdpa", 4
    )
    with lift_float32():
        model, batch = prepare(experiment)[1:3]
        clipping = way(model, 0.5)
        clipping.backward(losses_of(model, batch))

    assert clipping.first_batch_verified
