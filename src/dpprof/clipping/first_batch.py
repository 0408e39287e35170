"""Verifies on the first batch that no sample's loss depends on another sample.

Clipping sees layers, and not the code between them. Code that mixes samples, or that puts another
axis of the same length first, makes norms those of no sample. One backward of one sample's loss
shows it: the gradient of a trained layer's output must be zero outside of that sample's entries,
exactly, since zeros stay zeros on their way.

What it proves: on this batch, the loss of one sample does not depend on what trained layers
computed for the others, by any path that autograd differentiates. It cannot see what reaches a loss
without a gradient (a count of the batch's tokens, a detached mean), what mixes before the first
trained layer, what other samples of the batch do, and what the code does on other data or in later
steps. ``Clipping.check`` sees some of it.

Shape legend: B samples, T tokens, p width of an output.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpprof.clipping.contributions import (
    Contribution,
    Lookup,
    Product,
    SampleGradients,
    Scale,
    Shift,
)
from dpprof.clipping.layers import Contributions

FIRST_BATCH = ("verified", "trusted")
"""What may become of the first batch."""


class FirstBatch:
    """Looks at one backward of one sample's loss.

    Args:
        losses: (B,)
        name_of: Names a layer.
    """

    def __init__(self, losses: Tensor, name_of: Callable[[nn.Module], str]) -> None:
        self._name_of = name_of
        self._samples = len(losses)
        finite = losses.detach().isfinite().nonzero().flatten().tolist()
        self.sample = finite[len(finite) // 2] if finite and self._samples > 1 else None
        """Whose loss is differentiated: the middle one of those that are finite; None for none."""

        self.problem: str | None = None
        """What is wrong with the first layer, in the order of backward, where something is."""

    def weigh(self, losses: Tensor) -> Tensor:
        """Return the gradient with which the losses are differentiated; (B,)."""
        weights_B = torch.zeros_like(losses)
        if self.sample is not None:
            weights_B[self.sample] = 1
        return weights_B

    def look(self, layer: nn.Module, contributions: Contributions) -> None:
        """Look at the gradients of a layer's outputs."""
        for _, contribution in contributions:
            gradients = _gradients_of(contribution)
            # Another length is refused when norms are taken.
            if self.problem is None and self.sample is not None and len(gradients) == self._samples:
                self.problem = self._find_problem(layer, gradients, self.sample)

    def _find_problem(self, layer: nn.Module, gradients: Tensor, sample: int) -> str | None:
        others = [at for at in _find_nonzero(gradients, 0) if at != sample]
        if not others:
            return None
        problem = f"{self._name_of(layer)} saw another axis than samples first, of the same length"
        if not _lies_on_another_axis(gradients, sample):
            problem = (
                f"the loss of sample {sample} depends on what {self._name_of(layer)} computed for "
                f"sample {others[0]}: code after it mixes samples, or another axis comes first"
            )
        return (
            f"{problem}; keep samples apart and on the first axis everywhere "
            "(first_batch='trusted' skips this check, and clips wrongly where it would fail)"
        )


def _gradients_of(contribution: Contribution) -> Tensor:
    """Return output gradients, or the parameter's; samples first."""
    match contribution:
        case SampleGradients(gradients):
            return gradients.reshape(len(gradients), -1)
        case Shift(g) | Product(_, g) | Lookup(_, g) | Scale(_, _, _, g):
            return g
    raise AssertionError(contribution)


def _find_nonzero(gradients: Tensor, axis: int) -> list[int]:
    """List the places on an axis where something is not zero; NaN counts as zero."""
    others = [at for at in range(gradients.dim()) if at != axis]
    largest = (
        torch.linalg.vector_norm(gradients, torch.inf, dim=others) if others else gradients.abs()
    )
    return (largest > 0).nonzero().flatten().tolist()


def _lies_on_another_axis(gradients: Tensor, sample: int) -> bool:
    """Tell whether a sample's entries of (B, T, p) lie on the first or last axis that T has."""
    B, T = len(gradients), gradients.shape[1:2].numel()
    if T % B:
        return False
    shapes = {1: (B, B, T // B, -1), 2: (B, T // B, B, -1)}
    return any(
        _find_nonzero(gradients.reshape(shape), axis) == [sample] for axis, shape in shapes.items()
    )


@contextmanager
def random_state_kept(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Restore the state of PyTorch's generators at the end of the context."""
    devices = {p.device for p in parameters if p.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    indices = sorted({device.index for device in devices if device.type == kind})
    with torch.random.fork_rng(devices=indices, device_type=kind):
        yield
