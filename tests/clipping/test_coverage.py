"""Every parameter that is trained is clipped and noised, or the step is refused by name."""

import copy
import pickle

import pytest
import torch
from small_models import Small, draw
from torch import nn
from torch.nn.parallel import DataParallel
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

from dpprof.clipping.book_keeping import BookKeeping
from dpprof.clipping.optimizer import NoisyOptimizer
from dpprof.clipping.per_layer import PerLayerClipping
from dpprof.clipping.two_pass import FlashClipping
from dpprof.spec.registry import UnsupportedError

EVERY = [FlashClipping, BookKeeping, PerLayerClipping]


def build(kind: str = "layer norm", *, bias: bool = True) -> Small:
    torch.manual_seed(0)
    return Small(kind, 6, 9, bias=bias).double()


def batch(B: int = 4, T: int = 7):
    ids, labels, weights = draw(B, T)
    return ids, labels, weights.double()


def private(clipping, model, lr: float = 1.0, noise_multiplier: float = 0.0) -> NoisyOptimizer:
    return NoisyOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr),
        clipping,
        noise_multiplier=noise_multiplier,
        expected_batch_size=1,
    )


@pytest.mark.parametrize("way", EVERY)
def test_a_parameter_that_was_thawed_is_refused_by_name(way) -> None:
    model = build()
    model.head.requires_grad_(False)
    clipping = way(model, 1e-3)
    model.head.requires_grad_(True)

    with pytest.raises(
        RuntimeError, match=r"head\.weight is trained and not clipped: it was thawed"
    ):
        clipping.backward(model.losses(*batch()))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("way", EVERY)
def test_a_bias_that_was_thawed_beside_its_weight_is_refused(way) -> None:
    model = build("linear")
    model.body.bias.requires_grad_(False)
    clipping = way(model, 1e-3)
    model.body.bias.requires_grad_(True)

    with pytest.raises(RuntimeError, match=r"body\.bias is trained and not clipped"):
        clipping.backward(model.losses(*batch()))


@pytest.mark.parametrize("way", EVERY)
def test_a_layer_that_was_replaced_is_refused_by_name(way) -> None:
    model = build()
    clipping = way(model, 1e-3)
    model.head = nn.Linear(6, 6, bias=False).double()

    with pytest.raises(RuntimeError, match=r"head\.weight is trained and not clipped"):
        clipping.backward(model.losses(*batch()))


@pytest.mark.parametrize("way", EVERY)
def test_weights_that_were_tied_later_are_refused_by_name(way) -> None:
    model = build()
    clipping = way(model, 1e-3)
    model.head.weight = model.embedding.weight

    with pytest.raises(RuntimeError, match=r"head\.weight is trained.*moved or tied"):
        clipping.backward(model.losses(*batch()))


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("kind", ["rms norm", "layer norm", "linear", "conv1d", "no rule"])
@pytest.mark.parametrize("when", ["before forward", "after forward"])
def test_what_is_frozen_later_is_left_as_it_is(kind, way, when) -> None:
    model = build(kind)
    clipping = way(model, 1e-3)
    optimizer = private(clipping, model, noise_multiplier=1.0)
    if when == "before forward":
        model.body.requires_grad_(False)
    losses = model.losses(*batch())
    model.body.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    clipping.backward(losses)
    optimizer.step()

    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("body")


def test_what_is_frozen_after_its_gradient_was_clipped_is_refused() -> None:
    model = build()
    clipping = BookKeeping(model, 1e-3)
    optimizer = private(clipping, model)
    clipping.backward(model.losses(*batch()))
    model.body.requires_grad_(False)

    with pytest.raises(RuntimeError, match=r"body\.weight is frozen and has a gradient"):
        optimizer.step()


def test_a_parameter_of_another_model_is_refused() -> None:
    model, other = build(), nn.Linear(2, 3)
    clipping = BookKeeping(model, 1.0)
    optimizer = private(clipping, model)
    optimizer.original_optimizer.add_param_group({"params": list(other.parameters())})
    clipping.backward(model.losses(*batch()))

    with pytest.raises(RuntimeError, match=r"trains a parameter of shape \(3, 2\), which its"):
        optimizer.step()


