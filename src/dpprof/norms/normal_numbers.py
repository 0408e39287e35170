"""Draws many normal numbers on all cores.

A generator of PyTorch draws on one core. So a key is drawn from it, and each part of the numbers is
drawn by a generator of its own, whose state follows from the key and from the part's place: the
numbers do not depend on how many cores there are. A state is set whole, from SHAKE-256, because
PyTorch's seeds have 32 bits on a CPU: among 2^16 parts two would get the same noise.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from dpprof.norms.tiles import spans

PART = 2**18
"""Numbers that are drawn by one generator."""

KEY_WORDS = 5
"""Words of a key, each of 63 random bits."""

_WORDS = slice(24, 24 + 8 * 624)
"""Where the 624 words of a Mersenne Twister lie in a generator's state, 32 bits in 64 each; before
them are a seed and the position."""


@torch.library.custom_op("dpprof::draw_normal_", mutates_args={"numbers"})
def draw_normal_(numbers: Tensor, std: float, key: Tensor, which: int) -> None:
    """Fill a tensor on the CPU with normal numbers, in place.

    Args:
        numbers: Without gaps; (N,).
        std: Their standard deviation.
        key: ``KEY_WORDS`` random numbers; int64.
        which: Number of the tensor, below 2^63: two of a key and a number get the same noise.
    """
    stem = key.numpy().tobytes() + which.to_bytes(8, "little")
    parts = [numbers[some] for some in spans(len(numbers), PART)]

    def fill(place: int) -> None:
        parts[place].normal_(0.0, std, generator=_make_generator(stem, place))

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill, range(len(parts))))


@draw_normal_.register_fake
def _draw_nothing(_numbers: Tensor, _std: float, _key: Tensor, _which: int) -> None:
    """Allocate nothing."""


def _make_generator(stem: bytes, place: int) -> torch.Generator:
    generator = torch.Generator().manual_seed(0)  # which puts it before its first number
    state = generator.get_state().numpy()
    digest = hashlib.shake_256(stem + place.to_bytes(8, "little")).digest(4 * 624)
    state[_WORDS] = np.frombuffer(digest, dtype="<u4").astype(np.uint64).view(np.uint8)
    generator.set_state(torch.from_numpy(state))
    return generator


def can_derive(generator: torch.Generator | None) -> bool:
    """Tell whether a generator is PyTorch's own on a CPU, and not one that is to be more secure."""
    own = torch.Generator().get_state()
    try:
        return generator is None or generator.get_state().shape == own.shape
    except RuntimeError:  # it does not give its state
        return False


NORMAL = torch.ops.dpprof.draw_normal_
"""``draw_normal_`` as PyTorch's operator."""
