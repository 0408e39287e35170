"""Several optimizers of one model: one step, one draw of noise, one count."""

import pytest
import torch
from one_call import Model, prepare, train, weights
from simulated_graphs import simulated_graphs
from small_models import take_step
from torch.optim.lr_scheduler import LambdaLR

RATE = 0.1


def split(model: Model) -> list[torch.optim.Optimizer]:
    """Weights by SGD with momentum, biases by Adam: each parameter in one optimizer."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [
        torch.optim.SGD(matrices, lr=RATE, momentum=0.9),
        torch.optim.Adam(biases, lr=RATE),
    ]


def make(optimizers=None, **options):
    """Return a model and its training, with samples and noise of fixed seeds."""
    model = Model().double()
    optimizers = split(model) if optimizers is None else optimizers(model)
    return model, optimizers, prepare(model, optimizer=optimizers, max_batch_size=2, **options)


def test_each_steps_on_its_parameters_with_the_noise_and_the_count_of_one() -> None:
    """All by SGD, in one optimizer and in two, ends with the same bits."""

    def by_groups(model):
        parameters = list(model.parameters())
        groups = parameters[:2], parameters[2:]
        return [torch.optim.SGD(group, lr=RATE, momentum=0.9) for group in groups]

    single, _, one = make(lambda model: torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
    joined, _, two = make(by_groups)
    for model, private in ((single, one), (joined, two)):
        train(private, model)

    assert torch.equal(weights(joined), weights(single))
    assert two.spent.history == one.spent.history == [(1.0, 0.25, 8)]
    assert two.optimizer.steps == 8


def test_each_takes_the_step_of_its_own_kind() -> None:
    """One step without momentum or noise: SGD moves by the gradient, Adam by its rate."""
    model, _, private = make(noise_multiplier=0.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {}
    inner = private.optimizer.original_optimizer
    inner.register_step_pre_hook(
        lambda *_: gradients.update({n: p.grad.clone() for n, p in model.named_parameters()})
    )
    for batch in private.data_loader:
        private.optimizer.backward(model.losses, *batch)
        private.optimizer.step()
        if gradients:
            break
        private.optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        moved, gradient = before[name] - parameter.detach(), gradients[name]
        expected = RATE * (gradient if parameter.dim() > 1 else gradient / (gradient.abs() + 1e-8))
        torch.testing.assert_close(moved, expected)


def test_a_group_is_added_to_a_member_and_not_to_all() -> None:
    model, optimizers, private = make()
    group = {"params": [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))]}
    before = len(private.optimizer.param_groups)
    for joined in (private.optimizer, private.optimizer.original_optimizer):
        with pytest.raises(RuntimeError, match="call add_param_group of the one that is to step"):
            joined.add_param_group(group)
    assert len(private.optimizer.param_groups) == before

    optimizers[0].add_param_group(group)
    with pytest.raises(RuntimeError, match="which its Clipping does not clip"):
        train(private, model)


def test_schedules_of_members_step_once_for_each_batch() -> None:
    model, optimizers, private = make()
    schedules = [LambdaLR(one, lambda step: 0.5**step) for one in optimizers]
    parts = 0
    for batch in private.data_loader:
        take_step(private.optimizer, model.losses, *batch)
        for schedule in schedules:
            schedule.step()
        parts += 1
    assert parts > private.optimizer.steps == 4
    assert [group["lr"] for group in private.optimizer.param_groups] == [RATE * 0.5**4] * 2


def test_afterwards_each_steps_alone_again() -> None:
    model, optimizers, private = make()
    with pytest.raises(RuntimeError, match=r"SGD was asked to step alone, .* have no noise"):
        optimizers[0].step()
    private.remove()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = weights(model).clone()
    for optimizer in optimizers:
        optimizer.step()
    assert (weights(model) != before).all()
    prepare(model, optimizer=optimizers)


def twice(model):
    return [torch.optim.SGD(model.parameters(), lr=RATE) for _ in range(2)]


def half(model):
    return split(model)[:1]


def wrapping(model):
    first, second = split(model)
    second.inner = first
    return [first, second]


def with_another(model):
    return [*split(model), torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=RATE)]


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        (lambda _: [], "optimizer is an empty list"),
        (twice, r"a parameter of shape \(7, 5\) is in optimizers 0 and 1"),
        (half, r"layers\.0\.bias is trained, and the optimizer does not have it"),
        (wrapping, r"Adam wraps an optimizer \(inner\)"),
        (with_another, r"has a parameter of shape \(3,\) that the model does not train"),
        (lambda _: ["sgd"], "str is not a torch.optim.Optimizer"),
    ],
)
def test_optimizers_that_do_not_share_the_model_are_refused(optimizers, message) -> None:
    with pytest.raises(ValueError, match=message):
        make(optimizers)


def test_an_optimizer_of_another_training_is_refused() -> None:
    model, optimizers, _ = make()
    with pytest.raises(ValueError, match="optimizer 0 is part of another private training"):
        prepare(model, optimizer=optimizers)


def test_a_state_of_one_optimizer_is_not_loaded_into_two() -> None:
    _, _, one = make(lambda model: torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
    _, _, two = make()
    with pytest.raises(ValueError, match="of no joined optimizers, and there are 2"):
        two.load_state_dict(one.state_dict(exact=True))


def test_their_steps_follow_graphs_too(monkeypatch) -> None:
    trained = []
    for execution in ("auto", "eager"):
        with simulated_graphs(monkeypatch):
            model, _, private = make(execution=execution, noise_generator=None)
            private.optimizer.noise_multiplier = 0.0
            train(private, model, epochs=4)
            if execution == "auto":
                assert private.optimizer.captured.state_dict()["replayed"] > 3
        trained.append(weights(model))
    torch.testing.assert_close(*trained)