def test_the_optimizer_inside_refuses_to_step_without_noise() -> None:
    model = build()
    clipping = BookKeeping(model, 1.0)
    optimizer = private(clipping, model)
    clipping.backward(model.losses(*batch()))
    with pytest.raises(RuntimeError, match="SGD was asked to step on gradients without noise"):
        optimizer.original_optimizer.step()
    optimizer.step()


def test_a_gradient_that_was_changed_after_it_was_clipped_is_refused() -> None:
    model = build()
    clipping = BookKeeping(model, 1.0)
    optimizer = private(clipping, model)
    clipping.backward(model.losses(*batch()))
    model.head.weight.grad *= 2

    with pytest.raises(RuntimeError, match=r"the gradient of head\.weight, or the bound, changed"):
        optimizer.step()


@pytest.mark.parametrize("way", EVERY)
def test_a_step_without_zero_grad_is_refused(way) -> None:
    model = build()
    clipping = way(model, 1.0)
    optimizer = private(clipping, model)
    clipping.backward(model.losses(*batch()))
    optimizer.step()

    with pytest.raises(RuntimeError, match=r"has a gradient that is no sum.*zero_grad"):
        clipping.backward(model.losses(*batch()))
    optimizer.zero_grad(set_to_none=False)  # zeros are as good as none
    clipping.backward(model.losses(*batch()))
    optimizer.step()


def test_batches_that_are_added_up_before_a_step_are_refused() -> None:
    model = build()
    clipping = BookKeeping(model, 1.0)
    optimizer = private(clipping, model)
    for _ in range(4):
        clipping.backward(model.losses(*batch()))

    with pytest.raises(RuntimeError, match="4 batches were added up before a step"):
        optimizer.step()
    optimizer.zero_grad()
    clipping.backward(model.losses(*batch()))
    optimizer.step()


def test_a_batch_in_parts_counts_once_and_is_averaged_once() -> None:
    whole, parts = build(), build()
    clipping = BookKeeping(whole, 0.5)
    optimizer = private(clipping, whole)
    clipping.backward(whole.losses(*batch()))
    optimizer.step()
    clipping = BookKeeping(parts, 0.5)
    optimizer = private(clipping, parts)
    steps = []
    optimizer.attach_step_hook(steps.append)
    for at in range(4):
        optimizer.signal_skip_step(do_skip=at < 3)
        clipping.backward(parts.losses(*(part[at : at + 1] for part in batch())))
        optimizer.step()
        optimizer.zero_grad()

    assert len(steps) == 1
    assert optimizer.accumulated_iterations == 1
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_a_step_without_a_batch_is_refused() -> None:
    model = build()
    optimizer = private(BookKeeping(model, 1.0), model)

    with pytest.raises(RuntimeError, match=r"no batch was clipped.*torch\.zeros\(0\)"):
        optimizer.step()


@pytest.mark.parametrize("bound", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bound_that_is_none_is_refused(bound) -> None:
    with pytest.raises(
        ValueError, match=f"max_grad_norm must be positive and finite, and is {bound}"
    ):
        BookKeeping(build(), bound)
    clipping = BookKeeping(build(), 1.0)
    with pytest.raises(ValueError, match="max_grad_norm must be positive"):
        clipping.max_grad_norm = bound


@pytest.mark.parametrize("multiplier", [-1.0, float("inf"), float("nan")])
def test_noise_of_no_scale_is_refused(multiplier) -> None:
    model = build()
    clipping = BookKeeping(model, 1.0)
    with pytest.raises(ValueError, match="noise_multiplier must be finite and at least 0"):
        private(clipping, model, noise_multiplier=multiplier)


@pytest.mark.parametrize("size", [0, -4, float("inf")])
def test_a_batch_size_to_divide_by_is_positive(size) -> None:
    model = build()
    sgd = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="expected_batch_size must be positive and finite"):
        NoisyOptimizer(sgd, BookKeeping(model, 1.0), noise_multiplier=1.0, expected_batch_size=size)


