"""FLOPs and bytes against formulas, in units that can be checked by hand."""

import functools
import math
import re
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml
from factory import MICRO, make_experiment
from memory_steps import executed, keep, linears

from dpprof.experiments.config import registry
from dpprof.experiments.config.target import Target
from dpprof.predict.estimate import trace_steps
from dpprof.predict.flops.op_costs import learn_rule
from dpprof.predict.flops.op_families import family_of
from dpprof.predict.memory.events import Op
from dpprof.predict.memory.recorder import Recorder
from dpprof.predict.memory.summary import bound_step_s, state_io
from dpprof.predict.plain_step import count_model_flops
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.models.build import build_model

aten = torch.ops.aten
OPERATORS = yaml.safe_load(Path(__file__).with_name("operator_names.yaml").read_text())
B, D, LAYERS = 2, 64, 2


STEP = functools.partial(linears, D, LAYERS)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_transformers_step_by_formula_attention_included(attention) -> None:
    """Fused attention recomputes the scores in its backward pass: one product of five."""
    d, layers, vocab, seq_len = 8, 1, 16, 32
    fields = {"seq_len": seq_len, "attention": attention}
    model = build_model(make_experiment(**fields))
    products = 4 + 10 if attention == "sdpa" else 4 + 8

    step = keep("standard", lambda: model, batch_size=B, **fields)
    assert executed(step) == (
        6 * B * seq_len * (12 * d * d * layers + d * vocab)
        + products * layers * B * seq_len * seq_len * d
    )


GPT2 = 2 * 12 * 32 * 32 + 32 * 211
LLAMA = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 80) + 32 * 211
"""Weights of matrices of the tiny models; two heads of keys and values serve four of queries."""


@pytest.mark.parametrize(
    ("model", "weights", "attention"),
    [
        (MICRO, 12 * 8 * 8 + 8 * 16, 12 * 1 * 8),
        ("hf:tiny-gpt2", GPT2, 12 * 2 * 32),
        ({"hf": "tiny-llama", "tie_word_embeddings": True}, LLAMA, 12 * 2 * 32),
    ],
    ids=str,
)
def test_model_flops_follow_palm(model, weights, attention) -> None:
    experiment = make_experiment(model=model, batch_size=B, seq_len=32)

    assert count_model_flops(experiment, build_model(experiment)) == (
        B * 32 * (6 * weights + attention * 32)
    )


def test_frozen_matrices_cost_two_products_of_three_and_padding_nothing() -> None:
    fields = {"lora": {"rank": 2, "target_modules": ["q_proj"]}, "padding": {"fraction": 0.5}}
    experiment = make_experiment(model="hf:tiny-llama", batch_size=2, seq_len=32, **fields)
    adapters = 2 * 2 * (32 + 32)

    assert sorted(experiment.sample_lengths(2)) == [8, 24]
    assert count_model_flops(experiment, build_model(experiment)) == sum(
        T * (4 * LLAMA + 6 * adapters + 12 * 2 * 32 * T) for T in (8, 24)
    )


