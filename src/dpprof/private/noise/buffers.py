"""Past noise, of which correlated noise takes a part back: what is kept, and when it is forgotten.

The noise of a step is ``y = draw + sum of weights times what is kept`` (``strategies``): of the
last steps their y for ``banded``, and their draws for ``bisr``. It is drawn as ever, from the
step's key (``noise_keys``). Two things are added, so that no two releases can be subtracted without
noise:

* **Draws follow from the whole past.** Bound to their own sums alone, two runs that part and have
  equal sums later, such as of batches without samples, would draw equal noise there, and the
  difference of what they released would be past noise alone: subtracted from an earlier difference
  it bares the samples. So a step's key follows from the key of the step before, too. Where two runs
  part, all their draws are independent from then on.
* **What is kept belongs to one line of steps.** A strategy covers no other. Whatever
  breaks the line begins it anew, with nothing kept: a state that is loaded without ``exact``, a
  fork, a batch that is thrown away (the sampler goes on, so a sample would return too early), a
  batch of another fold than the next one in turn, noise that was interrupted. All noise from there
  on is independent of all before. So both parts are
  mechanisms of their own, each with the sensitivity of its strategy, and what they spent adds up:
  with ``banded`` each participation counts, as ever; with ``bisr`` each beginning counts once.

An exact resume restores what is kept: equal sums get equal noise. If the data differ and both runs
are released, what follows has draws of its own, so nothing cancels. But what samples added in the
steps before is seen again, below other draws: those of the last ``bands - 1`` steps count once more
with ``banded``, and the whole training once more with ``bisr``.

What is kept tells the exact sums to everybody who sees what was released: it is a secret.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dpprof.private.allocation_marks import allocates
from dpprof.private.contributions.sums import dtype_of_sum, own_part
from dpprof.private.noise.strategies import Strategy

AddDraw = Callable[[Tensor, float], None]  # multiplies by a factor, and adds a draw
PLACES = ("device", "cpu")  # where past noise is kept: where the sums are, or in the host's memory


class NoiseBuffers:
    """What is kept of past noise, in one of ``PLACES``, by the sums that get noise together."""

    def __init__(self, strategy: Strategy, place: str = "device") -> None:
        if place not in PLACES:
            raise ValueError(f"noise_buffers must be one of {', '.join(PLACES)}, and is {place!r}")
        self.strategy, self._place = strategy, place
        self._nonce: bytes | None = None
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what is kept: noise from now on is independent of all before."""
        self.kept: list[Tensor] = []  # ``bands - 1`` a sum, in the order of noise
        self.key = b""  # of the last step
        self.done = 0  # steps since the strategy began
        self.fold: int | None = None  # of the data, from which the last step's batch was drawn
        self._at = 0
        self._is_open = self._is_loaded = False

    def count_bytes(self, parameters: Iterable[Tensor]) -> int:
        """Count the bytes that will be kept where these parameters are."""
        if self._place == "cpu":
            return 0
        sizes = (own_part(p).numel() * dtype_of_sum(p).itemsize for p in parameters)
        return (self.strategy.bands - 1) * sum(sizes)

    def begin(self, nonce: bytes, fold: int | None = None) -> None:
        """Begin a step.

        Keys with another nonce are of another line of steps, and so is a fold that is not the next:
        a sample of it may have taken part too short a time ago. It is None where a loop draws by
        itself.
        """
        follows = self.fold is None or fold == (self.fold + 1) % self.strategy.folds
        if self._is_open or nonce != self._nonce or not follows:
            self.begin_anew()
        self._nonce, self._at, self._is_open, self.fold = nonce, 0, True, fold

    def add_noise(self, averaged: Tensor, add_draw: AddDraw) -> None:
        """Add noise to the next of the step's sums, as ordered before, and keep what is needed."""
        weights = self.strategy.weights
        if not weights:
            add_draw(averaged, 1.0)
            return
        kept, turn = self._kept_for(averaged), self.done % len(weights)
        *newer, oldest = (kept[turn - age] for age in range(1, len(weights) + 1))
        where, is_on_host = averaged.device, self._place == "cpu"
        # What is kept of this step takes the place of the oldest.
        drawn = oldest.to(where, non_blocking=True, copy=True) if is_on_host else oldest
        if self.strategy.is_sampled:
            add_draw(drawn, weights[-1])
            target = drawn
        else:
            target = averaged.add_(drawn, alpha=weights[-1])
            add_draw(drawn, 0.0)
        for row, weight in zip(newer, weights, strict=False):
            target.add_(row.to(where, non_blocking=True), alpha=weight)
        averaged.add_(drawn)
        if is_on_host:
            oldest.copy_(drawn)

    def end(self, key: bytes) -> None:
        """End a step, whose key this was (``RuntimeError`` where a sum is missing)."""
        if self._at != len(self.kept):
            raise RuntimeError(self._changed)
        self.key = key
        self.done += 1
        self._is_open = self._is_loaded = False

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what is kept, on the host: it must not be published."""
        if self._is_open:  # noise was interrupted
            self.begin_anew()
        return {
            "kept": [kept.to("cpu", copy=True) for kept in self.kept],
            "coefficients": list(self.strategy.coefficients),
            "key": torch.tensor(list(self.key), dtype=torch.uint8),
            "done": self.done,
            "fold": self.fold,
        }

    def refuse_other(self, state: dict[str, Any]) -> None:
        """Refuse a state with other coefficients (``ValueError``)."""
        if state["coefficients"] != list(self.strategy.coefficients):
            raise ValueError(
                "the strategy of this state's noise has other coefficients, as another version of "
                "scipy may find; leave out exact=True, for fresh noise"
            )

    def load_state_dict(self, state: dict[str, Any], nonce: bytes) -> None:
        """Go on from a state, with keys of this nonce."""
        self.begin_anew()
        self.kept, self._is_loaded = list(state["kept"]), True
        self.key, self.done = bytes(state["key"].tolist()), state["done"]
        self._nonce, self.fold = nonce, state["fold"]

    _changed = (
        "other parameters are trained than in the steps before, or in another dtype or grouping, "
        "and correlated noise needs the same ones in all steps; make a new NoisyOptimizer"
    )

    def _kept_for(self, averaged: Tensor) -> Tensor:
        if self._at == len(self.kept) and not self.done:
            self.kept.append(self._make(averaged))
        if self._at == len(self.kept):
            raise RuntimeError(self._changed)
        kept = self.kept[self._at]
        if kept.shape[1:] != averaged.shape or kept.dtype != averaged.dtype:
            raise RuntimeError(self._changed)
        if self._is_loaded:
            kept = self.kept[self._at] = self._make(averaged).copy_(kept)
        self._at += 1
        return kept

    @allocates("noise")
    def _make(self, averaged: Tensor) -> Tensor:
        shape = (self.strategy.bands - 1, *averaged.shape)
        on_host = {"device": "cpu", "pin_memory": averaged.is_cuda}
        where = on_host if self._place == "cpu" else {"device": averaged.device}
        return torch.zeros(shape, dtype=averaged.dtype, **where)