def test_the_noise_has_the_bound_of_the_clipping_whoever_changes_it() -> None:
    model = build()
    clipping = BookKeeping(model, 1.0)
    optimizer = private(clipping, model)
    optimizer.max_grad_norm = 0.25
    assert clipping.max_grad_norm == 0.25
    clipping.backward(model.losses(*batch()))
    clipping.max_grad_norm = 10.0

    with pytest.raises(RuntimeError, match="or the bound, changed after it was clipped"):
        optimizer.step()


def test_grad_scaler_is_refused() -> None:
    model = build().float()
    clipping = BookKeeping(model, 1.0)
    optimizer = private(clipping, model)
    scaler = torch.amp.GradScaler("cpu")
    clipping.backward(scaler.scale(model.losses(*draw(4, 7))))

    with pytest.raises(RuntimeError, match="GradScaler does not work with clipping"):
        scaler.step(optimizer)


def test_wrappers_that_train_in_parts_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="DataParallel does not work with clipping yet"):
        BookKeeping(DataParallel(build()), 1.0)


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_distributed_data_parallel_is_refused_whenever_it_comes() -> None:
    wrapped = nn.parallel.DistributedDataParallel(build())
    with pytest.raises(UnsupportedError, match="DistributedDataParallel does not work"):
        BookKeeping(wrapped, 1.0)
    model = build()
    BookKeeping(model, 1.0)
    later = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(UnsupportedError, match="DistributedDataParallel does not work"):
        later(batch()[0])


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("make", ["deepcopy", "pickle", "average"])
def test_a_copy_is_a_plain_model_with_weights_of_its_own(make, way) -> None:
    model = build("no rule")
    clipping = way(model, 1.0)
    if make == "deepcopy":
        other = copy.deepcopy(model)
    elif make == "pickle":
        other = pickle.loads(pickle.dumps(model))  # noqa: S301 (our own)
    else:
        other = AveragedModel(model).module
    expected = model.losses(*batch()).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)

    assert torch.allclose(other.losses(*batch()), expected, rtol=1e-12)
    assert type(other.body) is type(build("no rule").body)
    other.losses(*batch()).sum().backward()  # nobody clips it
    assert all(p.grad is not None for p in other.parameters())
    assert all(p.grad is None for p in model.parameters())
    way(other, 1.0).remove()
    assert type(model.head).__name__ == "Linear"
    clipping.backward(model.losses(*batch()))


def test_training_goes_on_bitwise_from_a_state_dict_in_any_order() -> None:
    def train(model, steps: int) -> None:
        clipping = BookKeeping(model, 0.5)
        optimizer = private(clipping, model, lr=0.1)
        for _ in range(steps):
            clipping.backward(model.losses(*batch()))
            optimizer.step()
            optimizer.zero_grad()
        clipping.remove()

    through, first, before, after = (build() for _ in range(4))
    train(through, 4)
    train(first, 2)
    before.load_state_dict(first.state_dict())
    train(before, 2)
    clipping = BookKeeping(after, 0.5)
    after.load_state_dict(first.state_dict())
    clipping.remove()
    train(after, 2)

    for resumed in (before, after):
        for one, other in zip(through.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(one, other)


def test_parameters_that_are_loaded_by_assignment_are_refused() -> None:
    model = build()
    clipping = BookKeeping(model, 1.0)
    model.load_state_dict(build().state_dict(), assign=True)

    with pytest.raises(RuntimeError, match=r"embedding\.weight is trained and not clipped"):
        clipping.backward(model.losses(*batch()))


@pytest.mark.parametrize("way", EVERY)
def test_a_parametrized_weight_is_refused_before_and_after(way) -> None:
    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    model = build()
    clipping = way(model, 1.0)
    parametrize.register_parametrization(model.head, "weight", Double())
    with pytest.raises(RuntimeError, match=r"head\.parametrizations\.weight\.original is trained"):
        clipping.backward(model.losses(*batch()))
    with pytest.raises(UnsupportedError, match="a parametrized weight is computed once"):
        way(weight_norm(nn.Linear(4, 3)), 1.0)
    old = torch.nn.utils.weight_norm(nn.Linear(4, 3))
    with pytest.raises(UnsupportedError, match="has a parameter weight_g that its rule"):
        way(old, 1.0)


def test_statistics_of_inputs_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="InstanceNorm1d keeps statistics of its inputs"):
        BookKeeping(
            nn.Sequential(nn.Linear(3, 3), nn.InstanceNorm1d(3, track_running_stats=True)), 1
        )


