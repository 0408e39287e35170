"""Audits a private training as it runs: a lower bound on its epsilon.

Source: Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run".
Cost: the training, on m more samples; one loss of each canary in the data, twice.

Example:
    >>> import torch
    >>> from dpprof.private import audit, make_private
    >>> def losses_of(model, x):
    ...     return model(x).square().mean(1)
    >>> def train(model, data, losses_of):
    ...     sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     loader = torch.utils.data.DataLoader(data, batch_size=60, shuffle=True)
    ...     private = make_private(
    ...         model, sgd, loader, max_grad_norm=1.0, noise_multiplier=1.0, check=False
    ...     )
    ...     for batch in private.data_loader:
    ...         private.optimizer.backward(losses_of(model, *batch))
    ...         private.optimizer.step()
    ...         private.optimizer.zero_grad()
    ...     return private
    >>> data = [(x,) for x in torch.randn(20, 3)]
    >>> audited = audit(torch.nn.Linear(3, 1), losses_of, data, train, delta=1e-3, canaries=100)
    >>> audited.exceeds
    False

Shape legend: m canaries.
"""

import copy
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from dpprof.private.checks.canaries import (
    LossesOf,
    MarkedSamples,
    WithCanaries,
    adding_up_releases,
    with_coins,
    with_gradients,
)
from dpprof.private.checks.one_run import guess

Train = Callable[[nn.Module, Any, LossesOf], Any]  # trains, and returns what tells the epsilon
_FEWEST = 100  # canaries; fewer show nothing
_AT_A_TIME = 64  # canaries in the data whose losses are computed together


class Audited(NamedTuple):
    """What one training showed of its epsilon."""

    lower_bound: float
    """Epsilon is at least this, with ``confidence``."""

    epsilon: float
    """What the training's accountant says."""

    most: float
    """What these canaries would show of a training that hides nothing."""

    delta: float
    confidence: float
    canaries: int
    guesses: int
    right: int

    @property
    def exceeds(self) -> bool:
        """Whether the training is not as private as its accountant says."""
        return not self.lower_bound <= self.epsilon

    def __str__(self) -> str:
        bound = (
            f"epsilon is at least {self.lower_bound:.2f} at delta {self.delta:g}, with "
            f"{self.confidence:.0%} confidence: {self.right:,} of {self.guesses:,} guesses on "
            f"{self.canaries:,} canaries were right; a training that hides nothing would show "
            f"{self.most:.2f}"
        )
        if self.exceeds:
            return (
                f"NOT AS PRIVATE AS ITS ACCOUNTANT SAYS, which is epsilon {self.epsilon:.2f}: "
                f"{bound}"
            )
        return (
            f"{bound}. Its accountant says at most {self.epsilon:.2f}, which this does not "
            "contradict. It is no proof: what these canaries do not meet is not seen"
        )


