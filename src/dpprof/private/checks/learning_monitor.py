"""Says while a private training runs whether it learns, by what it releases anyway."""

import logging
import math
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from dpprof.private.checks.learning import STEPS, find_by_settings
from dpprof.private.checks.settings import Mechanism, PrivateOptimizer, Settings

_log = logging.getLogger("dpprof")

_CERTAIN = 3.0  # standard deviations by which the signal may be longer than it looks
_PROBED = 4_096  # the numbers of a parameter whose changes are looked at


class LearningMonitor:
    """Watches the noisy gradients that an optimizer steps on, and the weights; a context manager.

    It says by the logger ``dpprof``, once each, what keeps the training from learning: a signal far
    below the noise, a learning rate of 0, weights that do not change, a frozen matrix of zeros.
    Gradients are longer than their noise by the signal: so the mean of their squared norms bounds
    it, without knowing any sample. It is far below the noise if signals of all steps, which add up
    as their number, cannot come to the noise's norm, which adds up as the root.

    Args:
        model: The model, with the parameters that are trained.
        private: dpprof's optimizer, Opacus's, or a ``Mechanism`` that describes a loop by hand.
        every: After how many steps it looks again.
        steps: How many the training has; None: those that ``make_private`` planned, else 1,000.

    Raises:
        ValueError: ``every`` or ``steps`` is below 1, or parameters are sharded.

    Formal guarantee: it reads gradients with their noise, weights and settings, which a step
    releases, so what it says costs no privacy (post-processing).

    Limits: a short signal takes long to be told from none: it is called far below the noise of
    1,000 steps once steps times trained numbers are 20 million. Noise that is correlated over steps
    is not judged.

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
        self,
        model: nn.Module,
        private: PrivateOptimizer | Mechanism,
        *,
        every: int = 50,
        steps: int | None = None,
    ) -> None:
        for name, number in (("every", every), ("steps", steps)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1 step, and is {number}")
        trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._names, self._every = trained, every
        self._planned = steps or getattr(private, "planned_steps", None) or STEPS
        self._settings = Settings(private, [*trained], [])
        if self._settings.clipping is not None and self._settings.clipping.ranks.is_sharded:
            raise ValueError("LearningMonitor needs whole parameters, and these are sharded")
        self.obstacles: list[str] = []
        """What kept the training from learning at any time, a sentence each."""

        self.signal: float | None = None
        """The norm of a step's gradient over that of its noise, as estimated; None: unknown."""

        for sentence in find_by_settings(model):
            self._say(sentence)

    def __enter__(self) -> Self:
        self._steps, self._beyond, self._numbers = 0, 0.0, 0
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
        self._rates = dict.fromkeys(self._names, 0.0)
        self._before = {p: self._probe(p) for p in self._names}

    def _probe(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach().flatten()[:_PROBED].clone()

    def _add(self, *_: Any) -> None:
        """Look at the gradients of a step, with their noise, and at its learning rates."""
        for group in self._settings.optimizer.param_groups:
            for parameter in group["params"]:
                rate = max(float(group["lr"]), self._rates.get(parameter, 0.0))
                self._rates[parameter] = rate
        self._steps += 1
        if self._settings.noise and not self._settings.is_correlated:
            own = [p.grad.double() for p in self._names if p.grad is not None]
            numbers = sum(gradient.numel() for gradient in own)
            square = sum(float(gradient.square().sum()) for gradient in own)
            self._beyond += square / (numbers * self._settings.noise**2) - 1
            self._numbers += numbers

    def _judge(self, *_: Any) -> None:
        if self._steps % self._every:
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
        if self._numbers:
            self._judge_signal()
        self._begin()

    def _judge_signal(self) -> None:
        square = max(0.0, self._beyond / self._steps)
        self.signal = math.sqrt(square)
        most = square + _CERTAIN * math.sqrt(2 / self._numbers)
        if most * self._planned < 1:
            self._say(
                f"the signal is far below the noise: at most {math.sqrt(most):.2g} of its norm, so "
                f"signals add up to as much after {1 / most:,.0f} steps at the earliest; train "
                "fewer parameters, or draw larger batches"
            )

    def _list(self, parameters: list[nn.Parameter]) -> str:
        more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        return self._names[parameters[0]] + more

    def _say(self, sentence: str) -> None:
        kinds = {said.partition(":")[0] for said in self.obstacles}
        if sentence.partition(":")[0] not in kinds:  # its numbers change with every look
            self.obstacles.append(sentence)
            _log.warning("%s", sentence)
