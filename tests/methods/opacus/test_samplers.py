"""The code path told is the one taken, watching leaves nothing behind, and padding is left out.

The row of ``padding_idx`` has no gradient, with Opacus's rules as with PyTorch's.
"""

from contextlib import nullcontext

import pytest
import torch
from factory import make_experiment
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from steps import flat_gradient, prepare
from torch import Tensor, nn

from dpprof.experiments.config import registry
from dpprof.subjects.methods.opacus.samplers import leave_padding_out
from dpprof.subjects.methods.training_step import Batch, TrainingStep
from dpprof.subjects.models.build import build_model
from dpprof.subjects.samplers import SamplerPaths

FIELDS = {"batch_size": 2, "noise_multiplier": 0.1}


def every(path: str, **others: str) -> dict[str, str]:
    return dict.fromkeys(["Embedding", "LayerNorm", "Linear"], path) | others


GHOST = every("norm sampler", LayerNorm="grad sampler")
OWN = every("sample gradients", Embedding="sums of rows", Linear="sample gradients, tiled gram")
KEEPING = OWN | {"Linear": "kept product, sample gradients, tiled gram"}
TRANSFORMER = {
    "standard": {},
    "microbatch": {},
    "opacus-hooks": every("grad sampler"),
    "opacus-functorch": every("functorch"),
    "opacus-ew": every("expanded weights"),
    "opacus-per-layer": every("grad sampler"),
    "opacus-fast-gradient-clipping": every("grad sampler"),
    "opacus-ghost": GHOST,
    "opacus-adaptive": GHOST,
    "flash": OWN,
    "flash-bk": KEEPING,
    "per-layer": KEEPING,
}


class Scale(nn.Module):
    """A layer that Opacus has no rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def watched(step: TrainingStep, batch: Batch) -> SamplerPaths:
    paths = SamplerPaths()
    with step.watch_samplers(paths):
        step.run(batch, lambda _: None)
    return paths


@pytest.mark.parametrize("method", registry.names("methods"))
def test_the_path_of_every_layer_type(method) -> None:
    assert (watched(*prepare(method, **FIELDS)).by_layer or {}) == TRANSFORMER[method]


@pytest.mark.parametrize("method", ["opacus-ghost", "opacus-hooks"])
def test_a_silent_fallback_is_told(method) -> None:
    experiment = make_experiment(method=method, **FIELDS)
    model = nn.Sequential(build_model(experiment), Scale())
    step = registry.load("methods", method)(model, experiment)
    step.attach_optimizer(torch.optim.SGD(step.module.parameters(), lr=0.1))
    _, batch = prepare(method, **FIELDS)

    assert watched(step, batch).by_layer == TRANSFORMER[method] | {"Scale": "functorch"}


@pytest.mark.parametrize("method", registry.names("methods"))
def test_nothing_is_told_of_steps_outside_and_nothing_stays(method) -> None:
    step, batch = prepare(method, **FIELDS)
    step.run(batch, lambda _: None)
    objects = [*step.module.modules(), step.optimizer]
    before = [set(vars(one)) for one in objects]
    paths = SamplerPaths()
    with step.watch_samplers(paths):
        pass
    step.run(batch, lambda _: None)

    assert paths.by_layer is None
    assert paths.reasons
    assert [set(vars(one)) for one in objects] == before


@pytest.mark.parametrize("method", registry.names("methods"))
def test_watching_changes_no_gradient(method) -> None:
    gradients = []
    for watch in (lambda _: nullcontext(), lambda step: step.watch_samplers(SamplerPaths())):
        step, batch = prepare(method, **FIELDS)
        with watch(step):
            step.compute_gradient(batch, lambda _: None)
        gradients.append(flat_gradient(step.module))

    assert torch.equal(*gradients)


PADDING = 3
IDS_BT = torch.tensor([[0, 3, 1], [3, 3, 3]])
WRAPPERS = [GradSampleModule, GradSampleModuleFastGradientClipping]


def run(wrapper, *, ours: bool) -> nn.Parameter:
    """The weight of a table after a backward pass that gives each looked-up element 1."""
    module = wrapper(nn.Embedding(5, 2, padding_idx=PADDING), loss_reduction="mean")
    if ours:
        leave_padding_out(module)
    (module(IDS_BT).sum() / len(IDS_BT)).backward()
    return module._module.weight


def test_per_sample_gradients_have_zeros_in_the_row_of_padding() -> None:
    expected = torch.zeros(2, 5, 2)
    expected[0, [0, 1]] = 1

    torch.testing.assert_close(run(GradSampleModule, ours=True).grad_sample, expected)


def test_norms_leave_padding_out() -> None:
    norms_B = run(GradSampleModuleFastGradientClipping, ours=True)._norm_sample

    torch.testing.assert_close(norms_B, torch.tensor([4.0**0.5, 0.0]))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_opacus_own_rules_still_give_padding_a_gradient(wrapper) -> None:
    """Where this fails, Opacus was mended, and ``leave_padding_out`` can go."""
    weight = run(wrapper, ours=False)
    norms_B = (
        weight.grad_sample.flatten(1).norm(dim=1)
        if wrapper is GradSampleModule
        else weight._norm_sample
    )

    assert norms_B[1] > 0


def test_another_model_keeps_opacus_own_rules() -> None:
    run(GradSampleModule, ours=True)

    assert run(GradSampleModule, ours=False).grad_sample[1, PADDING].abs().sum() > 0
