"""Misuse in any order: the bound holds, or the step is refused; the next right step is right."""

import copy
import pickle
import sys
import threading
from functools import partial

import pytest
import torch
from small_models import (
    EVERY,
    Composed,
    each_of,
    gradients,
    is_clear,
    one_by_one,
    private,
    squares,
)
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad
from torch.distributed.optim import _apply_optimizer_in_backward

from dpprof.private import BookKeeping, FlashClipping, UnsupportedError

way = each_of(EVERY)

B, T, D = 4, 3, 6
C = 0.5


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)).double()


def draw():
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def take(clipping, model):
    """The clipped sum of the usual batch."""
    model.zero_grad()
    clipping.backward(squares(model, draw()))
    return gradients(model)


def assert_goes_on(clipping, model) -> None:
    """The next batch has the sum that it has without anything before."""
    other = build()
    expected = take(type(clipping)(other, C), other)
    torch.testing.assert_close(take(clipping, model), expected, rtol=1e-12, atol=0)


class Interrupts(torch.autograd.Function):
    """Raises in one of its backwards."""

    @staticmethod
    def forward(ctx, x, left, error):
        ctx.left, ctx.error = left, error
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        ctx.left.pop()
        if not ctx.left:
            raise ctx.error
        return g, None, None


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), torch.OutOfMemoryError()])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_after_an_exception_in_any_pass_the_next_step_is_right(way, at, error) -> None:
    """Two backwards verify the batch, the third finds norms, the fourth adds."""
    model = build()
    clipping = way(model, C)
    left = [None] * at
    losses = model[2](Interrupts.apply(model[1](model[0](draw())), left, error)).square()
    if way is not FlashClipping and at == 4:
        clipping.backward(losses.sum((1, 2)))  # which has three
    else:
        with pytest.raises(type(error)):
            clipping.backward(losses.sum((1, 2)))
        assert is_clear(model)
        assert clipping.batches == 0

    assert_goes_on(clipping, model)


def test_a_refused_batch_cannot_be_stepped_on(way) -> None:
    model = build()
    clipping = way(model, C)
    optimizer = private(clipping, model, noise_multiplier=1.0)
    losses = squares(model, draw())
    model.eval()
    with pytest.raises(RuntimeError, match="training was True"):
        clipping.backward(losses)
    with pytest.raises(RuntimeError, match="no batch was clipped since the last step"):
        optimizer.step()


def test_a_graph_is_differentiated_once(way) -> None:
    model = build()
    clipping = way(model, C)
    losses = squares(model, draw())
    clipping.backward(losses)
    model.zero_grad()
    with pytest.raises(RuntimeError, match="second time"):
        clipping.backward(losses)
    assert_goes_on(clipping, model)


CHANGED = {
    "loaded": lambda model: model.load_state_dict(model.state_dict()) and None,
    "moved": lambda model: model.to("cpu", torch.float64) and None,
    "evaluated": lambda model: model.eval()(draw()).sum() and model.train() and None,
    "compiled": lambda model: torch.compile(model, backend="eager")(draw()).sum() and None,
}


@pytest.mark.parametrize("change", CHANGED)
def test_what_leaves_the_model_as_it_is_may_come_between_steps(change, way) -> None:
    model = build()
    clipping = way(model, C)
    take(clipping, model)
    CHANGED[change](model)
    assert_goes_on(clipping, model)


def test_two_clippings_of_one_model_or_of_shared_layers_are_refused() -> None:
    model = build()
    first = BookKeeping(model, C)
    for other in (model, nn.Sequential(model[2]), nn.Sequential(nn.Linear(D, D), model)):
        with pytest.raises(UnsupportedError, match=r"already replaced.*remove\(\)"):
            BookKeeping(other, C)
    assert_goes_on(first, model)


def test_forward_may_run_in_another_thread(way) -> None:
    model = build()
    clipping, found = way(model, C), []
    thread = threading.Thread(target=lambda: found.append(squares(model, draw())))
    thread.start()
    thread.join()
    clipping.backward(found[0])
    other = gradients(model)
    torch.testing.assert_close(take(clipping, model), other, rtol=1e-12, atol=0)
    assert_goes_on(clipping, model)


