"""Noise, averaging and accounting for gradients that are already clipped."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpprof.clipping.engine import Clipping
from dpprof.clipping.optimizer_wrapper import OptimizerWrapper
from dpprof.clipping.ranks import Ranks, distinct_part
from dpprof.clipping.sums import bound_of
from dpprof.records.births import allocates

_HOOK = "_clipping_noise_hook"


class NoisyOptimizer(OptimizerWrapper):
    """Adds noise to the sums that a ``Clipping`` left in ``.grad``, then steps.

    It does what Opacus's optimizer does: noise of standard deviation
    ``noise_multiplier * max_grad_norm`` from its generator, division by ``expected_batch_size``,
    step hooks for accountants, and skipped steps for a batch in parts (``BatchMemoryManager``).
    Only memory differs: noise and division turn each sum into the gradient in place. Opacus keeps
    a copy each for ``.grad``, ``.summed_grad`` and their sum. Opacus itself is not imported.

    Args:
        optimizer: Any PyTorch optimizer; from now on it refuses to step without this noise.
        clipping: The clipping of the gradients; its bound also scales the noise.
        noise_multiplier: Standard deviation of the noise over the bound; finite, 0 for none.
        expected_batch_size: The mean batch size of Poisson sampling, over all ranks.
        loss_reduction: ``mean`` divides by ``expected_batch_size``, ``sum`` does not.
        generator: Source of the noise, used as it is given: seeded as in an earlier run, it repeats
            that run's noise. By default each device has one of its own, which the operating system
            seeds. Of several ranks only rank 0's counts: each rank draws from a generator of its
            own, whose seed derives from the next number of this one.
        secure_mode: Draw noise that withstands floating point attacks, see ``draw_secure_noise``;
            the generator must be secure too. Refused with several ranks.

    Raises:
        ValueError: A setting is out of its range.

    Formal guarantees: a step applies the clipped sums of one batch with noise in every element
    of every parameter that it changes. Otherwise it raises ``RuntimeError`` and leaves the model
    unchanged: if a parameter is not clipped, is frozen but has a gradient, or has a gradient that
    changed after it was clipped; if not exactly one batch was clipped since the last step, because
    the accountant counts one; if the bound changed in between; if ranks have other settings.
    With several ranks the batch is that of all ranks, and each element gets noise once.

    Noise does not follow ``torch.manual_seed``: a run that is started again with its seed would put
    the same noise on other batches, and the difference of two released models would have no noise.

    Cost: noise for one parameter at a time, and one pass over memory each to draw and to add it.

    Example:
        >>> import torch
        >>> from dpprof.clipping import BookKeeping, NoisyOptimizer
        >>> model = torch.nn.Linear(3, 1)
        >>> clipping = BookKeeping(model, max_grad_norm=1.0)
        >>> optimizer = NoisyOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     clipping,
        ...     noise_multiplier=1.0,
        ...     expected_batch_size=2,
        ... )
        >>> clipping.backward(model(torch.ones(2, 3)).squeeze(1))
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        clipping: Clipping,
        *,
        noise_multiplier: float,
        expected_batch_size: int | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
    ) -> None:
        if not isinstance(clipping, Clipping):
            raise TypeError(f"clipping must be a Clipping, and is a {type(clipping).__name__}")
        size = expected_batch_size
        if size is not None and not (math.isfinite(size) and size > 0):
            raise ValueError(f"expected_batch_size must be positive and finite, and is {size}")
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', and is {loss_reduction!r}")
        if loss_reduction == "mean" and size is None:
            raise ValueError("expected_batch_size must be given where loss_reduction is 'mean'")
        if secure_mode and clipping.ranks.size > 1:
            raise ValueError("secure_mode does not work with several ranks: seeds derive from one")
        super().__init__(optimizer)
        self.clipping = clipping
        clipping.continues = self._will_skip
        clipping.drop_waiting()
        self.noise_multiplier = noise_multiplier
        self.expected_batch_size = expected_batch_size
        self.loss_reduction = loss_reduction
        self.generator = clipping.ranks.make_generator(generator)
        self._own_generators: dict[torch.device, torch.Generator] = {}
        self.secure_mode = secure_mode
        self._batches_before = clipping.batches
        self._bound: float | None = None
        self._is_noised = False
        if hasattr(optimizer, _HOOK):  # of an earlier NoisyOptimizer around it
            getattr(optimizer, _HOOK).remove()
        setattr(optimizer, _HOOK, optimizer.register_step_pre_hook(self._require_noise))

    @property
    def max_grad_norm(self) -> float:
        """The bound of the clipping; setting it changes the clipping too."""
        return self.clipping.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, bound: float) -> None:
        self.clipping.max_grad_norm = bound

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over the bound."""
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, multiplier: float) -> None:
        if not (math.isfinite(multiplier) and multiplier >= 0):
            raise ValueError(f"noise_multiplier must be finite and at least 0, and is {multiplier}")
        self._noise_multiplier = float(multiplier)

    @property
    def generators(self) -> list[torch.Generator]:
        """The sources of the noise: the given one, or one for each device of the parameters."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return list(dict.fromkeys(self._generator_on(p.device) for p in parameters))

    def _generator_on(self, device: torch.device) -> torch.Generator:
        if self.generator is not None:
            return self.generator
        if device not in self._own_generators:
            self._own_generators[device] = own = torch.Generator(device)
            own.seed()
        return self._own_generators[device]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse ``GradScaler.step``, which reads this first."""
        raise RuntimeError(
            "GradScaler does not work with clipping: it scales losses, and every norm with them; "
            "use bfloat16, which needs no scaling"
        )

    def accumulate(self) -> None:
        """Move clipped sums from ``.grad`` to ``.summed_grad``, which also sums skipped steps."""
        self._require_one_clipped_batch()
        if not self._will_skip():
            self.clipping.reduce_waiting()
        for parameter in self.params:
            if parameter.grad is None:
                if parameter.summed_grad is None:  # a batch without samples
                    parameter.summed_grad = torch.zeros_like(parameter)
            elif parameter.summed_grad is None:
                parameter.summed_grad = parameter.grad
            else:
                parameter.summed_grad += parameter.grad
            parameter.grad = None
        self._batches_before = self.clipping.batches
        self._bound = self.max_grad_norm

    def add_noise(self) -> None:
        """Add noise to the sums, divide by the expected batch size, and move them to ``.grad``."""
        ranks = self.clipping.ranks
        if ranks.size > 1:
            self._agree(ranks)
        for parameter in self.params:
            summed, parameter.summed_grad = parameter.summed_grad, None
            parameter.grad = ranks.release_sum(summed, self._add_noise_to)
        self._bound = None
        self._is_noised = True

    @torch.no_grad()
    def _add_noise_to(self, summed: Tensor, *others: Tensor) -> None:
        """Add noise to a sum and average it; average others, which get noise elsewhere."""
        std = self.noise_multiplier * self.max_grad_norm
        size = self.expected_batch_size if self.loss_reduction == "mean" else 1
        assert size is not None
        for other in others:
            other.div_(size)
        if std == 0:
            summed /= size
        elif self.secure_mode:
            summed += draw_secure_noise(std, summed, self._generator_on(summed.device))
            summed /= size
        else:
            noise = draw_noise(std / size, summed, self._generator_on(summed.device))
            torch.add(noise, summed, alpha=1 / size, out=summed)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free gradients as PyTorch does; sums survive only a skipped step."""
        super().zero_grad(set_to_none)
        self._batches_before = self.clipping.batches
        if not self._is_last_step_skipped:
            self._bound = None
            self.clipping.drop_waiting()

    def _will_skip(self) -> bool:
        return bool(self._step_skip_queue) and self._step_skip_queue[0]

    def _agree(self, ranks: Ranks) -> None:
        """Compare with other ranks what the noise depends on."""
        assert self.generator is not None
        settings: dict[str, float | str] = {
            "max_grad_norm": self.max_grad_norm,
            "noise_multiplier": self.noise_multiplier,
            "expected_batch_size": self.expected_batch_size or 0,
            "loss_reduction": self.loss_reduction,
            "the trained parameters": "\n".join(
                f"{self.clipping.name_of(p)} {tuple(p.shape)} {p.dtype}" for p in self.params
            ),
        }
        ranks.agree(settings, distinct_part(self.generator))

    def _require_one_clipped_batch(self) -> None:
        batches = self.clipping.batches - self._batches_before
        if batches == 0:
            raise RuntimeError(
                "no batch was clipped since the last step: call backward(losses) of the Clipping "
                "before each step, with torch.zeros(0) for a batch without samples"
            )
        if batches > 1:
            raise RuntimeError(
                f"{batches} batches were added up before a step, and the accountant would count "
                "one; to split one batch, step after each part, with signal_skip_step() before all "
                "but the last, as Opacus's BatchMemoryManager does"
            )
        if self._bound not in (None, self.max_grad_norm):
            raise RuntimeError(
                f"max_grad_norm changed from {self._bound} to {self.max_grad_norm} between the "
                "parts of a batch"
            )
        for group in self.param_groups:
            for parameter in group["params"]:
                self._require_clipped(parameter)

    def _require_clipped(self, parameter: torch.nn.Parameter) -> None:
        name = self.clipping.name_of(parameter)
        if not parameter.requires_grad:
            if parameter.grad is not None or getattr(parameter, "summed_grad", None) is not None:
                raise RuntimeError(
                    f"{name} is frozen and has a gradient, which would be applied without noise; "
                    "set its .grad and .summed_grad to None"
                )
            return
        if not self.clipping.clips(parameter):
            raise RuntimeError(
                f"this optimizer trains {name}, which its Clipping does not clip; remove it from "
                "the optimizer, or make a Clipping of a model that contains it"
            )
        if parameter.grad is not None and bound_of(parameter.grad) != self.max_grad_norm:
            raise RuntimeError(
                f"the gradient of {name}, or the bound, changed after it was clipped; change "
                "neither between backward and step"
            )

    def _require_noise(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse a direct step of the wrapped optimizer."""
        if not self._is_noised:
            raise RuntimeError(
                f"{type(optimizer).__name__} was asked to step on gradients without noise; call "
                "step() of the NoisyOptimizer around it"
            )
        self._is_noised = False


@allocates("noise")
def draw_noise(std: float, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw Gaussian noise of a tensor's shape and device, in float32 at least.

    In 16 bits, noise much smaller than the sum could be rounded away before it is added.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.normal(0.0, std, like.shape, generator=generator, dtype=dtype, device=like.device)


@allocates("noise")
def draw_secure_noise(std: float, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw Gaussian noise whose floating point numbers do not tell what it was added to.

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
