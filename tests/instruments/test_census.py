"""Who owns which bytes: answers that can be worked out by hand."""

import pytest
import torch
from factory import make_experiment
from torch import nn

from dpprof.experiments.config import registry
from dpprof.measure.instruments.census import take_census
from dpprof.subjects.setup import TensorHolders, Training, set_up

B, T = 3, 4
FIELDS = {"batch_size": B, "seq_len": T}
P = 1176  # V 16, d 8, one block, T 4: embeddings 128 + 32, block 872, norm 16, head 128
TENSORS = 17  # 2 embeddings, 12 in the block, 2 of the norm, 1 head
INPUTS = 2 * B * T * 8


def prepare(method: str, **fields) -> Training:
    experiment = make_experiment(method=method, **FIELDS | fields)
    kind = registry.load("methods", method)
    return set_up(experiment, kind, torch.device("cpu"), lambda *_: None)


def census_entering(training: Training, phase: str) -> dict[str, int]:
    """Run a step and count as it enters a phase."""
    taken = []

    def enter(entered: str) -> None:
        if entered == phase:
            taken.append(take_census(training.holders))

    training.step.run(training.batch, enter)
    return taken[-1]


@pytest.mark.parametrize(
    ("method", "per_sample_gradients", "norm_samples"),
    [
        *((name, B * P * 4, 0) for name in ("opacus-hooks", "opacus-functorch", "opacus-ew")),
        *((name, 0, B * TENSORS * 4) for name in ("opacus-ghost", "opacus-fast-gradient-clipping")),
    ],
)
def test_samples_have_gradients_or_a_norm_for_each_parameter(
    method, per_sample_gradients, norm_samples
) -> None:
    census = census_entering(prepare(method), "clip")

    assert census["per_sample_gradients"] == per_sample_gradients
    assert census["norm_samples"] == norm_samples
    assert (census["parameters"], census["summed_gradients"]) == (P * 4, 0)


def test_hooks_keep_the_input_of_every_layer() -> None:
    d, layers = 8, 5  # the norm and qkv, out, the norm, up: the input of each is B T d
    census = census_entering(prepare("opacus-hooks", optimizer="sgd"), "backward")

    # And of down B T 4d, of the last norm and of the head B T d, and the positions in int64.
    assert census["dp_activations"] == B * T * (layers * d + 4 * d + 2 * d) * 4 + B * T * 8
    assert census["inputs"] == INPUTS


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [("adamw", 2 * P * 4 + TENSORS * 4), ("sgd", 0), ("sgd-momentum", P * 4)],
    ids=["adamw", "sgd", "sgd-momentum"],
)
def test_optimizer_state_is_its_moments_and_the_steps(optimizer, state) -> None:
    training = prepare("standard", optimizer=optimizer)
    training.step.run(training.batch, lambda _: None)

    known = {"inputs": INPUTS, "parameters": P * 4, "optimizer_state": state}
    census = take_census(training.holders)
    assert {name: size for name, size in census.items() if size or name in known} == known


def test_a_storage_counts_once_and_whole() -> None:
    module = nn.Linear(4, 3, bias=False)
    module.weight.grad = torch.zeros(100)[:12].view(3, 4)
    module.weight.grad_sample = [module.weight.grad, torch.zeros(2, 3, 4)]
    held = lambda one: [("per_sample_gradients", one.grad_sample)]  # noqa: E731
    census = take_census(TensorHolders(module, held_for=held))

    assert census["gradients"] == 100 * 4
    assert census["per_sample_gradients"] == 2 * 12 * 4


def test_another_devices_tensors_do_not_count() -> None:
    """AdamW keeps its step counts on the CPU although parameters are on a GPU."""
    module = nn.Linear(2, 2, bias=False, device="meta")
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    optimizer.state[module.weight]["step"] = torch.zeros(1)

    assert take_census(TensorHolders(module, optimizer))["optimizer_state"] == 0


def test_gradients_and_their_clipped_sum_are_counted_without_allocating() -> None:
    training = prepare("opacus-hooks")
    training.step.compute_gradient(training.batch, lambda _: None)
    with torch.profiler.profile(profile_memory=True) as recording:
        census = take_census(training.holders)

    assert census["gradients"] == census["summed_gradients"] == P * 4
    assert not [event for event in recording.events() if event.name == "[memory]"]
