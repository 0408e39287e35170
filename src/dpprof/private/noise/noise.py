"""Gaussian noise, drawn and added to sums.

All noise of a step follows from its key (``noise_keys``), and correlated noise from past noise too
(``buffers``). On a GPU with Triton one kernel draws
noise and adds it: in place, and at the speed at which memory is read and written. Elsewhere
PyTorch's generators draw it, one parameter's at a time; on a CPU the parts of a long sum get noise
in several threads, from generators of their own, whose states are drawn from the step's, whole.
All follow from pseudorandom numbers of few bits, so large noise is missing: beyond 6.7 standard
deviations in kernels (32 bits; 1 of 10^11 normal numbers lies there), and beyond 5.77 of float32 on
a CPU (24 bits; 1 of 10^8). ``draw_secure_noise`` is for those who trust in ciphers alone.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from dpprof.private.allocation_marks import allocates
from dpprof.private.noise.buffers import NoiseBuffers
from dpprof.private.noise.noise_keys import WORDS, StepKey, set_words, takes_kernel
from dpprof.private.norms import placement, triton_ops
from dpprof.private.norms.complex_numbers import as_real
from dpprof.private.norms.tiles import spans

DRAWN_IN_TURN = 2**20
"""Elements of noise from one generator where several threads draw: noise does not depend on how
many there are."""

_AT_ONCE = 2**15
"""Elements that a thread draws before it adds them: they stay in its cache, and PyTorch adds so few
in the thread itself."""


class NoiseOfStep:
    """Adds the noise of one step to sums, and averages them.

    ``std`` is that of the noise of an average, and of draws of ``buffers``; sums are divided by
    ``size``.
    """

    def __init__(
        self, std: float, size: float, key: StepKey, buffers: NoiseBuffers | None = None
    ) -> None:
        self._std, self._size, self._key, self._buffers = std, size, key, buffers
        self._count = 0

    @torch.no_grad()
    def add_to(self, summed: Tensor, *others: Tensor) -> None:
        """Add noise to a sum and average it; average others, which get noise elsewhere.

        Each part of a complex number gets noise of the whole standard deviation.
        """
        summed = as_real(summed)
        for other in others:
            other.div_(self._size)
        if self._std == 0:
            summed.div_(self._size)
        elif self._buffers is None:
            self._add_draw(summed, 1 / self._size)
        else:
            self._buffers.add_noise(summed.div_(self._size), self._add_draw)

    def _add_draw(self, summed: Tensor, factor: float) -> None:
        """Multiply a tensor by a factor, and add new noise."""
        if takes_kernel(summed):
            words = self._key.words_on(summed.device)
            triton_ops.add_noise_(summed, words, self._count, self._std, factor)
            self._count += 1
            return
        generator = self._key.generator_on(summed.device)
        is_on_cpu = summed.is_cpu and not placement.is_cuda(summed)
        if is_on_cpu and summed.is_contiguous() and summed.numel() > DRAWN_IN_TURN:
            count = -(-summed.numel() // DRAWN_IN_TURN)
            states = draw_states(count, summed.device, generator)
            room = make_room(count, summed)
            add_noise_in_threads_(summed, states, room, self._std, factor)
        else:
            noise = draw_noise(self._std, summed, generator)
            torch.add(noise, summed, alpha=factor, out=summed)


@allocates("noise")
def draw_noise(std: float, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw Gaussian noise of a tensor's device and shape, in float32 at least.

    In 16 bits, noise much smaller than the sum could be rounded away before it is added. Of complex
    noise each part has the whole standard deviation; ``torch.normal`` would split the variance.
    """
    real = as_real(like)
    drawn = torch.normal(
        *(0.0, std, real.shape),
        generator=generator,
        dtype=_dtype_of_noise(real),
        device=like.device,
    )
    return torch.view_as_complex(drawn) if like.is_complex() else drawn


def _dtype_of_noise(summed: Tensor) -> torch.dtype:
    return torch.promote_types(summed.dtype, torch.float32)


