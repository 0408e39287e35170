"""Gaussian noise, drawn and added to sums.

On a GPU with Triton one kernel draws noise and adds it: in place, and at the speed at which memory
is read and written. In each step a key is drawn from the optimizer's generator, and the noise of
every sum follows from it. Elsewhere PyTorch draws noise from the generator, one parameter's at a
time. Both are pseudorandom numbers of 32 bits: no noise is larger than 6.8 standard deviations,
which 1 of 10^11 normal numbers would be. Neither generator is cryptographically secure.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dpprof.norms import placement, triton_ops
from dpprof.norms.tiles import spans
from dpprof.records.births import allocates

DRAWN_AT_ONCE = 2**22
"""Elements of noise that a CPU holds."""

GeneratorOn = Callable[[torch.device], torch.Generator | None]
"""Returns what noise on a device is drawn from; None for PyTorch's own generator."""


class NoiseOfStep:
    """Adds the noise of one step to sums, and averages them.

    Args:
        std: Standard deviation of the noise of an average.
        size: What sums are divided by.
        generator_on: What noise is drawn from.
    """

    def __init__(self, std: float, size: float, generator_on: GeneratorOn) -> None:
        self._std, self._size, self._generator_on = std, size, generator_on
        self._keys: dict[torch.device, Tensor] = {}
        self._count = 0

    @torch.no_grad()
    def add_to(self, summed: Tensor, *others: Tensor) -> None:
        """Add noise to a sum and average it; average others, which get noise elsewhere."""
        for other in others:
            other.div_(self._size)
        if self._std == 0:
            summed.div_(self._size)
            return
        generator = self._generator_on(summed.device)
        if _has_kernel(summed):
            if summed.device not in self._keys:
                self._keys[summed.device] = draw_key(summed.device, generator)
            key = self._keys[summed.device]
            triton_ops.add_noise_(summed, key, self._count, self._std, 1 / self._size)
            self._count += 1
        else:
            for part in _split(summed):
                noise = draw_noise(self._std, part, generator)
                torch.add(noise, part, alpha=1 / self._size, out=part)


def _split(summed: Tensor) -> tuple[Tensor, ...]:
    """Split a sum into parts that get their noise one after the other.

    On a CPU each draw is as slow as its memory is new; on a GPU each is a launch.
    """
    if placement.is_cuda(summed) or not summed.is_contiguous() or not summed.numel():
        return (summed,)
    flat = summed.view(-1)
    return tuple(flat[some] for some in spans(len(flat), DRAWN_AT_ONCE))


def _has_kernel(summed: Tensor) -> bool:
    return triton_ops.is_fused(summed) and summed.dtype == torch.float32 and summed.is_contiguous()


@allocates("noise")
def draw_key(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Draw 63 random bits, from which the noise of a step follows; (1,), int64."""
    return torch.empty(1, dtype=torch.int64, device=device).random_(generator=generator)


@allocates("noise")
def draw_noise(std: float, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw Gaussian noise of a tensor's device and shape, in float32 at least.

    In 16 bits, noise much smaller than the sum could be rounded away before it is added.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.normal(
        *(0.0, std, like.shape),
        generator=generator,
        dtype=dtype,
        device=like.device,
    )


@allocates("noise")
def draw_secure_noise(std: float, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw Gaussian noise whose floating point numbers do not reveal the sum that it is added to.

    It is half the sum of four draws, after one that is thrown away: the same numbers as Opacus's.
    Source: Holohan & Braghin 2021, "Secure Random Sampling in Differential Privacy", section 5.1.
    """

    def draw(*shape: int) -> Tensor:
        return torch.normal(0.0, std, shape, generator=generator, device=like.device)

    draw(1, 1)
    total = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
    for _ in range(4):
        total += draw(*like.shape)
    return total / 2
