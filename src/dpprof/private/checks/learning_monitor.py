"""Says while a private training runs whether it learns, by what it releases anyway."""

import logging
import math
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from dpprof.private.checks.learning import find_by_settings
from dpprof.private.checks.settings import Mechanism, PrivateOptimizer, Settings

_log = logging.getLogger("dpprof")

_CERTAIN = 3.0
"""Standard deviations by which a sum of gradients must be longer than noise alone."""

_PROBED = 4_096
"""The numbers of a parameter whose changes are looked at."""


class LearningMonitor:
    """Watches the noisy gradients that an optimizer steps on, and the weights; a context manager.

    After every so many steps it compares the sum of the gradients with what noise alone gives, and
    says by the logger ``dpprof``, once each, what keeps the training from learning: gradients that
    are noise alone, a learning rate of 0, weights that never change, a frozen matrix of zeros.

    Args:
        model: The model, with the parameters that are trained.
        private: dpprof's optimizer, Opacus's, or a ``Mechanism`` that describes a loop by hand.
        every: How many steps are judged together.

    Raises:
        ValueError: ``every`` is below 2, or parameters are sharded.

    Formal guarantee: it reads gradients with their noise, weights and settings, which a step
    releases, so what it says costs no privacy (post-processing). It keeps as much memory as the
    gradients.

    Limits: a training that has learned what there is to learn has gradients of noise alone too.
    Noise that is correlated over steps is not judged.

    Example:
        >>> import torch
        >>> from dpprof.private import BookKeeping, LearningMonitor, NoisyOptimizer
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = NoisyOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.0),
        ...     BookKeeping(model, max_grad_norm=1.0),
        ...     noise_multiplier=1.0,
        ...     expected_batch_size=4,
        ... )
        >>> with LearningMonitor(model, optimizer, every=2) as monitor:
        ...     for _ in range(2):
        ...         optimizer.clipping.backward(model(torch.ones(4, 3)).square().mean(1))
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> monitor.obstacles[-1]
        'the learning rate of weight and 1 more is 0'
    """

    def __init__(
        self, model: nn.Module, private: PrivateOptimizer | Mechanism, *, every: int = 50
    ) -> None:
        if every < 2:  # noqa: PLR2004 (one step shows nothing)
            raise ValueError(f"every must be at least 2 steps, and is {every}")
        trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._names, self._every = trained, every
        self._settings = Settings(private, [*trained], [])
        if self._settings.clipping is not None and self._settings.clipping.ranks.is_sharded:
            raise ValueError("LearningMonitor needs whole parameters, and these are sharded")
        self.obstacles: list[str] = []
        """What kept the training from learning at any time, a sentence each."""

        self.signal: float | None = None
        """The mean gradient of the last steps over the noise of a step, by norms; None: unknown."""

        for sentence in find_by_settings(model):
            self._say(sentence)

    def __enter__(self) -> Self:
        self._begin()
        optimizer = self._settings.optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._add),
            optimizer.register_step_post_hook(self._judge),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self) -> None:
        self._steps, self._variance = 0, 0.0
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._rates = dict.fromkeys(self._names, 0.0)
        self._before = {p: self._probe(p) for p in self._names}

    def _probe(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach().flatten()[:_PROBED].clone()

    @torch.no_grad()
    def _add(self, *_: Any) -> None:
        """Add the gradients of a step, with its noise, and remember its learning rates."""
        self._steps += 1
        self._variance += self._settings.noise**2
        for group in self._settings.optimizer.param_groups:
            for parameter in group["params"]:
                rate = max(float(group["lr"]), self._rates.get(parameter, 0.0))
                self._rates[parameter] = rate
        for parameter in self._names:
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                total = self._sums.setdefault(parameter, torch.zeros_like(gradient))
                total += gradient

    def _judge(self, *_: Any) -> None:
        if self._steps < self._every:
            return
        resting = [p for p in self._names if not self._rates[p]]
        still = [p for p in self._names if torch.equal(self._probe(p), self._before[p])]
        if resting:
            self._say(f"the learning rate of {self._list(resting)} is 0")
        elif still:
            self._say(
                f"{self._list(still)} did not change in {self._every} steps: changes are lost in "
                "rounding, or the optimizer makes none"
            )
        self._judge_signal()
        self._begin()

    def _judge_signal(self) -> None:
        if not self._variance or self._settings.is_correlated:
            return
        numbers = sum(total.numel() for total in self._sums.values())
        square = sum(float(total.double().square().sum()) for total in self._sums.values())
        beyond = square - numbers * self._variance
        noise = math.sqrt(numbers * self._variance / self._steps)
        self.signal = math.sqrt(max(0.0, beyond)) / self._steps / noise
        if beyond < _CERTAIN * self._variance * math.sqrt(2 * numbers):
            self._say(
                f"the gradients of {self._every} steps together are noise alone: the training has "
                "learned all that it can, or its signal is far below the noise; train fewer "
                "parameters, or draw larger batches"
            )

    def _list(self, parameters: list[nn.Parameter]) -> str:
        more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        return self._names[parameters[0]] + more

    def _say(self, sentence: str) -> None:
        if sentence not in self.obstacles:
            self.obstacles.append(sentence)
            _log.warning("%s", sentence)