@allocates("noise")
def draw_states(count: int, cpu: torch.device, generator: torch.Generator | None) -> Tensor:
    """Draw the states of generators from another; (count, 624), int64 below 2^32."""
    words = torch.empty(count, WORDS, dtype=torch.int64, device=cpu)
    return words.random_(2**32, generator=generator)


@allocates("noise")
def make_room(count: int, summed: Tensor) -> Tensor:
    """Take the memory that the noise of each part of a sum is drawn in."""
    return torch.empty(count, _AT_ONCE, dtype=_dtype_of_noise(summed), device=summed.device)


@torch.library.custom_op(
    "dpprof::add_noise_in_threads_", mutates_args={"summed", "room"}, device_types="cpu"
)
def add_noise_in_threads_(
    summed: Tensor, words: Tensor, room: Tensor, std: float, factor: float
) -> None:
    """Multiply a sum on a CPU by a factor and add noise, in place, in PyTorch's threads.

    ``summed`` is contiguous. Each part of it has the state of a generator, in ``words``, and a
    row for its noise, in ``room`` (``ValueError``).
    """
    is_inference = torch.is_inference_mode_enabled()  # other threads have modes of their own

    def add(part: Tensor, state: Tensor, row: Tensor) -> None:
        generator = torch.Generator("cpu")
        set_words(generator, state)
        with torch.inference_mode(is_inference), torch.no_grad():
            for some in spans(len(part), _AT_ONCE):
                few = part[some]
                noise = row[: len(few)].normal_(0.0, std, generator=generator)
                torch.add(noise, few, alpha=factor, out=few)

    # The operator counts as one change of each; through .data its threads add none.
    parts = torch.split(summed.data.view(-1), DRAWN_IN_TURN)
    rows = list(zip(parts, words, room.data, strict=True))
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(add, *zip(*rows, strict=True)))  # raises what a thread raised


@add_noise_in_threads_.register_fake
def _noised(_summed: Tensor, _words: Tensor, _room: Tensor, _std: float, _factor: float) -> None:
    """Allocate nothing."""


@allocates("noise")
def draw_secure_noise(std: float, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw Gaussian noise whose floating point numbers do not reveal the sum that it is added to.

    It is half the sum of four draws, which are Opacus's where a generator is given, a
    cryptographically secure one. Draws of fewer bits would leave the sum's last ones bare. Source:
    Holohan & Braghin 2021, "Secure Random Sampling in Differential Privacy", section 5.1.
    """
    if generator is not None:
        draw_noise(std, like.new_empty(1, 1), generator)  # so that no half of a pair is old
    drawn = (
        draw_noise(std, like, generator) if generator else _draw_from_system(std, like)
        for _ in range(4)
    )
    total = next(drawn)
    for another in drawn:
        total += another
    return total / 2


def _draw_from_system(std: float, like: Tensor) -> Tensor:
    """Draw normal numbers from the operating system's random bits (Box and Muller 1958)."""
    real = as_real(like)
    n = -(-real.numel() // 2)
    bits = torch.frombuffer(bytearray(os.urandom(16 * n or 16)), dtype=torch.int64)[: 2 * n]
    # 53 bits, the centres of as many equal parts of the unit interval.
    uniform = ((bits >> 11) + 2**52).to(torch.float64).add_(0.5).mul_(2.0**-53)
    radius, angle = uniform[:n].log().mul_(-2).sqrt_(), uniform[n:].mul(2 * math.pi)
    normal = torch.cat([radius * angle.cos(), radius * angle.sin()])[: real.numel()]
    drawn = normal.mul_(std).view(real.shape).to(like.device, _dtype_of_noise(real))
    return torch.view_as_complex(drawn) if like.is_complex() else drawn


def refuse_insecure(generator: torch.Generator | None) -> None:
    """Refuse a generator that is not cryptographically secure: one that tells its state.

    Raises:
        ValueError: It is PyTorch's own.
    """
    if generator is None:
        return
    try:
        generator.get_state()
    except RuntimeError:
        return
    raise ValueError(
        "secure_mode needs a cryptographically secure generator, and PyTorch's own are not; leave "
        "out the generator, so that the operating system draws"
    )
