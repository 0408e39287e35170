"""Gaussian noise, drawn and added to sums.

On a GPU with Triton one kernel draws noise and adds it: in place, and at the speed at which memory
is read and written. In each step a key is drawn from the optimizer's generator, and the noise of
every sum follows from it. Elsewhere PyTorch draws noise from the generator, one parameter's at a
time. On a CPU the parts of a long sum get noise in several threads, from generators of their own,
whose states are drawn from that one, whole: a seed would be no more than 32 bits of them. All are
pseudorandom numbers of 32 bits: no noise is larger than 6.8 standard deviations, which 1 of 10^11
normal numbers would be. No generator is cryptographically secure.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from dpprof.norms import placement, triton_ops
from dpprof.norms.complex_numbers import as_real
from dpprof.norms.tiles import spans
from dpprof.records.births import allocates

DRAWN_IN_TURN = 2**20
"""Elements of noise from one generator where several threads draw: noise does not depend on how
many there are."""

_AT_ONCE = 2**15
"""Elements that a thread draws before it adds them: they stay in its cache, and PyTorch adds so few
in the thread itself."""

_WORDS = 624
"""Words of 32 bits in the state of PyTorch's generator on a CPU, MT19937."""

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
        """Add noise to a sum and average it; average others, which get noise elsewhere.

        Each part of a complex number gets noise of the whole standard deviation.
        """
        summed = as_real(summed)
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
        elif _is_long(summed):
            count = -(-summed.numel() // DRAWN_IN_TURN)
            words = draw_states(count, summed.device, generator)
            room = make_room(count, summed)
            add_noise_in_threads_(summed, words, room, self._std, 1 / self._size)
        else:
            noise = draw_noise(self._std, summed, generator)
            torch.add(noise, summed, alpha=1 / self._size, out=summed)


def _is_long(summed: Tensor) -> bool:
    """Tell whether several threads of a CPU draw a sum's noise."""
    is_on_cpu = summed.is_cpu and not placement.is_cuda(summed)
    return is_on_cpu and summed.is_contiguous() and summed.numel() > DRAWN_IN_TURN


def _has_kernel(summed: Tensor) -> bool:
    return triton_ops.is_fused(summed) and summed.dtype == torch.float32 and summed.is_contiguous()


@allocates("noise")
def draw_key(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Draw 63 random bits, from which the noise of a step follows; (1,), int64."""
    return torch.empty(1, dtype=torch.int64, device=device).random_(generator=generator)


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
    words = torch.empty(count, _WORDS, dtype=torch.int64, device=cpu)
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
    """Multiply a sum on a CPU by a factor and add noise, in as many threads as PyTorch uses.

    Args:
        summed: Changed in place; contiguous.
        words: The states of the generators of its parts.
        room: A row for the noise of each part.
        std: Standard deviation of the noise.
        factor: What the sum is multiplied by.

    Raises:
        ValueError: There are more or fewer states or rows than parts.
    """
    is_inference = torch.is_inference_mode_enabled()  # other threads have modes of their own

    def add(given: tuple[Tensor, Tensor, Tensor]) -> None:
        part, state, row = given
        generator = _start_generator(state)
        with torch.inference_mode(is_inference), torch.no_grad():
            for some in spans(len(part), _AT_ONCE):
                few = part[some]
                noise = row[: len(few)].normal_(0.0, std, generator=generator)
                torch.add(noise, few, alpha=factor, out=few)

    # The operator counts as one change of each; through .data its threads add none.
    parts = torch.split(summed.data.view(-1), DRAWN_IN_TURN)
    given = list(zip(parts, words, room.data, strict=True))
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(add, given))  # raises what a thread raised


@add_noise_in_threads_.register_fake
def _noised(_summed: Tensor, _words: Tensor, _room: Tensor, _std: float, _factor: float) -> None:
    """Allocate nothing."""


def _start_generator(words: Tensor) -> torch.Generator:
    """Return PyTorch's generator on a CPU in a state, which lies behind a seed and a position."""
    generator = torch.Generator("cpu")
    state = generator.get_state()
    state.view(torch.int64)[3 : 3 + _WORDS] = words
    return generator.set_state(state)


@allocates("noise")
def draw_secure_noise(std: float, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw Gaussian noise whose floating point numbers do not reveal the sum that it is added to.

    It is half the sum of four draws, after one that is thrown away: the same numbers as Opacus's
    where the default dtype is the sum's. Draws of fewer bits would leave the sum's last ones bare.
    Source: Holohan & Braghin 2021, "Secure Random Sampling in Differential Privacy", section 5.1.
    """
    draw_noise(std, like.new_empty(1, 1), generator)
    total = draw_noise(std, like, generator)
    for _ in range(3):
        total += draw_noise(std, like, generator)
    return total / 2
