"""Runs steps of a user's own loop, reads the gradients that its optimizer gets, and undoes them.

Shape legend: B samples.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from opacus.grad_sample import AbstractGradSampleHooks, AbstractGradSampleModule
from torch import Tensor, nn

from dpprof.private.checks.batch import TrainingBatch
from dpprof.private.checks.draws import Draws, Replay, StepWatcher
from dpprof.private.checks.settings import (
    Mechanism,
    PrivateOptimizer,
    Settings,
    refuse_unknown,
    setting,
)
from dpprof.private.contributions.sums import dtype_of_sum
from dpprof.private.engine.engine import Clipping
from dpprof.private.loop import captured_parts, private_optimizer
from dpprof.private.noise.optimizer import NoisyOptimizer
from dpprof.private.refusals.released_state import is_same
from dpprof.private.samples.company import WrongTrainingError, find_dropout
from dpprof.private.samples.random_state import OtherGenerators, random_state_kept
from dpprof.private.samples.users import Segments
from dpprof.private.substitutes import substitute

Gradients = dict[nn.Parameter, Tensor]


class WrongScaleError(WrongTrainingError):
    """The losses of a batch are a multiple of those of its samples alone."""


class StepEffects(NamedTuple):
    """The effects of one step."""

    gradients: Gradients  # that the innermost optimizer was given; zeros for none
    moved: set[nn.Parameter]
    in_16_bits: bool
    squares: Gradients  # squared norms of samples, (B,), if a ``Clipping`` found them


class Loop:
    """A user's model, loss, optimizer and step; each step that it takes is undone.

    ``loss`` is what the loop differentiates, from the model and a batch; ``private`` Opacus's
    optimizer, dpprof's, or the settings of a loop by hand; ``step`` one whole step on a batch,
    None for that of an ordinary loop. ``users`` tell whose samples are clipped as one.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        private: PrivateOptimizer | Mechanism,
        step: Callable[..., Any] | None,
        users: Segments | None = None,
    ) -> None:
        refuse_unknown(private, step)
        self.wrapped = model
        self.loss = loss
        self.private, self.users = private, users
        self.by_hand = step is not None
        self.step = step or self._step
        self.draws = Draws()  # what the loss drew for the batch; every other call repeats it
        self.others: OtherGenerators | None = None
        self.generators: dict[torch.Generator, Tensor] = {}  # the states before they drew
        while isinstance(model, AbstractGradSampleModule):
            model = model._module  # noqa: SLF001 (Opacus offers no other way that keeps its hooks)
        self.model: nn.Module = model
        self.names = {p: name for name, p in model.named_parameters()}
        self.trained = [p for p in self.names if p.requires_grad]
        self.hooks = _find_hooks(self.wrapped)
        dropping = find_dropout(self.model)
        self.dropout_off = [(module, name, 0.0) for module, name, _ in dropping]
        """Modules that drop, their attributes with the rate, and no rate."""

        # PyTorch's kernels of recurrent layers draw in an order of their own.
        self.dropout = [dropout for dropout in dropping if not isinstance(dropout[0], nn.RNNBase)]
        """Modules that drop with dropout on, their attributes with the rate, and their rates."""

        self.training = {module: module.training for module in self.model.modules()}

        self.settings = Settings(private, self.trained, self.hooks)
        self.clipping, self.optimizer = self.settings.clipping, self.settings.optimizer

    def _step(self, *batch: Any, **named: Any) -> None:
        private = self.private
        assert isinstance(private, PrivateOptimizer)
        private.zero_grad()
        value = self.loss(self.wrapped, *batch, **named)
        if isinstance(private, private_optimizer.PrivateOptimizer):
            private.backward(value)
        elif isinstance(private, NoisyOptimizer):
            private.clipping.backward(value, users=self.users if value.numel() else None)
        elif isinstance(value, Tensor) and value.dim():
            torch.autograd.backward(value.mean() if self.settings.averages else value.sum())
        else:
            value.backward()
        private.step()

    def record(self, batch: TrainingBatch) -> Any:
        """Compute a plain loss, and keep what it draws, which every other call repeats."""
        assert self.others is not None
        self.draws = Draws(batch.samples)
        before = self.others.read()
        watch = StepWatcher(silent=False, draws=self.draws, generators=self.generators)
        with self.plain() as model, watch:  # with gradients: a loss may contain one
            value = batch.call(self.loss, model)
        if self.others.read() != before:
            self.draws.elsewhere = before
        return value

    @contextmanager
    def drawing(self, sample: int | None = None, *, is_alone: bool = False) -> Iterator[Replay]:
        """Repeat inside the context what the loss drew (``Replay``)."""
        replay = Replay(self.draws, sample, is_alone=is_alone)
        self.rewind()
        watch = StepWatcher(silent=False, draws=replay, generators=self.generators)
        with watch if self.draws.made else nullcontext():
            yield replay

    def rewind(self) -> None:
        """Set NumPy's and Python's generators back, if the loss draws with them."""
        if self.draws.elsewhere is not None:
            assert self.others is not None
            self.others.write(self.draws.elsewhere)

    @contextmanager
    def plain(self) -> Iterator[nn.Module]:
        """Run the model without hooks and clipping inside the context."""
        disabled = nullcontext() if self.clipping is None else self.clipping.disabled()
        with setting(*((hooks, "hooks_enabled", False) for hooks in self.hooks)), disabled:
            yield self.model

    def differentiate(self, losses: Tensor, *, retain_graph: bool = False) -> Gradients:
        """Compute the ordinary gradient of losses, by their scale; zeros where there is none."""
        scale = 1.0 if self.clipping is None else self.clipping.loss_scale
        gradients = torch.autograd.grad(
            scale * losses.sum(), self.trained, retain_graph=retain_graph, materialize_grads=True
        )
        if scale != 1:
            gradients = tuple(gradient.to(dtype_of_sum(gradient)) / scale for gradient in gradients)
        return dict(zip(self.trained, gradients, strict=True))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Restore everything at the end; dropout is off and no accountant counts meanwhile.

        ``dropout_on`` turns dropout on again. Trained parameters that are all zero, such as an
        adapter's second matrix, are moved: otherwise parameters behind them would have no gradient.
        """
        source = getattr(self.private, "generator", None)
        off = setting(*self.dropout_off)
        with random_state_kept() as self.others, self._restored(), off, ExitStack() as stack:
            stack.callback(self._restore_generators)
            if self.clipping is not None:
                stack.enter_context(self.clipping.first_batch_trusted())
            if source is not None:
                stack.callback(source.set_state, source.get_state())
            if isinstance(self.private, PrivateOptimizer):
                self.private.step_hook = None
                self.private._step_skip_queue = []  # noqa: SLF001 (Opacus has no other way)
                self.private._is_last_step_skipped = False  # noqa: SLF001 (within a batch)
            if isinstance(self.private, private_optimizer.PrivateOptimizer):
                self.private.spent, self.private.planned_steps = None, None
                self.private.captured = None  # what is looked at runs in Python
            if isinstance(self.private, NoisyOptimizer):
                self.private.buffers = None  # noise of the steps looked at is independent
                sums = self.private.clipping.sums
                stack.enter_context(sums.put_aside())  # of a batch that the loop is in
                sums.owner = self.private
                self.private.discard()
            draw = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for parameter in self.trained:
                    if not parameter.any():
                        values = torch.randn(parameter.shape, generator=draw, dtype=torch.float32)
                        parameter.copy_(0.02 * values)
            yield

    def _restore_generators(self) -> None:
        for generator, state in self.generators.items():
            generator.set_state(state)

    def evaluation(self) -> AbstractContextManager[None]:
        """Evaluate the model inside the context, as ``eval()`` does."""
        return setting(*((module, "training", False) for module in self.training))

    @contextmanager
    def dropout_on(self) -> Iterator[None]:
        """Train as usual inside the context, with the same random numbers each time."""
        modes = ((module, "training", value) for module, value in self.training.items())
        with torch.random.fork_rng(), setting(*modes, *self.dropout):
            torch.manual_seed(0)
            yield

    def _take_part(self, samples: int, *, is_empty: bool) -> None:
        """Tell an optimizer of ``make_private`` that its data loader handed out a batch."""
        if isinstance(self.private, private_optimizer.PrivateOptimizer):
            self.private._part = None  # noqa: SLF001 (a batch may be under way, and is restored)
            state = torch.get_rng_state()
            part = captured_parts.Part(samples, True, is_empty, state, users=self.users)
            self.private.take_part(part)

    def take(
        self, batch: TrainingBatch, *, silent: bool, times: int = 1, is_empty: bool = False
    ) -> StepEffects | None:
        """Take a step, from cleared gradients, undo it, and return its effects, or None.

        Where ``silent`` it draws no noise. It is taken several ``times`` from the same
        parameters, with the gradients that it left: the last one's effects count, None if
        the optimizer made none. ``is_empty`` says that the one sample stands for a batch
        without samples. ``WrongTrainingError``: the optimizer made several steps.
        """
        taken: list[Gradients] = []

        def look(*_: Any) -> None:
            pairs = ((p, torch.zeros_like(p) if p.grad is None else p.grad) for p in self.trained)
            taken.append({p: gradient.clone() for p, gradient in pairs})

        mode, squares = StepWatcher(silent=silent, generators=self.generators), Gradients()
        with self._restored() as before:
            if self.settings.keys is not None:
                self.settings.keys.renew()  # or equal sums had equal noise in each try
            if self.clipping is not None:
                self.clipping.squares = squares
            for parameter in self.names:
                parameter.grad = None
            optimizer = self.optimizer if isinstance(self.private, Mechanism) else self.private
            optimizer.zero_grad()
            with self.optimizer.register_step_pre_hook(look):
                for _ in range(times):
                    taken.clear()
                    squares.clear()
                    self._write(before)
                    split = batch.samples if self.by_hand else None
                    mode.draws = Replay(self.draws, split=split)
                    self.rewind()
                    self._take_part(batch.samples, is_empty=is_empty)
                    with mode:
                        batch.call(self.step)
            moved = {p for p in self.names if not torch.equal(p.detach(), before[p])}
        if len(taken) > 1:
            raise WrongTrainingError(
                f"one step on a batch steps the optimizer {len(taken)} times, and an accountant "
                "counts each"
            )
        if self.clipping is not None:
            squares = {p: square / self.clipping.loss_scale**2 for p, square in squares.items()}
        return StepEffects(taken[0], moved, mode.in_16_bits, squares) if taken else None

    @torch.no_grad()
    def _write(self, values: Mapping[Tensor, Tensor]) -> None:
        for tensor, value in values.items():
            if not is_same(tensor, value):  # a clipping refuses what is frozen and was written
                tensor.copy_(value)

    @contextmanager
    def _restored(self) -> Iterator[dict[Tensor, Tensor]]:
        """Restore values, which it yields, gradients, attributes and the optimizer's state."""
        tensors = [*self.names, *self.model.buffers()]
        values = {tensor: tensor.detach().clone() for tensor in tensors}
        gradients = [(p, p.grad) for p in self.names]
        owners = [*self.wrapped.modules(), *self.hooks, *tensors, self.optimizer, self.clipping]
        owners.append(self.private if isinstance(self.private, PrivateOptimizer) else None)
        owners += [self.settings.keys, getattr(self.private, "quantile", None)]
        attributes = [(owner, dict(vars(owner))) for owner in owners if owner is not None]
        groups = [(group, dict(group)) for group in self.optimizer.param_groups]
        state = {
            p: {k: v.clone() if isinstance(v, Tensor) else v for k, v in own.items()}
            for p, own in self.optimizer.state.items()
        }
        try:
            yield values
        finally:
            for owner, own in attributes:
                vars(owner).clear()
                vars(owner).update(own)
            for group, own in groups:
                group.update(own)
            self.optimizer.state.clear()
            self.optimizer.state.update(state)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            self._write(values)


def _find_hooks(model: nn.Module) -> list[Any]:
    hooks_by_id: dict[int, Any] = {}
    for module in model.modules():
        hooks = [getattr(hook, "__self__", None) for hook in module._forward_hooks.values()]  # noqa: SLF001
        for owner in (module, *hooks):
            if isinstance(owner, AbstractGradSampleHooks) and hasattr(owner, "hooks_enabled"):
                hooks_by_id[id(owner)] = owner
    return list(hooks_by_id.values())


@contextmanager
def completed(clipping: Clipping, model: nn.Module) -> Iterator[NoisyOptimizer]:
    """Give a clipping, whose sums of parts are kept, an optimizer without noise in the context."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sgd = torch.optim.SGD(trained, lr=1.0)
    with ExitStack() as stack:
        stack.enter_context(clipping.sums.put_aside())
        stack.enter_context(substitute(clipping, "continues", clipping.continues))
        yield NoisyOptimizer(sgd, clipping, noise_multiplier=0.0, expected_batch_size=1)
