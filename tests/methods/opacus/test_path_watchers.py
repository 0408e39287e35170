"""The code path told is the one taken, and watching leaves nothing behind."""

import pytest
import torch
from factory import make_experiment
from torch import Tensor, nn

from dpprof.instruments.samplers import SamplerPaths
from dpprof.methods.training_step import Batch, TrainingStep
from dpprof.models.build import build_model
from dpprof.spec import registry

TRANSFORMER = {
    "standard": {},
    "microbatch": {},
    "opacus-hooks": dict.fromkeys(["Embedding", "LayerNorm", "Linear"], "grad sampler"),
    "opacus-functorch": dict.fromkeys(["Embedding", "LayerNorm", "Linear"], "functorch"),
    "opacus-ew": dict.fromkeys(["Embedding", "LayerNorm", "Linear"], "expanded weights"),
    "opacus-per-layer": dict.fromkeys(["Embedding", "LayerNorm", "Linear"], "grad sampler"),
    "opacus-fast-gradient-clipping": dict.fromkeys(
        ["Embedding", "LayerNorm", "Linear"], "grad sampler"
    ),
    "opacus-ghost": {
        "Embedding": "norm sampler",
        "LayerNorm": "grad sampler",
        "Linear": "norm sampler",
    },
}
TRANSFORMER["opacus-adaptive"] = TRANSFORMER["opacus-ghost"]


OWN = {
    "Embedding": "sums of rows",
    "LayerNorm": "sample gradients",
    "Linear": "sample gradients, tiled gram",
}
KEEPING = OWN | {"Linear": "kept product, sample gradients, tiled gram"}
TRANSFORMER |= {"flash": OWN, "flash-bk": KEEPING, "per-layer": KEEPING}


class Scale(nn.Module):
    """A layer that Opacus has no rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def prepare(method: str, *, scaled: bool = False) -> tuple[TrainingStep, Batch]:
    experiment = make_experiment(method=method, noise_multiplier=0.1)
    model = build_model(experiment)
    if scaled:
        model = nn.Sequential(model, Scale())
    step = registry.load("methods", method)(model, experiment)
    step.attach_optimizer(torch.optim.SGD(step.module.parameters(), lr=0.1))
    tokens = torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(0))
    return step, Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@pytest.mark.parametrize("method", registry.names("methods"))
def test_the_path_of_every_layer_type(method) -> None:
    step, batch = prepare(method)
    paths = SamplerPaths()
    with step.watch_samplers(paths):
        step.run(batch, lambda _: None)

    assert (paths.by_layer or {}) == TRANSFORMER[method]


@pytest.mark.parametrize("method", ["opacus-ghost", "opacus-hooks"])
def test_a_silent_fallback_is_told(method) -> None:
    step, batch = prepare(method, scaled=True)
    paths = SamplerPaths()
    with step.watch_samplers(paths):
        step.run(batch, lambda _: None)

    assert paths.by_layer == TRANSFORMER[method] | {"Scale": "functorch"}


@pytest.mark.parametrize("method", registry.names("methods"))
def test_nothing_is_told_of_steps_outside_and_nothing_stays(method) -> None:
    step, batch = prepare(method)
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
    for watched in (False, True):
        torch.manual_seed(0)
        step, batch = prepare(method)
        torch.manual_seed(1)
        if watched:
            with step.watch_samplers(SamplerPaths()):
                step.compute_gradient(batch, lambda _: None)
        else:
            step.compute_gradient(batch, lambda _: None)
        gradients.append([p.grad for p in step.module.parameters()])

    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