def test_compiling_the_whole_graph_says_what_to_leave_out() -> None:
    torch._dynamo.reset()  # of what other tests compiled
    model = build()
    BookKeeping(model, C)
    run = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Unsupported, match="cannot be compiled; leave out fullgraph=True"):
        run(draw())


def take_steps_behind_gradients(model) -> None:
    sgd = torch.optim.SGD([model.beside], lr=1.0)
    model.beside.register_post_accumulate_grad_hook(lambda _: sgd.step())


HOOKS = {
    "an optimizer in backward": (
        lambda model: _apply_optimizer_in_backward(torch.optim.SGD, [model.beside], {"lr": 1.0}),
        "an optimizer that steps in backward",
    ),
    "a step in a hook": (take_steps_behind_gradients, "a hook behind its gradient"),
    "a hook": (lambda model: model.beside.register_hook(lambda g: 100 * g), "a hook on its grad"),
    "a hook of a layer's": (
        lambda model: model.layer.weight.register_hook(lambda g: 100 * g),
        "a hook on its gradient",
    ),
    "a hook on all gradients": (
        lambda model: torch.autograd.graph.register_multi_grad_hook(
            list(model.parameters()), lambda _: None
        ),
        "a hook on its gradient",
    ),
}


def with_beside() -> nn.Module:
    """A parameter beside a layer, whose sum of gradients autograd computes."""
    run = lambda m, x: m.layer(x) + m.beside  # noqa: E731
    return Composed(run, layer=nn.Linear(D, D), beside=torch.zeros(D))


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("is_late", [False, True])
def test_who_would_handle_gradients_in_backward_is_refused(is_late, kind, way) -> None:
    add, message = HOOKS[kind]
    model = with_beside()
    before = copy.deepcopy(model.state_dict())
    clip = partial(way, model, C)
    if is_late:
        clipping = way(model, C)
        clip = lambda: clipping.backward(squares(model, torch.ones(B, D)))  # noqa: E731
    add(model)
    with pytest.raises(UnsupportedError, match=f"is trained and has {message}"):
        clip()
    assert is_late or type(model.layer) is nn.Linear
    assert is_clear(model)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_hooks_that_look_at_layers_and_activations_stay(way) -> None:
    model, seen = build(), []
    clipping = way(model, C)
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    model[2].register_forward_pre_hook(
        lambda _, given: given[0].register_hook(seen.append) and None
    )
    assert_goes_on(clipping, model)
    assert len(seen) > 2


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_clipping_is_not_copied_and_its_model_is(make) -> None:
    model = build()
    clipping = BookKeeping(model, C)
    with pytest.raises(TypeError, match="a BookKeeping cannot be copied or pickled; copy its mod"):
        make(clipping)
    make(model)


def run_with_others(model):
    others = {name: nn.Parameter(2 * p.detach()) for name, p in model.named_parameters()}
    return torch.func.functional_call(model, others, (draw(),)).square().sum((1, 2))


def test_tensors_in_place_of_parameters_are_refused(way) -> None:
    model = build()
    clipping = way(model, C)
    with pytest.raises(RuntimeError, match="that the model does not have, and its gradient"):
        clipping.backward(run_with_others(model))
    assert_goes_on(clipping, model)


@pytest.mark.parametrize("shape", [(), (D,), (B, T, D)])
def test_a_trained_tensor_of_all_samples_is_refused(shape, way) -> None:
    model, extra = build(), torch.ones(shape, dtype=torch.float64, requires_grad=True)
    with pytest.raises(
        RuntimeError, match=r"trained tensor of shape .* that the model does not have"
    ):
        way(model, C).backward(
            (model(draw()) * extra.mean(0 if shape else ())).square().sum((1, 2))
        )


def test_of_one_sample_no_gradient_is_left_but_the_clipped_one(way) -> None:
    """Where nothing tells an input from what is trained, as in parts of one sample."""
    model, extra = build(), torch.ones((), dtype=torch.float64, requires_grad=True)
    extra.grad = torch.full((), 7.0, dtype=torch.float64)
    clipping = way(model, C)
    clipping.backward((model(draw()[:1]) * extra).square().sum((1, 2)))
    assert extra.grad == 7
    with pytest.raises(RuntimeError, match="trained tensor"):
        clipping.backward((model(draw()) * extra).square().sum((1, 2)))
    assert extra.grad == 7


