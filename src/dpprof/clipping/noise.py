"""Gaussian noise, drawn and added to sums.

On a GPU with Triton one kernel draws noise and adds it: in place, and at the speed at which memory
is read and written. In each step a key is drawn from the optimizer's generator, and the noise of
every sum follows from it. On a CPU the noise of large sums follows from such a key too, and all
cores draw it. Elsewhere PyTorch draws noise from the generator, one parameter's at a time. All are
pseudorandom numbers of 32 bits: no noise is larger than 6.8 standard deviations, which 1 of 10^11
normal numbers would be. No generator is cryptographically secure; one that a user made so draws all
noise itself.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dpprof.norms import placement, triton_ops
from dpprof.norms.normal_numbers import KEY_WORDS, PART, can_derive, draw_normal_
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
        elif _has_kernel(summed):
            key = self._key_on(summed.device, 1)
            triton_ops.add_noise_(summed, key, self._next(), self._std, 1 / self._size)
        else:
            for part in _split(summed):
                torch.add(self._draw(part), part, alpha=1 / self._size, out=part)

    def _draw(self, part: Tensor) -> Tensor:
        generator = self._generator_on(part.device)
        if placement.is_cuda(part) or part.numel() <= PART or not can_derive(generator):
            return draw_noise(self._std, part, generator)
        return draw_derived_noise(
            self._std, part, self._key_on(part.device, KEY_WORDS), self._next()
        )

    def _key_on(self, device: torch.device, words: int) -> Tensor:
        """Return the step's key for noise on a device, which is drawn at its first use."""
        if device not in self._keys:
            self._keys[device] = draw_key(device, self._generator_on(device), words)
        return self._keys[device]

    def _next(self) -> int:
        """Count what gets noise from a key, so that no two get the same."""
        self._count += 1
        return self._count - 1


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
def draw_key(device: torch.device, generator: torch.Generator | None, words: int) -> Tensor:
    """Draw words of 63 random bits, from which the noise of a step follows; (words,), int64."""
    return torch.empty(words, dtype=torch.int64, device=device).random_(generator=generator)


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
def draw_derived_noise(std: float, like: Tensor, key: Tensor, which: int) -> Tensor:
    """Draw noise as ``draw_noise`` does, for a tensor on the CPU, from a key and on all cores."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    noise = torch.empty(like.numel(), dtype=dtype)
    draw_normal_(noise, std, key, which)
    return noise.view(like.shape)


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
