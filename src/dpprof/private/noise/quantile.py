"""A bound that follows a quantile of the gradients' norms, by counts with noise of their own.

Source: Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping", arXiv
1905.03871. Each step releases, beside its sum, how many gradients were at most C long: b - 1/2
summed over samples, b from 0 to 1, so that a sample moves it by 1/2. The next step's bound is
C exp(-0.2 (share - quantile)), where the share divides by the expected batch size.

Here b falls from 1 to 0 between 0.9 C and 1.1 C. The norms of the other samples may change in their
last digits when a sample is added; a b that jumps at C would turn each such change into 1.

Formal guarantee: sum and count of a step are one Gaussian mechanism (theorem 1). With noise of
standard deviation z' C on the sum, and s on the count, its noise multiplier z has
z^-2 = z'^-2 + (2 s)^-2. The accountant counts z; the sum gets the larger z'. The bound follows from
what is released.

The noise of a count follows from keys of its own (``noise_keys``), the step, the bound and the
count itself, so no two counts get the same noise, also where a run is repeated.
"""

import math

import numpy as np
from torch import Tensor

from dpprof.private.engine.factor import LARGEST_BOUND, LEAST_BOUND
from dpprof.private.noise.noise_keys import NoiseKeys

RATE = 0.2  # how fast the bound moves, as in the source
_RAMP = 0.1  # how far from the bound, as a share of it, gradients count in part
_COUNT_NOISE = 20  # expected batch size over the deviation of a count's noise


class QuantileBound:
    """Counts the gradients within a bound, and moves it to their quantile (``ValueError``)."""

    def __init__(self, quantile: float, expected_batch_size: float) -> None:
        if not 0 < quantile < 1:
            raise ValueError(f"bound_quantile must lie between 0 and 1, and is {quantile}")
        self.quantile, self._size = quantile, expected_batch_size
        self.count_noise = expected_batch_size / _COUNT_NOISE  # standard deviation
        self.keys = NoiseKeys()
        self._of_part = self._of_batch = 0.0
        self._next: float | None = None  # the bound after the step in which a count was released

    def split(self, noise_multiplier: float) -> float:
        """Return the sum's noise multiplier, of that of sum and count together (``ValueError``)."""
        if noise_multiplier == 0:
            return 0.0
        left = noise_multiplier**-2 - (2 * self.count_noise) ** -2
        if left <= 0:
            raise ValueError(
                f"bound_quantile needs an expected batch size above {10 * noise_multiplier:g}, ten "
                f"times the noise multiplier, and it is {self._size:g}"
            )
        return (1 + 1e-12) / math.sqrt(left)  # which rounding does not take below

    def join(self, noise_multiplier: float) -> float:
        """Return the noise multiplier of sum and count together, of that of the sum."""
        if noise_multiplier == 0:
            return 0.0
        return 1 / math.sqrt(noise_multiplier**-2 + (2 * self.count_noise) ** -2)

    def count(self, norms_B: Tensor, bound: float) -> None:
        """Count the gradients of a part; (B,) norms, of which NaN is above each bound."""
        above_B = norms_B.double() / bound - 1
        within_B = (0.5 - above_B / (2 * _RAMP)).clamp(0, 1).nan_to_num(0)
        self._of_part = float(within_B.sum()) - len(norms_B) / 2

    def close_part(self, *, is_first: bool) -> None:
        """Add the part to those before; the first of a batch takes the place of what was left."""
        before = 0.0 if is_first else self._of_batch
        self._of_batch, self._of_part = before + self._of_part, 0.0

    def release(self, bound: float, step: int) -> None:
        """Give the count of a batch its noise, of which the next bound follows."""
        self.keys.begin(step, [], self.count_noise)
        key = self.keys.derive("count", 32, repr((bound, self._of_batch)).encode())
        noise = np.random.default_rng(int.from_bytes(key)).normal(scale=self.count_noise)
        share = 0.5 + (self._of_batch + noise) / self._size
        moved = bound * math.exp(-RATE * (share - self.quantile))
        self._next = min(max(moved, LEAST_BOUND), LARGEST_BOUND)

    def move(self, bound: float) -> float:
        """Return the bound that was released, once; this one where none was."""
        moved, self._next = self._next, None
        return bound if moved is None else moved

    def describe(self) -> str:
        """Say what the guarantee of a step says beside that of its sum."""
        return (
            f"The bound moves after each step, to where {self.quantile:.0%} of gradients are "
            f"shorter: their count has Gaussian noise of standard deviation {self.count_noise:g}, "
            "and sum and count together are counted as one mechanism."
        )
