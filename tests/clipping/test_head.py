"""A head without logits has the losses, norms and clipped sums of one with logits."""

import itertools
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from documents import PRIVATE_TRAINING, find_code
from simulated_graphs import simulated_graphs
from small_models import EVERY, FLAT, TINY, assert_exact, gradients, one_by_one, private
from torch import Tensor, nn
from torch.nn import functional

from dpprof.predict.memory.recorder import Recorder
from dpprof.private import (
    BookKeeping,
    CapturedStep,
    PerLayerClipping,
    Segments,
    UnsupportedError,
    linear_cross_entropy,
)
from dpprof.private.contributions import contributions
from dpprof.private.layers import head, head_losses
from dpprof.private.norms.code_paths import Way

B, T, D, V = 5, 7, 6, 11
OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.2},
    "capped": {"softcap": 3.0},
    "scaled": {"scale": 0.3},
    "kept": {"keep": True},
    "all": {"label_smoothing": 0.1, "softcap": 2.0, "scale": 1.7, "ignore_index": 4, "keep": True},
}


@pytest.fixture(autouse=True, params=[1, 2**28])
def chunks(request, monkeypatch):
    """Chunks of one token and of one sample, and chunks of everything."""
    monkeypatch.setattr(head, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(contributions, "AT_ONCE_BYTES", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_a_sum_are_added_up_in_the_memory_of_the_first(monkeypatch, dtype) -> None:
    monkeypatch.setattr(contributions, "AT_ONCE_BYTES", 1)
    x_BTd, g_BTp = torch.randn(B, T, D).to(dtype), torch.randn(B, T, V).to(dtype)
    weights_B = torch.rand(B)
    chunks = contributions.ChunkedProduct(x_BTd, lambda some: g_BTp[some].clone(), V, ())
    with Recorder(is_there=lambda *_: True) as recorder:
        summed = chunks.sum(weights_B)

    expected = torch.einsum("b,btp,btd->pd", weights_B, g_BTp.float(), x_BTd.float())
    torch.testing.assert_close(summed, expected, rtol=1e-5, atol=1e-5)
    assert sum(storage.nbytes == summed.nbytes for storage in recorder.storages) == 1


class Model(nn.Module):
    """An embedding, a layer and a head, which may be tied, frozen or have a bias."""

    def __init__(self, kind: str = "trained", **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, D)
        self.layer = nn.Linear(D, D)
        self.head = nn.Linear(D, V, bias=kind == "bias")
        if kind == "tied":
            self.head.weight = self.embedding.weight
        if kind == "frozen":
            self.head.requires_grad_(requires_grad=False)
        self.options = options

    def hidden(self, ids: Tensor) -> Tensor:
        return self.layer(self.embedding(ids)).tanh()

    def in_chunks(self, ids: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        losses = linear_cross_entropy(self.hidden(ids), self.head, labels, **self.options)
        return (losses * weights).mean(1)

    def with_logits(self, ids: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        given = dict(self.options)
        scale, cap = given.pop("scale", 1.0), given.pop("softcap", None)
        given.pop("keep", None)
        logits = self.head(self.hidden(ids)) * scale
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        losses = functional.cross_entropy(logits.mT, labels, reduction="none", **given)
        return (losses * weights).mean(1)


def batch(dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(V, (2, B, T), generator=generator)
    labels[1, 2:] = -100
    labels[3] = -100
    return ids, labels, torch.rand(B, T, generator=generator).to(dtype)


KINDS = ("trained", "bias", "tied", "frozen")


def assert_same_without_clipping(model: Model, inputs) -> None:
    found, expected = model.in_chunks(*inputs), model.with_logits(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    sums = []
    for losses in (found, expected):
        losses.sum().backward()
        sums.append(gradients(model))
        model.zero_grad()
    torch.testing.assert_close(*sums, rtol=1e-10, atol=1e-13)


def batch_for(options: str) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a batch in which no label is -100 where that is not what is ignored."""
    ids, labels, weights = batch()
    return ids, labels.clamp(0) if "ignore_index" in OPTIONS[options] else labels, weights


@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("kind", KINDS)
def test_without_clipping_it_is_an_ordinary_loss(kind, options) -> None:
    assert_same_without_clipping(Model(kind, **OPTIONS[options]).double(), batch_for(options))


@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_sums_are_those_of_one_sample_at_a_time(kind, options) -> None:
    ids, labels, weights = batch_for(options)
    exact = Model(kind, **OPTIONS[options]).double()
    expected = one_by_one(exact.with_logits, exact, (ids, labels, weights))
    limits = {torch.float64: 1e-10, torch.float32: 1e-5}
    for way, (dtype, limit) in itertools.product(FLAT, limits.items()):
        model = Model(kind, **OPTIONS[options]).to(dtype)
        inputs = ids, labels, weights.to(dtype)
        assert_exact(way, model, inputs, model.in_chunks, expected=expected, tolerance=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_measured_and_summed_to_the_same_bits(way, dtype, monkeypatch) -> None:
    """Two samples in a chunk, the last one alone: products of other sizes may round otherwise."""
    for module, name in ((head, "CHUNK_BYTES"), (contributions, "AT_ONCE_BYTES")):
        monkeypatch.setattr(module, name, 2 * T * V * dtype.itemsize)
    real, found = head_losses._differentiate, []

    def differentiate(*given):
        g_NV, lse_N = real(*given)
        found.append(g_NV.clone())
        return g_NV, lse_N

    monkeypatch.setattr(head_losses, "_differentiate", differentiate)
    ids, labels, weights = batch(dtype)
    model = Model().to(dtype)
    way(model, 0.1, first_batch="trusted").backward(model.in_chunks(ids, labels, weights))

    in_forward, again = found[:3], found[3:]
    assert [len(g_NV) for g_NV in in_forward] == [2 * T, 2 * T, T]
    assert again
    for at, g_NV in enumerate(again):
        assert torch.equal(g_NV, in_forward[at % 3])


@pytest.mark.parametrize("excluded", [0, 1])
def test_kept_output_gradients_turn_into_those_of_samples_and_are_freed(
    excluded, monkeypatch
) -> None:
    """With more tokens than columns the gradients of samples are smaller."""
    made, left = [], []
    make, release = head._make_kept, head._Kept.release

    def watch(*given):
        kept_NV = make(*given)
        made.append(weakref.ref(kept_NV))
        return kept_NV

    def count(*given):
        release(*given)
        left.append(sum(one() is not None for one in made))

    monkeypatch.setattr(head, "_make_kept", watch)
    monkeypatch.setattr(head._Kept, "release", count)
    ids, labels, weights = batch()
    model = Model(keep=True).double()
    counted = (ids[excluded:], labels[excluded:], weights[excluded:])
    norms, expected, _ = one_by_one(model.with_logits, model, counted, 0.1)
    weights[:excluded] = math.inf
    clipping = BookKeeping(model, 0.1)
    clipping.backward(model.in_chunks(ids, labels, weights))

    assert clipping.plan["head.weight"].way is Way.KEPT
    assert len(made) in {1, B}
    assert left == list(reversed(range(len(made))))
    torch.testing.assert_close(clipping.sample_norms[excluded:], norms, rtol=1e-10, atol=0)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-10, atol=1e-13)


FORMS = {  # of two rows for each sample, (B, 2, T, ...), and back
    "one after another": (lambda rows: rows.flatten(0, 1), lambda losses: losses.view(-1, 2)),
    "in blocks": (lambda rows: torch.cat([*rows.unbind(1)]), lambda losses: losses.view(2, -1).T),
}


@pytest.mark.parametrize("at_once", [1, 2, 3, 5])
@pytest.mark.parametrize("form", [*FORMS, "of users"])
@pytest.mark.parametrize("width", [2, 20])  # with gradients of samples that are kept, and without
def test_kept_gradients_of_several_rows_of_a_sample(form, at_once, width, way, monkeypatch) -> None:
    monkeypatch.setattr(contributions, "AT_ONCE_BYTES", at_once * T * V * 8)
    model = nn.Sequential(nn.Linear(D, width), nn.Linear(width, V)).double()
    join, split = FORMS.get(form, FORMS["one after another"])
    x, labels = torch.randn(B, 2, T, D).double(), torch.randint(V, (B, 2, T))

    def losses_of(x, labels):
        losses = linear_cross_entropy(model[0](join(x)), model[1], join(labels), keep=True).mean(1)
        return losses if form == "of users" else split(losses).mul(torch.tensor([1, -0.5])).sum(1)

    def each(x, labels):
        return (
            losses_of(x, labels).view(-1, 2).mean(1) if form == "of users" else losses_of(x, labels)
        )

    norms, expected, _ = one_by_one(each, model, (x, labels), 0.1)
    clipping = way(model, 0.1)
    clipping.backward(
        losses_of(x, labels), users=Segments((2,) * B) if form == "of users" else None
    )
    torch.testing.assert_close(clipping.sample_norms, norms, rtol=1e-9, atol=0)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)


def adapt(model: Model) -> Model:
    """Add LoRA to the head, with adapters that are not zero."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["head"], r=2, lora_alpha=3)
    peft.inject_adapter_in_model(config, model)
    nn.init.normal_(model.head.lora_B["default"].weight)
    model.embedding.requires_grad_()
    model.layer.requires_grad_()
    return model


@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("way", [None, *FLAT])
@pytest.mark.parametrize("kind", ["trained", "bias"])
def test_a_head_with_lora_is_that_of_its_logits(kind, way, options) -> None:
    ids, labels, weights = batch()
    inputs = ids, labels.clamp(0), weights
    model = adapt(Model(kind, **OPTIONS[options])).double()
    if way is None:
        assert_same_without_clipping(model, inputs)
    else:
        expected = one_by_one(model.with_logits, model, inputs)
        assert_exact(way, model, inputs, model.in_chunks, expected=expected, tolerance=1e-10)


def test_a_head_whose_adapter_computes_something_else_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = Model()
    config = peft.LoraConfig(target_modules=["head"], r=2, use_dora=True)
    peft.inject_adapter_in_model(config, model)
    with pytest.raises(TypeError, match="needs one active adapter, plain and not merged"):
        model.in_chunks(*batch(torch.float32))


@pytest.mark.parametrize("kind", ["trained", "bias", "frozen"])
def test_per_layer_clipping_clips_the_head_as_with_logits(kind) -> None:
    found = []
    for losses_of in (Model.in_chunks, Model.with_logits):
        model = Model(kind).double()
        clipping = PerLayerClipping(model, 0.1)
        clipping.backward(losses_of(model, *batch()))
        found.append((gradients(model), clipping.sample_norms))

    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_it_is_no_further_from_the_truth_than_logits_are(kind, keep) -> None:
    ids, labels, weights = batch()
    exact = Model(kind).double()
    _, expected, bound = one_by_one(exact.with_logits, exact, (ids, labels, weights))
    errors = []
    for losses_of in (Model.in_chunks, Model.with_logits):
        model = Model(kind, keep=keep)
        clipping = BookKeeping(model, bound)
        with torch.autocast("cpu", torch.bfloat16):
            losses = losses_of(model, ids, labels, weights.float())
        clipping.backward(losses.float())
        errors.append(float((gradients(model) - expected).norm() / expected.norm()))

    assert errors[0] <= 1.5 * errors[1] + 1e-3


def differentiate_in_place(z_NV, labels_N, incoming_N, *options) -> Tensor:
    """What the kernel does, which tests/norms compare with the definition."""
    ignored, smoothing, scale, cap = options
    loss = head_losses.HeadLoss(labels_N, ignored, smoothing, cap, scale)
    exact_NV = head_losses._scale_and_cap(z_NV.float(), loss)
    target_N = head_losses._find_target(exact_NV, labels_N, loss)
    g_NV, lse_N = head_losses._differentiate(exact_NV, labels_N, loss)
    z_NV.copy_(g_NV if incoming_N is None else g_NV * incoming_N[:, None])
    return (lse_N - target_N).masked_fill_(labels_N == ignored, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_may_put_gradients_in_the_place_of_logits(kind, keep, dtype, monkeypatch) -> None:
    kernels = {"is_fused": lambda _: True, "differentiate_cross_entropy_": differentiate_in_place}
    options = OPTIONS["all"] | {"keep": keep}
    ids, labels, weights = batch()
    labels = labels.clamp(0)
    exact = Model(kind, **options).double()
    norms, expected, bound = one_by_one(exact.with_logits, exact, (ids, labels, weights))
    found = []
    for is_fused in (False, True):
        if is_fused:
            monkeypatch.setattr(head_losses, "triton_ops", SimpleNamespace(**kernels))
        model = Model(kind, **options)
        clipping = BookKeeping(model, bound)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            losses = model.in_chunks(ids, labels, weights.float())
        clipping.backward(losses.float())
        wrong = (gradients(model) - expected).norm() / expected.norm()
        found.append(float(wrong + (clipping.sample_norms - norms).norm() / norms.norm()))

    assert found[1] <= 1.5 * found[0] + 1e-5


@pytest.mark.parametrize("way", EVERY)
def test_a_sample_that_is_not_finite_is_excluded(way) -> None:
    model = Model()
    clipping = way(model, 0.1)
    ids, labels, weights = batch(torch.float32)
    silent = weights.clone()
    silent[2] = 0
    clipping.backward(model.in_chunks(ids, labels, silent))
    expected = gradients(model)
    model.zero_grad()
    weights[2, 1] = math.nan
    clipping.backward(model.in_chunks(ids, labels, weights))

    assert clipping.nonfinite_samples == 1
    torch.testing.assert_close(gradients(model), expected, rtol=1e-5, atol=1e-8)


def test_mixing_before_the_loss_is_refused_on_the_first_batch(way) -> None:
    model = Model("frozen")
    model.head.requires_grad_()
    clipping = way(model, 1.0)
    ids, labels, _ = batch()
    losses = linear_cross_entropy(model.hidden(ids), model.head, labels)

    with pytest.raises(UnsupportedError, match="head"):
        clipping.backward(losses.mean(1) + losses.mean())


def test_a_head_that_is_used_otherwise_too_is_refused(way) -> None:
    model = Model()
    clipping = way(model, 1.0)
    ids, labels, weights = batch(torch.float32)
    both = model.in_chunks(ids, labels, weights) + model.with_logits(ids, labels, weights)

    with pytest.raises(UnsupportedError, match="used in ways whose gradients cannot be combined"):
        clipping.backward(both)


@pytest.mark.parametrize("what", ["labels", "incoming"])
def test_what_is_changed_between_norm_and_sum_is_refused(what) -> None:
    model = Model()
    clipping = BookKeeping(model, 0.1, first_batch="trusted")  # which is a backward of its own
    ids, labels, weights = batch(torch.float32)
    hidden = model.hidden(ids.clone())  # labels are a view of the same tensor
    losses = linear_cross_entropy(hidden, model.head, labels)
    incoming = []
    losses.register_hook(incoming.append)

    def change(_gradient: Tensor) -> None:  # after the head's norm was found
        (labels if what == "labels" else incoming[0]).mul_(0)

    hidden.register_hook(change)
    with pytest.raises(RuntimeError, match=r"kept for head.weight was changed in place"):
        clipping.backward((losses * weights).sum(1))


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("way", [None, *EVERY])
def test_a_linear_layer_that_computes_something_else_is_no_head(way) -> None:
    layer = Doubling(D, V)
    if way is not None:
        way(layer, 1.0)
    with pytest.raises(TypeError, match="with its own forward, and is a Doubling"):
        linear_cross_entropy(torch.zeros(2, 3, D), layer, torch.zeros(2, 3, dtype=torch.int64))


def test_hooks_of_a_head_that_is_not_clipped_are_refused() -> None:
    layer = nn.Linear(D, V)
    layer.register_forward_hook(lambda *given: given[2] * 2)
    with pytest.raises(ValueError, match="head has hooks, which would not run"):
        linear_cross_entropy(torch.zeros(2, 3, D), layer, torch.zeros(2, 3, dtype=torch.int64))


def test_no_more_than_a_chunk_of_logits_exists_at_once() -> None:
    width = 4_096
    model, found = nn.Linear(8, width, bias=False), []
    x, labels = torch.randn(4, 64, 8, requires_grad=True), torch.zeros(4, 64, dtype=torch.int64)

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.shape[-1:] == (width,) and not func.is_view:
                found.append(len(out))
            return out

    model.requires_grad_(requires_grad=False)
    with Watching():
        linear_cross_entropy(x, model, labels).sum().backward()

    assert x.grad is not None
    assert max(found) == (1 if head.CHUNK_BYTES == 1 else 4 * 64)


def test_a_captured_step_may_have_such_a_head(monkeypatch) -> None:
    models = [Model("tied") for _ in range(2)]
    steps = []
    with simulated_graphs(monkeypatch):
        monkeypatch.setattr(head, "refuse_labels", lambda *_: None)  # as on a GPU
        for model in models:
            optimizer = private(BookKeeping(model, 0.5), model, lr=0.1)
            steps.append(CapturedStep(model.in_chunks, optimizer, part_size=B))
        for _ in range(4):
            steps[0](*batch(torch.float32))
            steps[1]._run(batch(torch.float32))

    assert steps[0].is_captured
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"head": nn.Bilinear(2, 2, 2)}, TypeError, "head must be a Linear .* and is a Bilin"),
        ({"hidden": torch.zeros(2, 3, 9)}, ValueError, r"must be \(B, T, 6\), and has shape"),
        ({"hidden": torch.zeros(2, D)}, ValueError, r"hidden must be \(B, T, 6\)"),
        ({"labels": torch.zeros(2, 4, dtype=torch.int64)}, ValueError, r"labels must be \(2, 3\)"),
        ({"labels": torch.zeros(2, 3)}, ValueError, "int64, and are"),
        *(
            ({"labels": torch.full((2, 3), label)}, ValueError, "none of the head.s 11 outputs")
            for label in (V, -1)
        ),
        ({"label_smoothing": 1.0}, ValueError, "label_smoothing must be from 0 to below 1"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive, and is 0.0"),
    ],
)
def test_what_is_no_head_or_no_label_is_refused(changed, error, message) -> None:
    given = {
        "hidden": torch.zeros(2, 3, D),
        "head": nn.Linear(D, V),
        "labels": torch.zeros(2, 3, dtype=torch.int64),
    } | changed

    with pytest.raises(error, match=message):
        linear_cross_entropy(given.pop("hidden"), given.pop("head"), given.pop("labels"), **given)


def test_the_lines_in_the_documents_run() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY, vocab_size=V)
    model = transformers.LlamaForCausalLM(config).double()
    names = {"model": model}
    exec(find_code(PRIVATE_TRAINING, "linear_cross_entropy"), names)  # noqa: S102
    ids, labels, _ = batch()
    labels = labels.clamp(0)

    def with_logits(ids, labels):
        return functional.cross_entropy(model(ids).logits.mT, labels, reduction="none").mean(1)

    options = {"expected": one_by_one(with_logits, model, (ids, labels)), "tolerance": 1e-6}
    # Llama normalises in float32.
    assert_exact(BookKeeping, model, (ids, labels), names["sample_losses"], **options)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="from PyTorch 2.13 on")
class TestLossOfPyTorch:
    """``torch.nn.LinearCrossEntropyLoss``, and the function behind it."""

    @pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "bias": True}])
    def test_one_loss_for_each_sample_is_clipped(self, way, options) -> None:
        body, loss = nn.Linear(D, D), nn.LinearCrossEntropyLoss(D, V, reduction="none", **options)
        model = nn.ModuleList([body, loss]).double()
        labels = torch.tensor([1, -100, 3, V - 1])
        batch = torch.randn(4, D, dtype=torch.float64), labels

        def losses_of(x: Tensor, labels: Tensor) -> Tensor:
            return loss(body(x), labels)

        assert_exact(way, model, batch, losses_of, tolerance=1e-10).remove()
        assert type(loss) is nn.LinearCrossEntropyLoss

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "with reduction='none' alone, and its reduction is 'mean'"),
            ({"reduction": "none", "weight": torch.ones(V)}, "weight=None alone"),
            ({"reduction": "none", "out_features": (2,)}, r"out_features=\(\) alone, and .*\(2,\)"),
        ],
    )
    def test_another_loss_is_refused(self, options, message) -> None:
        with pytest.raises(UnsupportedError, match=message):
            BookKeeping(nn.Sequential(nn.LinearCrossEntropyLoss(D, V, **options)), 1.0)

    def test_probabilities_are_refused(self) -> None:
        model = nn.Sequential(nn.LinearCrossEntropyLoss(D, V, reduction="none"))
        BookKeeping(model, 1.0)
        with pytest.raises(ValueError, match=r"got \(2, 6\) and \(2, 11\)"):
            model[0](torch.zeros(2, D), torch.zeros(2, V))

    def test_a_function_that_takes_the_weight_is_refused(self) -> None:
        model = nn.Linear(D, V, bias=False)
        clipping = BookKeeping(model, 1.0)
        x, labels = torch.zeros(2, D), torch.zeros(2, dtype=torch.int64)
        losses = functional.linear_cross_entropy(x, model.weight, labels, reduction="none")
        with pytest.raises(RuntimeError, match=r"use dpprof\.private\.linear_cross_entropy"):
            clipping.backward(losses)