def test_a_model_with_experts_has_no_model_flops() -> None:
    config = {"hf": "experts", "model_type": "mixtral", "vocab_size": 50, "hidden_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"intermediate_size": 8, "num_local_experts": 2}
    experiment = make_experiment(model=config, batch_size=1)

    assert count_model_flops(experiment, build_model(experiment)) is None


SIZES = {
    "mm": [(3, 5), (5, 7)],
    "bmm": [(2, 3, 5), (2, 5, 7)],
    "addmm": [(3, 7), (3, 5), (5, 7)],
    "_addmm_activation": [(3, 7), (3, 5), (5, 7)],
    "baddbmm": [(2, 3, 7), (2, 3, 5), (2, 5, 7)],
    "addbmm": [(3, 7), (2, 3, 5), (2, 5, 7)],
    "mv": [(3, 5), (5,)],
    "addmv": [(3,), (3, 5), (5,)],
    "dot": [(5,), (5,)],
}


@pytest.mark.parametrize("name", SIZES)
def test_products_in_place_and_into_a_result_cost_what_they_cost_otherwise(name) -> None:
    *_, left, right = SIZES[name]
    tensors, packet = [torch.ones(shape) for shape in SIZES[name]], getattr(aten, name)
    found = packet.default(*tensors)
    flops = 2 * math.prod(left) * (right[-1] if len(right) > 1 else 1)
    calls = [(packet.default, {}), (packet.out, {"out": torch.empty_like(found)})]
    calls += [(in_place.default, {}) for in_place in [getattr(aten, f"{name}_", None)] if in_place]
    for func, named in calls:
        cost, reads, writes = learn_rule(func).price(tensors, named, found)
        assert (cost.family, cost.flops, cost.dtype) == ("matmul", flops, "float32"), func
        assert sum(size for _, size in reads) == sum(one.nbytes for one in tensors), func
        assert sum(size for _, size in writes) == found.nbytes, func


def test_products_of_groups_cost_what_all_of_them_do() -> None:
    shape_of = learn_rule(aten._grouped_mm.default).shape_of

    assert shape_of(torch.ones(6, 5), torch.ones(2, 5, 7)) == (1, 6, 7, 5)
    assert shape_of(torch.ones(2, 3, 5), torch.ones(2, 5, 7)) == (2, 3, 7, 5)


def test_a_product_without_a_formula_says_so() -> None:
    known, unknown = aten.mm.default, aten._weight_int8pack_mm.default
    a, b = torch.ones(4, 32), torch.ones(32, 16)

    assert not learn_rule(known).price((a, b), {}, known(a, b))[0].formula_unknown
    cost = learn_rule(unknown).price((a, b, torch.ones(16)), {}, known(a, b))[0]
    assert (cost.family, cost.flops, cost.formula_unknown) == ("matmul", 0, True)


CALLED_PRODUCT = re.compile(
    r"(^|_)(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|vdot|linear|matmul|convolution|einsum|attention)"
    r"(_|$)"
)


def test_no_operator_that_is_called_a_product_is_something_else() -> None:
    called = {one.name for one in torch._C._jit_get_all_schemas() if one.name.startswith("aten::")}
    families = {
        name: family_of(name)
        for name in called
        if CALLED_PRODUCT.search(name.removeprefix("aten::"))
    }

    assert {"aten::baddbmm_", "aten::_grouped_mm", "aten::_cudnn_attention_forward"} < set(families)
    assert set(families.values()) == {"matmul", "attention", None}


@pytest.mark.parametrize("family", OPERATORS)
def test_families_of_operators(family) -> None:
    names = [one if "::" in one else f"aten::{one}" for one in OPERATORS[family].split()]

    assert {name: family_of(name) for name in names} == dict.fromkeys(names, family)


def test_families_of_other_namespaces() -> None:
    assert family_of("dpprof::gram_squares") == "matmul"
    for name in ("aten::__upsample_bilinear", "AddmmBackward0", "no::such"):
        assert family_of(name) is None


SMALL = {"vocab_size": 50, "d_model": 16, "layers": 1, "heads": 2}
NO_AUTOCAST = {("opacus-per-layer", "bfloat16"), ("opacus-ew", "bfloat16")}
PLACES = {"cpu": {"device": "cpu"}, "h200": {"device": "cuda", "target": "h200"}}


def trace(**fields):
    usual = {"model": SMALL, "batch_size": 3, "seq_len": 16, "noise_multiplier": 0.1}
    return trace_steps(make_experiment(**usual | fields), lambda _: None)


QUICK = {("flash-bk", "h200", "bfloat16"), ("opacus-ghost", "cpu", "float32")}
QUICK |= {("per-layer", "cpu", "float32"), ("opacus-ew", "h200", "bfloat16")}


@pytest.mark.parametrize(
    ("method", "place", "dtype"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(registry.names("methods"), PLACES, ("float32", "bfloat16"))
    ],
)
def test_every_product_of_every_method_is_counted(method, place, dtype) -> None:
    if (method, dtype) in NO_AUTOCAST:
        with pytest.raises(UnsupportedError):
            trace(method=method, dtype=dtype, **PLACES[place])
        return
    costs = [op.cost for op in trace(method=method, dtype=dtype, **PLACES[place]).steady.ops]
    families = {cost.op: cost.family for cost in costs if CALLED_PRODUCT.search(cost.op)}

    assert len(families) > 2
    assert set(families.values()) <= {"matmul", "attention"}


@pytest.mark.parametrize(
    ("method", "place"),
    [
        pytest.param(*case, marks=() if case == ("flash-bk", "h200") else pytest.mark.slow)
        for case in product(("standard", "flash", "flash-bk"), PLACES)
    ],
)
def test_products_in_bfloat16_are_as_many_flops_as_in_float32(method, place) -> None:
    """A sample's gradients are larger than what they are made of, so none is made."""
    fields = {"model": SMALL | {"d_model": 64}, "seq_len": 8, "method": method}
    traced = [trace(**fields, **PLACES[place], dtype=dtype) for dtype in ("float32", "bfloat16")]
    plans = [one.facts.norm_plan or {} for one in traced]
    ways = [{name: choice.way for name, choice in plan.items()} for plan in plans]

    assert ways[0] == ways[1]
    assert executed(traced[0].steady) == executed(traced[1].steady) > 0


def test_bytes_of_elementwise_reductions_lookups_and_copies() -> None:
    x, table = torch.ones(4, 8), torch.ones(100, 8)
    ids = torch.tensor([1, 2, 3])

    for func, args, expected in [
        (aten.add.Tensor, (x, x), ("elementwise", 32, 256, 128)),
        (aten.add_.Tensor, (x, x), ("elementwise", 32, 256, 128)),
        (aten.sum.default, (x,), ("reduction", 32, 128, 4)),
        (aten.embedding.default, (table, ids), ("indexing", 0, 3 * 32 + 24, 3 * 32)),
        (aten.clone.default, (x,), ("copy", 0, 128, 128)),
        (aten.zero_.default, (x,), ("copy", 0, 0, 128)),
        # Of these only shape, dtype and device of the argument matter.
        (aten.new_zeros.default, (x, [2]), ("copy", 0, 0, 8)),
        (aten.zeros_like.default, (x,), ("copy", 0, 0, 128)),
        # An expanded axis is read once.
        (aten.add.Tensor, (x, torch.ones(1, 8).expand(4, 8)), ("elementwise", 32, 160, 128)),
    ]:
        cost, *sides = learn_rule(func).price(args, {}, func(*args))
        moved = (sum(size for _, size in side) for side in sides)
        assert (cost.family, cost.flops, *moved) == expected, func


def test_views_and_questions_about_dtypes_and_shapes_are_no_operators() -> None:
    with Recorder(is_there=lambda *_: True) as recorder:
        x = torch.ones(3)
        recorder.counting = True
        x.view(1, 3).t()
        torch.promote_types(x.dtype, torch.float64)
        torch.result_type(x, 1.0)
        torch.can_cast(torch.float32, torch.int64)
        x.is_pinned()
        assert torch.equal(x, x)

    assert [event.cost.op for event in recorder.events if isinstance(event, Op)] == ["equal"]


@pytest.mark.parametrize("method", ["flash", "flash-bk", "per-layer", "opacus-adaptive"])
def test_every_operator_of_a_step_has_a_family_and_moves_bytes(method) -> None:
    ops = keep(method, STEP, seq_len=16).ops

    assert all(op.cost.family != "other" for op in ops)
    assert all(op.reads or op.writes for op in ops)


def test_the_roofline_takes_what_binds() -> None:
    step = keep("standard", STEP, seq_len=64)
    moved = state_io(step, 1)

    def bound(flops_per_s: float, bytes_per_s: float) -> float:
        speeds = {"flops_per_s": flops_per_s, "bandwidth_bytes_per_s": bytes_per_s}
        return bound_step_s(step.ops, "float32", Target(memory_bytes="1GiB", **speeds))

    assert bound(1e30, 1e9) == pytest.approx((moved.bytes_read + moved.bytes_written) / 1e9)
    assert bound(1e9, 1e30) == pytest.approx(executed(step) / 1e9)


def test_tallies_agree_with_the_total() -> None:
    io = state_io(keep("opacus-ghost", STEP, seq_len=16), 10)

    for parts in (io.by_phase, io.by_op_kind, io.by_module, io.by_component):
        assert sum(part.read for part in parts.values()) == io.bytes_read
        assert sum(part.written for part in parts.values()) == io.bytes_written
    assert io.arithmetic_intensity == pytest.approx(10 / (io.bytes_read + io.bytes_written))


@pytest.mark.parametrize(
    ("columns", "dtype", "aligned"),
    [
        (50_257, torch.bfloat16, False),
        (50_264, torch.bfloat16, True),
        (50_260, torch.bfloat16, False),
        (50_260, torch.float32, True),
        (50_257, torch.float32, False),
    ],
)
def test_products_say_whether_rows_begin_on_sixteen_bytes(columns, dtype, aligned) -> None:
    """A row of 8 numbers of 2 bytes, or 4 of 4 bytes, fills 16 bytes."""
    x, weight = (torch.empty(rows, 16, dtype=dtype, device="meta") for rows in (5, columns))
    logits = x @ weight.t()
    rule = learn_rule(aten.mm.default)
    products = [(x, weight.t(), logits), (logits.t(), x, weight), (logits, weight, x)]

    assert [rule.price((a, b), {}, out)[0].is_aligned for a, b, out in products] == [aligned] * 3
    assert rule.price((weight, x.t(), logits.t()), {}, logits.t())[0].is_aligned == aligned
    assert learn_rule(aten.add.Tensor).price((logits, logits), {}, logits)[0].is_aligned


@pytest.mark.parametrize("mask", [[True, True, True], [True, True, False], [True, False, False]])
def test_gradients_of_a_norms_scale_read_its_operands_again(mask) -> None:
    x, weight = torch.ones(3, 4), torch.ones(4)
    mean = torch.ones(3, 1)
    rule = learn_rule(aten.native_layer_norm_backward.default)
    given = (x, x, [4], mean, mean, weight, weight)
    out = rule.packet(*given, mask)

    assert rule.price((*given, mask), {}, out)[0].reads_again == any(mask[1:])
    assert rule.price(given, {"output_mask": mask}, out)[0].reads_again == any(mask[1:])
    assert not learn_rule(aten.add.Tensor).price((x, x), {}, x)[0].reads_again
