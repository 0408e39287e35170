"""Another package's methods, most of which fail in their own way, and models.

Found through its entry points when this folder is on PYTHONPATH, as an installed
plug-in would be.
"""

import os
import signal

import torch
from torch import nn
from torch.nn import functional

from dpprof.experiments.config.target import Target
from dpprof.private.engine.factor import clip_factor
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.methods.standard import Standard
from dpprof.subjects.methods.training_step import ClipGroup, TrainingStep, mean_loss


class Fails(Standard):
    """A standard step whose backward phase ends badly."""

    def compute_gradient(self, batch, enter):
        super().compute_gradient(batch, enter)
        self.fail()


class Dies(Fails):
    def fail(self):
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

    @property
    def parameters(self):
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def compute_gradient(self, batch, enter):
        enter("forward")
        sums = self.start_sums()
        norms = []
        for tokens_T, labels_T in self.samples(batch):
            loss = self.loss(self.module(tokens_T[None]), labels_T[None])
            gradients = torch.autograd.grad(loss, list(self.parameters.values()))
            norms.append(self.norms(dict(zip(self.parameters, gradients, strict=True))))
            if not self.counts(loss):
                continue
            factors = [clip_factor(norm, group.bound) for norm, group in self.with_groups(norms)]
            for name, gradient in zip(self.parameters, gradients, strict=True):
                sums[name] += gradient * factors[self.group_of(name)]
        self.found_norms = torch.stack(norms) if norms else None
        for name, parameter in self.parameters.items():
            parameter.grad = sums[name] / self.experiment.batch_size

    def loss(self, logits_1TV, labels_1T):
        return mean_loss(logits_1TV, labels_1T)

    def counts(self, loss):
        return bool(loss.isfinite())

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

    mechanism = "clipping by parameter"

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


class CountsPadding(Right):
    """Takes tokens without a label for tokens whose loss is zero."""

    def loss(self, logits_1TV, labels_1T):
        losses = functional.cross_entropy(logits_1TV[0], labels_1T[0], reduction="none")
        return losses.mean()


class SaysFlat(RightByParameter):
    """Clips every parameter to a bound of its own, and says nothing of that."""

    mechanism = "flat clipping"


class EachToC(RightByParameter):
    """Clips every parameter to C: a whole sample can add more."""

    def clip_groups(self):
        bound = self.experiment.max_grad_norm
        return [group._replace(bound=bound) for group in super().clip_groups()]


class EachToCSilently(EachToC):
    """Has the number, and no word on it."""

    sensitivity = 100.0


class EachToCTold(EachToC):
    """Clips every parameter to C, and says so: the sum has a sensitivity of sqrt(k) C."""

    sensitivity = 100.0


class FlatWithASensitivity(Right):
    """Declares a sensitivity of 2 C for what is called flat clipping."""

    sensitivity = 2.0


class SaysItClips(Standard):
    """The mean gradient, under the name of a mechanism."""

    mechanism = "flat clipping"


class SaysItDoesNot(Right):
    """Clips, and declares that it does not."""

    mechanism = "none"


class MovesTheNoise(Right):
    """Clips to C, and scales its noise for half of that."""

    def noise_bound(self):
        return self.experiment.max_grad_norm / 2


class PassesOn(Right):
    """Knows the parameters that it was made for, and leaves others their whole gradient."""

    def __init__(self, model, experiment):
        super().__init__(model, experiment)
        self.known = {name for name, p in model.named_parameters() if p.requires_grad}

    def compute_gradient(self, batch, enter):
        thawed = [p for name, p in self.parameters.items() if name not in self.known]
        for parameter in thawed:
            parameter.requires_grad_(False)
        super().compute_gradient(batch, enter)
        for parameter in thawed:
            parameter.requires_grad_(True)
        if thawed:
            loss = mean_loss(self.module(batch.x), batch.labels)
            for parameter, gradient in zip(thawed, torch.autograd.grad(loss, thawed), strict=True):
                parameter.grad = gradient


class LetsThrough(Right):
    """Counts every sample, whatever its loss is."""

    def counts(self, loss):  # noqa: ARG002
        return True


class ReAdds(Right):
    """Adds what it finds in ``.grad`` to the sum before it divides."""

    def start_sums(self):
        zeros = super().start_sums()
        found = {name: p.grad for name, p in self.parameters.items()}
        return {n: zero if found[n] is None else zero + found[n] for n, zero in zeros.items()}


class UpdatesFrozen(Right):
    """Leaves a gradient on parameters that were frozen after it was made."""

    def __init__(self, model, experiment):
        super().__init__(model, experiment)
        self.known = [p for p in model.parameters() if p.requires_grad]

    def compute_gradient(self, batch, enter):
        super().compute_gradient(batch, enter)
        for parameter in self.known:
            if not parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)


class FreezesTheRest(Right):
    """Leaves frozen parameters out of the model, and some others with them."""

    def compute_gradient(self, batch, enter):
        super().compute_gradient(batch, enter)
        if len(self.parameters) < len(list(self.module.parameters())):
            for parameter in list(self.parameters.values())[1:]:
                parameter.grad = parameter.grad / 2


class WaitsForNoise(Right):
    """Leaves no gradient of an empty batch, and so no place for noise."""

    def compute_gradient(self, batch, enter):
        if len(batch.x):
            super().compute_gradient(batch, enter)


class RefusesAll(Right):
    """Refuses whatever is out of the ordinary."""

    def __init__(self, model, experiment):
        super().__init__(model, experiment)
        self.known = set(self.parameters)

    def compute_gradient(self, batch, enter):
        if set(self.parameters) != self.known:
            raise RuntimeError("parameters were frozen or thawed")
        if not len(batch.x):
            raise RuntimeError("there are no samples")
        if any(p.grad is not None for p in self.parameters.values()):
            raise RuntimeError("gradients were not cleared")
        super().compute_gradient(batch, enter)

    def counts(self, loss):
        if not loss.isfinite():
            raise RuntimeError("a sample is not finite")
        return True


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


class Tied(nn.Embedding):
    """A table that is its own head."""

    def forward(self, tokens):
        return functional.linear(super().forward(tokens), self.weight)


def build_tied(experiment):
    return Tied(11, 3)


def build_moody(experiment):
    """Computes something else whenever it is asked."""

    class Moody(nn.Embedding):
        def forward(self, tokens):  # noqa: ARG002
            if torch.rand(()).item() >= 0:
                raise RuntimeError("not in the mood")

    return nn.Sequential(Moody(11, 3), nn.Linear(3, 11))


BOARD = Target.model_validate(
    {"memory_bytes": "64MiB", "flops_per_s": 1e9, "bandwidth_bytes_per_s": 1e8, "source": "a board"}
)