class Dropping(nn.Module):
    """A layer without a rule that behaves otherwise in training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x, *, shift=0.0, by=None):
        y = x * self.weight + shift + (0 if by is None else by)
        return nn.functional.dropout(y, 0.5, self.training)


@pytest.mark.parametrize("made_in", ["train", "eval"])
def test_a_layer_without_a_rule_trains_and_evaluates_as_it_is_told(made_in) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Dropping(8)).train(made_in == "train")
    x = torch.randn(3, 5, 8)
    clipping = BookKeeping(model, 1.0)

    model.eval()
    assert torch.equal(model(x), model(x))
    clipping.backward(model(x).sum((1, 2)))
    model.train()
    assert not torch.equal(model(x), model(x))
    model.zero_grad()
    with pytest.raises(UnsupportedError, match="Dropping draws random numbers and has no rule"):
        clipping.backward(model(x).sum((1, 2)))


def test_a_layer_without_a_rule_takes_keywords() -> None:
    torch.manual_seed(0)
    layer = Dropping(4).eval()
    x, by = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    norms = [torch.autograd.grad(layer(x[i : i + 1], shift=1.5, by=by[i : i + 1]).square().sum(),
                                 layer.weight)[0].norm() for i in range(3)]  # fmt: skip
    clipping = BookKeeping(layer, 1.0)
    clipping.backward(layer(x, shift=1.5, by=by).square().sum((1, 2)))

    torch.testing.assert_close(clipping.sample_norms, torch.stack(norms))
    with pytest.raises(ValueError, match=r"Dropping has no rule.*given \(3, 5, 4\), \(5, 4\)"):
        layer(x, by=by[0])


def test_ids_of_one_axis_are_refused() -> None:
    model = nn.Embedding(5, 3)
    BookKeeping(model, 1.0)
    with pytest.raises(ValueError, match=r"ids of shape \(4,\), of which no axis"):
        model(torch.arange(4))
    with torch.no_grad():
        assert model(torch.arange(4)).shape == (4, 3)


@pytest.mark.parametrize("way", [FlashClipping, BookKeeping])
def test_two_graphs_of_a_layer_that_is_used_twice_may_live_together(way) -> None:
    model, expected = build("used twice"), build("used twice")
    other = way(expected, 0.5)
    for some in (slice(0, 2), slice(2, 4)):
        other.backward(expected.losses(*(part[some] for part in batch())))
    clipping = way(model, 0.5)
    first, second = (
        model.losses(*(part[some] for part in batch())) for some in (slice(0, 2), slice(2, 4))
    )
    clipping.backward(first)
    clipping.backward(second)

    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("way", EVERY)
def test_a_backward_that_fails_leaves_no_part_of_a_batch(way) -> None:
    model = build("used twice")
    if way is not PerLayerClipping:
        model.body.layer.register_full_backward_hook(lambda *_: 1 / 0)
    clipping = way(model, 0.5)
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        clipping.backward(model.losses(*batch()))

    assert all(p.grad is None for p in model.parameters())
    assert clipping.batches == 0


def test_an_ordinary_gradient_past_the_layers_is_refused() -> None:
    model = build()
    BookKeeping(model, 1.0)
    with pytest.raises(RuntimeError, match=r"a gradient of head\.weight that is not clipped"):
        model.head.weight.square().sum().backward()