def test_inputs_may_require_gradients(way) -> None:
    model, turned = build(), draw().transpose(0, 1).contiguous().requires_grad_()
    clipping = way(model, C)
    clipping.backward(squares(model, turned.transpose(0, 1)))
    expected = gradients(model)
    torch.testing.assert_close(take(clipping, model), expected, rtol=1e-12, atol=0)


def interrupt(call) -> None:
    """Call it until the batch is thrown away, as a signal would end it there."""

    def trace(frame, *_):
        if frame.f_code.co_name == "throw_away":
            sys.settrace(None)
            raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(None)


def test_a_batch_that_is_interrupted_late_is_as_if_it_had_not_been(way) -> None:
    model = build()
    clipping = way(model, C)
    optimizer = private(clipping, model, noise_multiplier=0.0, expected_batch_size=1.0)
    interrupt(lambda: clipping.backward(squares(model, 3 * draw())))
    with pytest.raises(RuntimeError, match="no batch was clipped since the last step"):
        optimizer.step()
    clipping.backward(squares(model, draw()))
    optimizer.step()
    other = build()
    expected = take(way(other, C), other)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["linear", "without a rule", "recurrent", "one of two"])
def test_parameters_that_were_computed_are_refused(kind, way) -> None:
    layers = {"without a rule": nn.PReLU, "recurrent": partial(nn.GRU, 3, batch_first=True)}
    model = nn.Sequential(nn.Linear(3, 3), layers.get(kind, partial(nn.Linear, 3))(3))
    clipping = way(model, C)
    names = [name for name, _ in model.named_parameters() if kind != "one of two" or name[0] == "1"]
    computed = {name: model.get_parameter(name) * 0.5 for name in names}

    with pytest.raises(RuntimeError, match=r"tensors that were computed in place.*functional_call"):
        torch.func.functional_call(model, computed, (torch.ones(2, 3, 3),))
    with torch.no_grad():  # without gradients nothing is lost
        torch.func.functional_call(model, computed, (torch.ones(2, 3, 3),))
    numbers = {name: tensor.detach() for name, tensor in computed.items() if name[0] == "1"}
    hidden = torch.func.functional_call(model, numbers, (torch.ones(2, 3, 3),))
    clipping.backward((hidden[0] if kind == "recurrent" else hidden).square().sum((1, 2)))
    assert model[0].weight.grad is not None


def test_backward_inside_of_other_modes_is_refused(way) -> None:
    model = build()
    clipping = way(model, C)
    losses = squares(model, draw())
    with (
        forward_ad.dual_level(),
        pytest.raises(UnsupportedError, match=r"runs inside of torch\.autograd\.forward_ad"),
    ):
        clipping.backward(forward_ad.make_dual(losses, torch.ones_like(losses)))
    with torch.inference_mode(), pytest.raises(ValueError, match="inference mode"):
        clipping.backward(losses)
    assert_goes_on(clipping, model)


class AddedVector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(1, 3))

    def forward(self, x):
        return x + self.p


class WritesGradients(nn.Module):
    def forward(self, x):
        x.register_hook(lambda gradient: gradient.mul_(100))
        return x


def test_a_gradient_that_is_kept_is_not_written_in_place() -> None:
    """It would count 100 times, after its norm was found."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), WritesGradients(), AddedVector())
    clipping = BookKeeping(model, C)
    with pytest.raises(RuntimeError, match=r"kept for 2\.p was changed in place"):
        clipping.backward(model(torch.randn(5, 3)).square().sum(1))


@pytest.mark.parametrize("way", [BookKeeping, FlashClipping])
def test_an_input_that_no_gradient_needs_may_be_written_in_place(way) -> None:
    """As in a residual between layers of which biases alone are trained."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    for layer in (first, second):
        layer.weight.requires_grad_(requires_grad=False)
    model = nn.ModuleList([first, second])

    def losses(x):
        hidden = first(x)
        hidden += second(hidden).relu()
        return hidden.square().sum(1)

    x = torch.randn(4, 3)
    _, expected, bound = one_by_one(losses, model, [x])
    clipping = way(model, bound)
    clipping.backward(losses(x))
    assert torch.allclose(gradients(model), expected, rtol=1e-5)