def audit(
    model: nn.Module,
    losses_of: LossesOf,
    data: Any,
    train: Train,
    *,
    delta: float,
    canaries: int | Sequence[Any] = 1000,
    confidence: float = 0.95,
    collate: Callable[[list[Any]], Any] = default_collate,
    generator: torch.Generator | None = None,
) -> Audited:
    """Find a lower bound on the epsilon of a private training, from one run with canaries.

    Args:
        model: The model; a copy is trained.
        losses_of: Computes from ``(model, *batch)`` the loss of each sample, (B,), as ``check``
            takes it; of batches that are mappings from ``(model, batch)``.
        data: Samples by index: tuples, lists, mappings or single objects.
        train: Makes the model that it is given private, and trains it on the samples that it is
            given with the losses that it is given. These are ``model``, ``data`` and ``losses_of``
            with canaries: a sample has one entry more, ``canary`` in mappings. It returns what
            tells the epsilon: a ``PrivateTraining``, a ``PrivateTrainer``, Opacus's
            ``PrivacyEngine``, or a number.
        delta: Of the guarantee.
        canaries: How many canaries in gradients there are; or, in the data, the samples
            themselves. Each is in the training if a fair coin says so.
        confidence: The probability with which the bound holds, at least.
        collate: Makes a batch of canaries in the data, to compute their losses.
        generator: Tosses the coins; by default the operating system seeds one.

    Raises:
        ValueError: There are too few canaries, a number is out of its range, or no step of an
            optimizer released anything for canaries in gradients.
        TypeError: ``train`` returns nothing that tells the epsilon.

    Formal guarantee: if the training is (epsilon, delta)-private where a sample is added or
    removed, the bound exceeds epsilon with a probability of at most ``1 - confidence``. Canaries in
    gradients are scored by the sum of the gradients that the optimizer inside stepped on, as by one
    who sees each step; canaries in the data by how far their losses sank.
    """
    count = canaries if isinstance(canaries, int) else len(canaries)
    _verify(count, delta=delta, confidence=confidence)
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    coins_m = torch.rand(count, generator=generator) < 0.5  # noqa: PLR2004 (a fair coin)
    samples = MarkedSamples(data, data if isinstance(canaries, int) else canaries, coins_m)
    trained = copy.deepcopy(model)
    if isinstance(canaries, int):
        returned, scores_m = _watch_gradients(train, trained, samples, losses_of, count)
    else:
        before_m = _compute_losses(losses_of, trained, canaries, collate)
        returned = train(trained, samples, with_coins(losses_of))
        scores_m = before_m - _compute_losses(losses_of, trained, canaries, collate)
    coins, significance = coins_m.numpy(), 1 - confidence
    best = guess(scores_m.numpy(), coins, delta=delta, significance=significance)
    most = guess(coins.astype(float), coins, delta=delta, significance=significance).epsilon
    of_guesses = (delta, confidence, count, best.guesses, best.right)
    return Audited(best.epsilon, _read_epsilon(returned, delta), most, *of_guesses)


def _verify(count: int, **shares: float) -> None:
    """Refuse too few canaries, and shares that are none (``ValueError``)."""
    if count < _FEWEST:
        raise ValueError(f"there must be at least {_FEWEST} canaries, and there are {count}")
    for name, value in shares.items():
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie between 0 and 1, and is {value}")


def _watch_gradients(
    train: Train, model: nn.Module, samples: MarkedSamples, losses_of: LossesOf, count: int
) -> tuple[Any, Tensor]:
    """Train with canaries in gradients; return what was returned, and their scores, (m,)."""
    widened = WithCanaries(model, count)
    with adding_up_releases(widened.canaries) as scores_m:
        returned = train(widened, samples, with_gradients(losses_of, widened.canaries))
    if not scores_m.any():
        raise ValueError(
            "no step of a torch.optim.Optimizer released anything for the canaries; train must "
            "train all parameters of the model that it is given, on its samples and losses"
        )
    return returned, scores_m


@torch.no_grad()
def _compute_losses(
    losses_of: LossesOf, model: nn.Module, samples: Any, collate: Callable[[list[Any]], Any]
) -> Tensor:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    losses = []
    for start in range(0, len(samples), _AT_A_TIME):
        at = range(start, min(start + _AT_A_TIME, len(samples)))
        batch = collate([samples[place] for place in at])
        parts = batch if isinstance(batch, tuple | list) else (batch,)
        losses.append(losses_of(model, *parts).double().cpu())
    for module, mode in modes.items():
        module.training = mode
    return torch.cat(losses)


def _read_epsilon(returned: Any, delta: float) -> float:
    """Return the epsilon that a training's accountant says; ``TypeError`` if nothing tells it."""
    if isinstance(returned, Real) and not isinstance(returned, bool):
        return float(returned)
    for owner in (returned, getattr(returned, "spent", None)):
        for name in ("epsilon_spent", "get_epsilon", "epsilon"):
            if callable(tell := getattr(owner, name, None)):
                return float(tell(delta))
    raise TypeError(
        f"train returned a {type(returned).__name__}; it must return what tells the epsilon: a "
        "PrivateTraining, a PrivateTrainer, Opacus's PrivacyEngine, or a number"
    )
