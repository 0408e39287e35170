"""Noise, averaging and accounting for gradients that are already clipped.

The optimizer has the interface of Opacus's optimizers: Opacus's accountants, noise schedulers and
``BatchMemoryManager`` work with it, and PyTorch's learning rate schedulers. It needs no Opacus,
which takes as long to import as PyTorch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpprof.private.contributions.sums import own_part, refuse_gradients
from dpprof.private.engine.engine import Clipping
from dpprof.private.errors import refuse_no_number
from dpprof.private.noise.buffers import NoiseBuffers
from dpprof.private.noise.inner_optimizers import refuse_optimizer
from dpprof.private.noise.noise import NoiseOfStep, draw_secure_noise, refuse_insecure
from dpprof.private.noise.noise_keys import NoiseKeys
from dpprof.private.noise.quantile import QuantileBound
from dpprof.private.noise.schedules import NOISY, keep_to_batches
from dpprof.private.noise.strategies import Strategy
from dpprof.private.ranks.ranks import Settings

HOOK = "_clipping_noise_hook"  # on an optimizer: what refuses steps without noise
LEAST_STD = 2.0**-133  # of the noise of an average: 2^16 times the least number of float32

_INNER = "original_optimizer"

_INTO_INNER = "go on with the same settings, or load the state into optimizer.original_optimizer"


def _attribute_of(owner: str, name: str, doc: str) -> property:
    """Return a property that is an attribute of another object, which ``owner`` names."""

    def read(wrapper: "NoisyOptimizer") -> Any:
        return getattr(getattr(wrapper, owner), name)

    def write(wrapper: "NoisyOptimizer", value: Any) -> None:
        setattr(getattr(wrapper, owner), name, value)

    return property(read, write, doc=doc)


class NoisyOptimizer(Optimizer):
    """Adds noise to the sums of a ``Clipping``, puts them into ``.grad``, then steps.

    It does what Opacus's optimizer does: noise of standard deviation
    ``noise_multiplier * max_grad_norm``, division by ``expected_batch_size``, step hooks for
    accountants, and skipped steps for a batch in parts (``BatchMemoryManager``). Until a sum has
    its noise, the clipping alone has it, and ``.grad`` is None. Noise and division turn each sum
    into the gradient in place.

    Args:
        optimizer: Any PyTorch optimizer; from now on it steps as a part of this one's ``step``
            alone.
        clipping: The clipping of the gradients; its bound also scales the noise.
        noise_multiplier: Standard deviation of the noise over the bound; finite, 0 for none.
        expected_batch_size: The mean batch size of Poisson sampling, over all ranks.
        loss_reduction: ``mean`` divides by ``expected_batch_size``, ``sum`` does not.
        generator: Draws the noise in place of what is said below, as Opacus's does: seeded as in an
            earlier run, it repeats that run's noise, on any sums. A state that is loaded without
            ``exact`` ends that. Of several ranks each draws a secret from its own, which may be
            seeded alike.
        secure_mode: Draw noise that withstands floating point attacks (``draw_secure_noise``), from
            the generator, which must be cryptographically secure, or from the operating system.
        strategy: Correlates the noise of steps (``make_strategy``); None for independent noise. In
            any ``strategy.folds`` consecutive steps a sample must take part at most once. With
            ``banded`` each step in which it does is a mechanism of ``noise_multiplier``; with
            ``bisr`` the whole training is one.
        noise_buffers: Where past noise is kept: ``device``, or ``cpu`` for the host's memory.

    Raises:
        ValueError: A setting is out of its range.

    Formal guarantees: a step applies the clipped sums of one batch with noise in every element
    of every parameter that it changes. Otherwise it raises ``RuntimeError`` and leaves the model
    unchanged: if a parameter is not clipped, or has a gradient that is not the clipping's; if not
    exactly one batch was clipped since the last step, because the accountant counts one; if the
    bound changed in between; if ranks have other settings. With several ranks the batch is that of
    all ranks, and each element gets noise once. Under ``fully_shard`` ranks compare their settings
    in ``backward``, so these must stay until the step.

    No two sums get the same noise (``noise_keys``): it follows from a secret of 256 bits, a nonce,
    the number of the step and the sums themselves, and not from ``torch.manual_seed``. A run that
    loads ``state_dict`` draws a new nonce, and so does a forked process: what is computed again
    gets fresh noise, and what was released of it before counts for the accountant too. With
    ``exact=True`` the nonce is restored: equal sums get equal noise, so a run that is resumed ends
    with the same bits; where anything else came out otherwise, the noise is another. Whoever sees
    what both runs released learns *whether* their sums differed, so release two exact runs only of
    the same data.

    Cost: one pass over the sums to hash them; noise for one parameter at a time, and one pass over
    memory each to draw and to add it. On a GPU with Triton one pass each, and no memory for noise.

    Example:
        >>> import torch
        >>> from dpprof.private import BookKeeping, NoisyOptimizer
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

    quantile: QuantileBound | None = None  # moves the bound; None for a bound that stays
    step_hook: Callable[[Any], None] | None = None
    _is_last_step_skipped = False
    _is_last_part = True
    _clips_failed_parts_again = False  # whether a part whose ``backward`` failed comes next
    _fold: int | None = None  # of the batch at hand; None where a loop draws by itself

    def __init__(
        self,
        optimizer: Optimizer,
        clipping: Clipping,
        *,
        noise_multiplier: float,
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        strategy: Strategy | None = None,
        noise_buffers: str = "device",
    ) -> None:
        refuse_optimizer(optimizer)
        if not isinstance(clipping, Clipping):
            raise TypeError(f"clipping must be a Clipping, and is a {type(clipping).__name__}")
        self.expected_batch_size = expected_batch_size
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', and is {loss_reduction!r}")
        if loss_reduction == "mean" and expected_batch_size is None:
            raise ValueError("expected_batch_size must be given where loss_reduction is 'mean'")
        # Optimizer's own __init__ is not called: groups, state and defaults are the original's.
        self.original_optimizer = optimizer
        self._step_skip_queue: list[bool] = []
        self.clipping = clipping
        clipping.sums.forget()
        clipping.sums.owner = self
        clipping.continues = self._will_skip
        clipping.shard_sums.forget()
        self.noise_multiplier = noise_multiplier
        self.loss_reduction = loss_reduction
        self._generator = generator
        self.buffers = None if strategy is None else NoiseBuffers(strategy, noise_buffers)
        """Past noise, where that of steps is correlated."""

        self.secure_mode = secure_mode
        ranks = clipping.ranks
        is_given = generator is not None and ranks.size == 1
        kind = {"generator": generator} if is_given else {"source": generator}
        self.keys = NoiseKeys(**kind, rank=ranks.rank)
        """What noise follows from, but for that of ``secure_mode``."""

        self.steps = 0
        """How many batches got noise; counted where it is drawn."""

        self._made_with = self.settings | {"stability": clipping.named_stability}
        self._drawn_by = {
            "rank": ranks.rank,
            "number of ranks": ranks.size,
            "sums reduced together": ranks.grouping,
        }
        self._made_with["noise"] = "independent" if strategy is None else strategy.describe()
        self._batches_before = clipping.batches
        self._failures_before = clipping.failures
        self._is_noised = False
        if hasattr(optimizer, HOOK):  # of an earlier NoisyOptimizer around it
            getattr(optimizer, HOOK).remove()
        setattr(optimizer, HOOK, optimizer.register_step_pre_hook(self._require_noise))
        setattr(optimizer, NOISY, self)
        keep_to_batches()

    param_groups: Any = _attribute_of(_INNER, "param_groups", "The original optimizer's groups.")
    state: Any = _attribute_of(_INNER, "state", "The original optimizer's state.")
    defaults: Any = _attribute_of(_INNER, "defaults", "The original optimizer's defaults.")
    _optimizer_step_pre_hooks: Any = _attribute_of(
        _INNER, "_optimizer_step_pre_hooks", "Hooks before its step, which see noise alone."
    )
    _optimizer_step_post_hooks: Any = _attribute_of(
        _INNER, "_optimizer_step_post_hooks", "Hooks after its step."
    )
    max_grad_norm: Any = _attribute_of(
        "clipping", "max_grad_norm", "The bound of the clipping; setting it changes that too."
    )

    def __getattr__(self, name: str) -> Any:
        """Return ``train`` or ``eval`` of an optimizer without a schedule, if that is one."""
        if name in ("train", "eval"):
            return getattr(self.original_optimizer, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over the bound."""
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, multiplier: float) -> None:
        refuse_no_number("noise_multiplier", multiplier)
        if not (math.isfinite(multiplier) and multiplier >= 0):
            raise ValueError(f"noise_multiplier must be finite and at least 0, and is {multiplier}")
        self._noise_multiplier = float(multiplier)

    @property
    def expected_batch_size(self) -> float | None:
        """What a sum is divided by where ``loss_reduction`` is ``mean``."""
        return self._expected_batch_size

    @expected_batch_size.setter
    def expected_batch_size(self, size: float | None) -> None:
        if size is not None and not (math.isfinite(size) and size > 0):
            raise ValueError(f"expected_batch_size must be positive and finite, and is {size}")
        self._expected_batch_size = size

    @property
    def secure_mode(self) -> bool:
        """Whether noise withstands floating point attacks."""
        return self._secure_mode

    @secure_mode.setter
    def secure_mode(self, is_secure: bool) -> None:
        if is_secure:
            refuse_insecure(self.generator)
            if self.buffers is not None:
                raise ValueError(
                    "secure_mode protects the floating point numbers of one sum under one draw, "
                    "and correlated noise is several; leave out one of them"
                )
        self._secure_mode = is_secure

    @property
    def generator(self) -> torch.Generator | None:
        """What was given to draw noise from; None: a secret. It cannot be set later."""
        return self._generator

    @property
    def settings(self) -> dict[str, Any]:
        """What scales and averages noise, at present."""
        size = self.expected_batch_size
        return {
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "expected_batch_size": None if size is None else float(size),
            "loss_reduction": self.loss_reduction,
            "secure_mode": self.secure_mode,
        }

    @property
    def counted_noise_multiplier(self) -> float:
        """What accountants count: less than the noise of the sum where norms are counted too."""
        noise = self.noise_multiplier
        return noise if self.quantile is None else self.quantile.join(noise)

    @property
    def strategy(self) -> Strategy | None:
        """How the noise of steps is correlated; None for independent noise."""
        return None if self.buffers is None else self.buffers.strategy

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse ``GradScaler.step``, which reads this first."""
        raise RuntimeError(
            "GradScaler does not work with clipping: it scales every norm, and skips a step where "
            "one sample overflows, which shows that sample; give the Clipping a fixed loss_scale, "
            "such as 65536, or use bfloat16, which needs none"
        )

    @property
    def params(self) -> list[Any]:
        """The parameters that are trained."""
        return [p for p in self.every_parameter if p.requires_grad]

    @property
    def every_parameter(self) -> list[Any]:
        """The parameters of the original optimizer, with those that are frozen."""
        return [p for group in self.param_groups for p in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the original optimizer; a step needs its parameters clipped."""
        self.original_optimizer.add_param_group(param_group)

    @property
    def accumulated_iterations(self) -> int:
        """How many batches a step counts as, for accountants."""
        return 1

    def attach_step_hook(self, fn: Callable[[Any], None]) -> None:
        """Call a function with this optimizer before each step, as accountants ask for.

        Raises:
            ValueError: Accountants that count steps do not know the strategy of the noise, or how
                samples are drawn.
        """
        if self.quantile is not None:
            raise ValueError(
                "accountants read noise_multiplier, and with bound_quantile a step counts as "
                "counted_noise_multiplier; the privacy account of make_private knows it"
            )
        if self.strategy is not None and not self.strategy.is_sampled:
            raise ValueError(
                "bisr is one mechanism for all steps, which sampling does not amplify, and an "
                "accountant would count each step; account for one Gaussian mechanism of this "
                "noise_multiplier for each time that the noise begins anew"
            )
        if self.strategy is not None:
            raise ValueError(
                "with banded noise a sample is drawn from one of several folds, and an accountant "
                "would count every step at the rate of all samples; add the steps of one fold at "
                "its rate to the accountant's history, or use make_private"
            )
        self.step_hook = fn

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Queue whether a coming step only accumulates: all but the last of a batch in parts."""
        if not self._step_skip_queue:  # else a part is drawn ahead, and another is at hand
            self._is_last_part = not do_skip
        self._step_skip_queue.append(do_skip)
        if do_skip:
            keep_to_batches()

    @property
    def is_last_part(self) -> bool:
        """Whether the part at hand is the last one of its batch; True for a batch in one part.

        What a loop does once for each batch, it does where this is True. Schedulers ask by
        themselves. ``steps`` counts batches.
        """
        is_clipped = self.clipping.batches != self._batches_before
        return not self._will_skip() if is_clipped else self._is_last_part

    @property
    def _opt_called(self) -> bool:
        """Whether a batch was stepped on, of which schedulers remind; they set it for each part."""
        return self.steps > 0

    @_opt_called.setter
    def _opt_called(self, _: bool) -> None:
        """Do nothing: a part is no step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the gradient private and step, unless this step is to be skipped."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.accumulate()
        return None if self.begin_step() else self.step_on_batch()

    def begin_step(self) -> bool:
        """Tell whether other parts of the batch follow, so that this step is skipped."""
        self._is_last_step_skipped = bool(self._step_skip_queue) and self._step_skip_queue.pop(0)
        self._is_last_part = not self._is_last_step_skipped
        return self._is_last_step_skipped

    def step_on_batch(self) -> Any:
        """Add noise to the sums of a batch, whose parts were added up, and step."""
        self.add_noise()
        if self.step_hook is not None:
            self.step_hook(self)
        return self.original_optimizer.step()

    def accumulate(self) -> None:
        """Add the sums of a part to those of the parts before."""
        self._refuse_failed_part()
        self.close_part()

    def close_part(self) -> None:
        """Add the sums of the last ``backward`` to those of the parts before."""
        self._require_one_clipped_batch()
        if not self._will_skip():
            self.clipping.shard_sums.reduce_waiting(self.max_grad_norm)
        if self.quantile is not None:
            self.quantile.close_part(is_first=not self.clipping.sums.total)
        self.clipping.sums.close_part(self.params)
        self._batches_before = self.clipping.batches

    def add_noise(self) -> None:
        """Add noise to the sums, divide by the expected batch size, and move them to ``.grad``.

        Raises:
            RuntimeError: The bound is another than when the sums were clipped; or ranks disagree.
                The batch is discarded then, so that no step applies it together with another.
        """
        try:
            self.begin_noise()
            self.release()
        except BaseException:
            self.discard()
            raise

    def begin_noise(self) -> None:
        """Verify what a step rests on, count it, and prepare its noise."""
        sums = self.clipping.sums
        sums.refuse_other_bound(self.max_grad_norm)
        if 0 < self._std < LEAST_STD:
            raise RuntimeError(
                f"noise of standard deviation {self._std:g} would be rounded away in float32; "
                f"noise_multiplier * max_grad_norm / expected_batch_size is at least {LEAST_STD:g}"
            )
        if self.strategy is not None:
            self._refuse_beyond(self.strategy)
        ranks = self.clipping.ranks
        if ranks.size > 1:  # which no rank passes that refused the batch, so none steps without it
            ranks.agree(self._settings_of_ranks())
        self.steps += 1
        own = [own_part(total) for total in sums.total.values()]
        self.keys.begin(self.steps, own, self._std, self._divisor)
        if self.buffers is not None:
            self.buffers.begin(self.keys.nonce, self._fold)

    def _refuse_beyond(self, strategy: Strategy) -> None:
        """Refuse a step whose noise a strategy does not cover (``RuntimeError``)."""
        if self.steps >= strategy.steps:
            raise RuntimeError(
                f"the noise was correlated for {strategy.steps:,} steps, and these are done; make "
                "a strategy of more steps"
            )
        for name, value in self.settings.items():
            if value != self._made_with[name]:
                raise RuntimeError(
                    f"{name} is {value}, and was {self._made_with[name]} when the strategy of the "
                    "noise began: what a step takes back must be what another one added, so it "
                    "stays the same; make a new NoisyOptimizer"
                )

    def release(self) -> None:
        """Add noise to the sums, and move them to ``.grad``; a graph may hold this."""
        ranks, sums = self.clipping.ranks, self.clipping.sums.take()
        if self.secure_mode:
            add = self._add_secure_noise_to
        else:
            own = [own_part(total) for total in sums.values()] if self._std > 0 else []
            buffers = self.buffers if own else None
            after = None if buffers is None else buffers.key
            key = self.keys.bind(own, ranks.share if ranks.adds_up_in_step else None, after)
            add = NoiseOfStep(self._std, self._divisor, key, buffers).add_to
            del own
        # Whoever gives a generator expects its numbers in the order of parameters.
        joins = not self.secure_mode and self.generator is None
        for parameter, averaged in ranks.release_sums(sums, add, joins=joins):
            parameter.grad = averaged.to(parameter.dtype)
            del averaged  # before the next one gets noise
        if self.buffers is not None:
            self.buffers.end(key.key)
        if self.quantile is not None:
            self.quantile.release(self.max_grad_norm, self.steps)
        self._is_noised = True

    def _settings_of_ranks(self) -> Settings:
        """Return what ranks must have alike before they step together."""
        line = "" if self.buffers is None else f"{self.buffers.strategy} {self.buffers.done}"
        trained = (f"{self.clipping.name_of(p)} {tuple(p.shape)} {p.dtype}" for p in self.params)
        alike: dict[str, float | str] = {
            **{name: value or 0 for name, value in self.settings.items()},
            "stability": self.clipping.named_stability or 0,
            "the number of steps": self.steps,
            "the trained parameters": "\n".join(trained),
            "what is reduced together, or the line of correlated noise,": (
                self.clipping.ranks.grouping + line
            ),
        }
        return alike

    @property
    def _is_of_system(self) -> bool:
        return self.secure_mode and self.generator is None

    @property
    def _divisor(self) -> float:
        size = self.expected_batch_size if self.loss_reduction == "mean" else 1
        assert size is not None
        return size

    @property
    def _std(self) -> float:
        """Standard deviation of what is drawn for the averaged gradient's noise."""
        scale = 1.0 if self.strategy is None else self.strategy.scale
        return float(scale * self.noise_multiplier * self.max_grad_norm / self._divisor)

    @torch.no_grad()
    def _add_secure_noise_to(self, summed: Tensor, *others: Tensor) -> None:
        for other in others:
            other.div_(self._divisor)
        if self._std > 0:
            std = self.noise_multiplier * self.max_grad_norm
            summed += draw_secure_noise(std, summed, self.generator)
        summed /= self._divisor

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free gradients as PyTorch does; sums survive only a skipped step."""
        if not self._is_last_step_skipped:
            if self.buffers is not None and self.clipping.batches != self._batches_before:
                self.buffers.begin_anew()  # a batch is thrown away
            self._forget_sums()
        elif self.clipping.sums.owner is self:
            self.clipping.sums.forget_part()
        self.original_optimizer.zero_grad(set_to_none)
        self._batches_before = self.clipping.batches

    def discard(self) -> None:
        """Throw away the sums of a batch that is not finished: nothing of it is applied."""
        has_failed = self.clipping.failures != self._failures_before
        if self.buffers is not None and (self.is_within_a_batch or has_failed):
            self.buffers.begin_anew()
        self.clear_sums()
        self._step_skip_queue.clear()
        self._is_last_step_skipped = False
        self._is_last_part = True

    def clear_sums(self) -> None:
        """Throw away sums and gradients; which parts follow stays."""
        for parameter in self.params:
            parameter.grad = None
        self._forget_sums()
        self._batches_before = self.clipping.batches
        self._failures_before = self.clipping.failures

    def _forget_sums(self) -> None:
        if self.clipping.sums.owner is self:
            self.clipping.sums.forget()
            self.clipping.shard_sums.forget()
        self._is_noised = False

    def remove(self) -> None:
        """Remove clipping and noise: model and original optimizer are as without them.

        A batch that is not finished is thrown away. A later ``NoisyOptimizer`` of the original
        optimizer stays as it is.
        """
        if getattr(self.original_optimizer, NOISY, None) is not self:
            return
        self.discard()
        if self.clipping.sums.owner is self:
            self.clipping.sums.owner = None
            self.clipping.remove()
        getattr(self.original_optimizer, HOOK).remove()
        for name in (HOOK, NOISY):
            delattr(self.original_optimizer, name)

    def step_with_noise_in(self, gradients: Sequence[Tensor]) -> None:
        """Let the original optimizer step on gradients of ``params`` that have noise already."""
        for parameter, gradient in zip(self.params, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        self._is_noised = True
        self.original_optimizer.step()

    def end_step(self) -> None:
        """End a step on all batches that were clipped since the last one, which a graph took."""
        self._batches_before = self.clipping.batches

    def state_dict(self, *, exact: bool = False) -> dict[str, Any]:
        """Return what this rank needs to go on; ``torch.load(weights_only=True)`` reads it.

        Args:
            exact: Whether it has ``secrets``, which ``load_state_dict`` needs for ``exact``.
                Whoever writes states by itself, as frameworks do, gets none.

        Returns:
            ``state`` and ``param_groups`` of the optimizer inside, and ``privacy``: settings as
            they were given and as they are, the number of steps, and ``secrets``, which nobody may
            see who sees what is released: what noise follows from, and the clipping's counts.

        Raises:
            RuntimeError: A batch is not finished.
        """
        self._refuse_within_a_batch("saved")
        privacy = {
            "made_with": self._made_with | self._drawn_by,
            "settings": self.settings,
            "steps": self.steps,
        }
        if exact:
            privacy["secrets"] = self._list_secrets()
        return self.original_optimizer.state_dict() | {"privacy": privacy}

    def _list_secrets(self) -> dict[str, Any]:
        """Return what noise follows from, and counts of what was drawn."""
        secrets = {
            "noise": {} if self._is_of_system else self.keys.state_dict(),
            "batches": self.clipping.batches,
            "nonfinite_samples": self.clipping.nonfinite_samples_total,
        }
        if self.buffers is not None:
            secrets["buffers"] = self.buffers.state_dict()
        if self.quantile is not None:
            secrets["quantile"] = self.quantile.keys.state_dict()
        return secrets

    def load_state_dict(self, state_dict: dict[str, Any], *, exact: bool = False) -> None:
        """Go on where ``state_dict`` was called, or raise and change nothing.

        Settings that a scheduler had changed by then are restored too.

        Args:
            state_dict: Of an optimizer that was made with the same settings; if exact, of the same
                rank of as many.
            exact: Whether equal sums get the noise that they would have got in the run that was
                saved. By default all noise is fresh.

        Raises:
            RuntimeError: A batch is not finished.
            ValueError: The state is of other settings, or of an optimizer without noise; or, if
                exact, of another rank or number of ranks, or without secrets.
        """
        self.refuse_load(state_dict, exact=exact)
        inner = dict(state_dict)
        privacy = inner.pop("privacy")
        secrets = privacy.get("secrets") or {}
        steps, batches, nonfinite = privacy["steps"], self.clipping.batches, 0
        if exact:
            batches, nonfinite = (secrets[name] for name in ("batches", "nonfinite_samples"))
        before, of_noise = self.settings, self.keys.state_dict()
        try:
            if exact:
                self.keys.load_state_dict(secrets["noise"])
            self._set(privacy["settings"])
            self.original_optimizer.load_state_dict(inner)
        except BaseException:
            self._set(before)
            if exact:
                self.keys.load_state_dict(of_noise)
            raise
        is_untouched = steps == self.steps == 0  # as where accelerate moves an optimizer
        if not exact and not (is_untouched and self.generator is not None):
            self.keys.renew()
            if not self.secure_mode:  # a given one may be seeded as in the run that was saved
                self._generator = None
        if self.buffers is not None:
            self.buffers.begin_anew()
            if exact:
                self.buffers.load_state_dict(secrets["buffers"], self.keys.nonce)
        self.steps = steps
        self.clipping.batches = self._batches_before = batches
        self.clipping.nonfinite_samples_total = nonfinite

    def refuse_load(self, state_dict: dict[str, Any], *, exact: bool) -> None:
        """Refuse a state that ``load_state_dict`` cannot go on from; it says when and how."""
        self._refuse_within_a_batch("loaded")
        privacy = state_dict.get("privacy")
        if privacy is None:
            raise ValueError(
                "this state has no 'privacy', as that of an optimizer without noise; load it into "
                "optimizer.original_optimizer"
            )
        self._refuse_other_state(privacy, (privacy.get("secrets") or {}) if exact else None)

    def _refuse_other_state(self, privacy: dict[str, Any], secrets: dict[str, Any] | None) -> None:
        """Refuse a state of other settings, or whose secrets, where given, repeat no noise."""
        drawn_by = {} if secrets is None else self._drawn_by  # fresh noise follows from none of it
        for name, own in (self._made_with | drawn_by).items():
            other = privacy["made_with"].get(name)
            if other != own:
                raise ValueError(
                    f"this state is of an optimizer that was made with {name} {other!r}, and this "
                    f"one with {own!r}; {_INTO_INNER}"
                )
        if secrets is None:
            return
        if not secrets.get("noise") or self._is_of_system:
            raise ValueError(
                "this state has no secrets, so its noise cannot be repeated: save "
                "state_dict(exact=True), or leave out exact=True here"
            )
        if self.buffers is not None:
            self.buffers.refuse_other(secrets["buffers"])

    def __repr__(self) -> str:
        return repr(self.original_optimizer)

    def __reduce_ex__(self, _: Any) -> Any:
        """Refuse a copy, also as part of a scheduler: it would repeat the noise of this one."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: two would draw the same noise "
            "for different batches; use state_dict(), of a scheduler too, or copy the "
            "original_optimizer"
        )

    def _set(self, settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            setattr(self, name, value)

    @property
    def is_within_a_batch(self) -> bool:
        """Whether there are sums that no step has applied."""
        return (
            self.clipping.batches != self._batches_before
            or bool(self._step_skip_queue)
            or self._is_noised
            or bool(self.clipping.sums.total)
        )

    def _refuse_within_a_batch(self, done: str) -> None:
        if self.is_within_a_batch:
            raise RuntimeError(
                f"a state cannot be {done} within a batch: sums without noise must not be written "
                "to a disk, and a run that goes on would lose them; do it before backward, or "
                "after the step of the last part of a batch"
            )

    def _will_skip(self) -> bool:
        return bool(self._step_skip_queue) and self._step_skip_queue[0]

    def _require_one_clipped_batch(self) -> None:
        if self.clipping.sums.owner is not self:
            raise RuntimeError(
                "another NoisyOptimizer took over the sums of this clipping, or this one was "
                "removed; one optimizer trains all parameters that a clipping clips"
            )
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
        self.clipping.sums.refuse_other_bound(self.max_grad_norm)
        for parameter in self.params:
            if not self.clipping.clips(parameter):
                raise RuntimeError(
                    f"this optimizer trains {self.clipping.name_of(parameter)}, which its Clipping "
                    "does not clip; remove it from the optimizer, or make a Clipping of a model "
                    "that contains it"
                )
        own = set(self.params)
        for parameter in self.clipping.sums.part:
            if parameter.requires_grad and parameter not in own:
                raise RuntimeError(
                    f"{self.clipping.name_of(parameter)} is clipped, and this optimizer does not "
                    "train it, so no step would; give it to the optimizer, or freeze it"
                )
        refuse_gradients(self.every_parameter, self.clipping.name_of)

    def _refuse_failed_part(self) -> None:
        """Refuse to add a part to those of a batch of which another part failed."""
        has_other_parts = bool(self._step_skip_queue) or bool(self.clipping.sums.total)
        was_lost = self.clipping.batches_at_loss > self._batches_before
        has_failed = self.clipping.failures != self._failures_before
        if has_failed and (has_other_parts or was_lost) and not self._clips_failed_parts_again:
            raise RuntimeError(
                "a backward pass failed since the last step, and with it a part of this batch may "
                "be missing; call discard(), and begin the batch again"
            )
        if has_failed and self.buffers is not None and not self._clips_failed_parts_again:
            self.buffers.begin_anew()  # a batch may be missing, so samples return too early
        self._failures_before = self.clipping.failures

    def _require_noise(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_noised:
            raise RuntimeError(
                f"{type(optimizer).__name__} was asked to step on gradients without noise; call "
                "step() of the NoisyOptimizer around it"
            )
        self._is_noised = False
