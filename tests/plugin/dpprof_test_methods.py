"""Another package's methods, most of which fail in their own way, and models.

Found through its entry points when this folder is on PYTHONPATH, as an installed
plug-in would be.
"""

import os
import signal
from pathlib import Path

import torch
from torch import nn

from dpprof.catalogue import UnsupportedError
from dpprof.clipping.factor import clip_factor
from dpprof.methods.base import ClipGroup, TrainingStep, mean_loss
from dpprof.methods.standard import Standard
from dpprof.target import Target


class Fails(Standard):
    """A standard step whose backward phase ends badly."""

    def compute_gradient(self, batch, enter):
        super().compute_gradient(batch, enter)
        self.fail()


class Dies(Fails):
    def fail(self):
        os.kill(os.getpid(), signal.SIGKILL)


class DiesOnce(Fails):
    def fail(self):
        marker = Path(os.environ["DPPROF_TEST_MARKER"])
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Raises(Fails):
    def fail(self):
        raise RuntimeError("a <script>alert(1)</script> \\input{x} $(touch pwned) | `x` & \x1b[31m")


class HalfACharacter(Fails):
    def fail(self):
        raise RuntimeError("half a \ud800 character")


class Refuses(Standard):
    def __init__(self, model, experiment):  # noqa: ARG002
        raise UnsupportedError("this method refuses every model")


class Right(TrainingStep):
    """DP-SGD one sample at a time, without noise; others get one thing in it wrong."""

    one_at_a_time = True

    def __init__(self, model, experiment):
        super().__init__(model, experiment)
        self.parameters = dict(model.named_parameters())

    def compute_gradient(self, batch, enter):
        enter("forward")
        sums = self.start_sums()
        norms = []
        for tokens_T, labels_T in self.samples(batch):
            loss = mean_loss(self.module(tokens_T[None]), labels_T[None])
            gradients = torch.autograd.grad(loss, list(self.parameters.values()))
            norms.append(self.norms(dict(zip(self.parameters, gradients, strict=True))))
            factors = [clip_factor(norm, group.bound) for norm, group in self.with_groups(norms)]
            for name, gradient in zip(self.parameters, gradients, strict=True):
                sums[name] += gradient * factors[self.group_of(name)]
        self.found_norms = torch.stack(norms)
        for name, parameter in self.parameters.items():
            parameter.grad = sums[name] / len(batch.tokens_BT)

    def with_groups(self, norms):
        return zip(norms[-1], self.clip_groups(), strict=True)

    def start_sums(self):
        return {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    def samples(self, batch):
        return zip(*batch, strict=True)

    def norms(self, gradients):
        return torch.cat([g.flatten() for g in gradients.values()]).norm()[None]

    def group_of(self, name):  # noqa: ARG002
        return 0


class RightByParameter(Right):
    """Every parameter is clipped by itself."""

    def clip_groups(self):
        count = len(self.parameters)
        bound = self.experiment.max_grad_norm / count**0.5
        return [ClipGroup([parameter], bound) for parameter in self.parameters.values()]

    def norms(self, gradients):
        return torch.stack([g.norm() for g in gradients.values()])

    def group_of(self, name):
        return list(self.parameters).index(name)

    def sample_norms(self):
        return self.found_norms


class ForgetsABias(Right):
    """Clips by a norm that leaves out a layer's bias."""

    def norms(self, gradients):
        left = {n: g for n, g in gradients.items() if n != "blocks.0.mlp.0.bias"}
        return super().norms(left)


class CountsTwice(Right):
    """Takes the last sample of a batch for two."""

    def samples(self, batch):
        samples = list(super().samples(batch))
        return [*samples, samples[-1]] if len(samples) > 1 else samples


class Remembers(Right):
    """Adds the second step's gradients to the first's."""

    def start_sums(self):
        self.sums = getattr(self, "sums", None) or super().start_sums()
        return self.sums


class MisstatesNorms(Right):
    """Tells half of the norms by which it clips."""

    def sample_norms(self):
        return self.found_norms[:, 0] / 2


class LeavesOneOut(Right):
    """Leaves a parameter without a gradient."""

    def compute_gradient(self, batch, enter):
        super().compute_gradient(batch, enter)
        next(iter(self.parameters.values())).grad = None


class ClipsAPart(Right):
    """Says that it clips all but one parameter."""

    def clip_groups(self):
        return [ClipGroup(list(self.parameters.values())[1:], self.experiment.max_grad_norm)]


class NotANumber(Right):
    """Divides nothing by nothing."""

    def norms(self, gradients):
        return super().norms(gradients) * 0 / 0


class OnlySdpa(Right):
    """Refuses what it was not made for."""

    def __init__(self, model, experiment):
        if experiment.attention != "sdpa":
            raise UnsupportedError("it knows no other attention")
        super().__init__(model, experiment)


class Scale(nn.Module):
    """A layer that Opacus has no rule for."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight


def build_scaled(experiment):
    """As ``build_linear``, with a layer in between that takes Opacus's fallback."""
    return nn.Sequential(nn.Embedding(11, 3), Scale(3), nn.Linear(3, 11, bias=False))


def build_linear(experiment):
    """Embedding and head, nothing between."""
    return nn.Sequential(nn.Embedding(11, 3), nn.Linear(3, 11, bias=False))


def build_moody(experiment):
    """Computes something else whenever it is asked."""

    class Moody(nn.Embedding):
        def forward(self, tokens):  # noqa: ARG002
            if torch.rand(()).item() >= 0:
                raise RuntimeError("not in the mood")

    return Moody(11, 11)


BOARD = Target.model_validate(
    {"memory_bytes": "64MiB", "flops_per_s": 1e9, "bandwidth_bytes_per_s": 1e8, "source": "a board"}
)
