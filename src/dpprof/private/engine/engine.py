"""What every way of clipping shares: patched layers, and checks around one backward.

Privacy unit: a sample is the inputs at one index of their first axis, and one element of the
losses.
"""

import functools
import importlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from dpprof.private.contributions.sums import ClippedSums, dtype_of_sum, refuse_gradients
from dpprof.private.engine.batch import Batch, Enter
from dpprof.private.engine.factor import find_least_norm, verify_bound
from dpprof.private.engine.receiver import Receiver
from dpprof.private.errors import UnsupportedError, refuse_other_class
from dpprof.private.graph.broadcasts import Broadcasts
from dpprof.private.graph.first_batch import FirstBatches, Handler
from dpprof.private.graph.layout import Layout
from dpprof.private.graph.nodes import is_leaf, variable_of
from dpprof.private.layers.batch_axis import describe, find_batch_second
from dpprof.private.layers.composite_layers import Choice, find_choices
from dpprof.private.layers.layers import count_uses
from dpprof.private.layers.patching import patch_layer, unpatch_layer, watch_calls
from dpprof.private.layers.rules import Found, LayerRule, find_rewritten, find_rules
from dpprof.private.norms.code_paths import CodePath, Watch
from dpprof.private.number_formats import refuse_loss_scale
from dpprof.private.ranks.ranks import Ranks, find_ranks, refuse_other_wrapper
from dpprof.private.ranks.shard_sums import ShardSums
from dpprof.private.refusals.calls import LayerCall
from dpprof.private.refusals.coverage import Coverage, trained_in
from dpprof.private.refusals.double_backward import (
    refuse_transforms,
)
from dpprof.private.refusals.forwards import Forwards
from dpprof.private.refusals.released_state import ReleasedState
from dpprof.private.refusals.tensor_kinds import refuse_inputs, refuse_losses
from dpprof.private.samples.batches import give, may_call
from dpprof.private.samples.company import compare_samples
from dpprof.private.samples.users import Segments, verify_segments
from dpprof.private.substitutes import substitute

if TYPE_CHECKING:
    from dpprof.private.contributions.deferral import Deferral
    from dpprof.private.norms.linear import WayChoice
    from dpprof.private.samples.repeated_checks import RepeatedChecks


def _call(
    _layer: nn.Module, _way: CodePath, function: Callable[..., Any], inputs: tuple[Any, ...]
) -> Any:
    return function(*inputs)


class Clipping(ABC):
    """Clips the gradient of each sample of a batch, for any optimizer.

    Until ``remove``, rules of this package run the model's trained layers; their outputs stay the
    same. A copy of the model (``copy.deepcopy``, pickle) is a plain model.

    Args:
        model: Each of its trained parameters belongs to a layer. Frozen layers are left alone. A
            parameter may be frozen at any time; one that is thawed, added, replaced or tied
            later needs a new ``Clipping``, and until then ``backward`` refuses the step.
        max_grad_norm: Bound C, positive and finite.
        stability: None for flat clipping. A number gamma makes it normalised clipping (AUTO-S),
            which multiplies each sample's gradient by C / (norm + gamma): ``factor``.
        psac: Makes it per-sample adaptive clipping (DP-PSAC), of which the stability is the r.
        first_batch: ``verified`` spends two more backwards on the first batch of two samples or
            more, and refuses it where samples are mixed between layers (the module
            ``first_batch`` says what that proves); ``trusted`` does not.
        public_buffers: Names of buffers, attributes and parameters, as in ``layers.0.mean``, that
            may change because they hold nothing of the samples, or are in no ``state_dict()`` and
            read by no later forward.
        batch_second: Names of modules, as in ``named_modules()``, whose layers get the batch on
            their second axis, (T, B, d). Modules of PyTorch and Opacus with ``batch_first=False``
            say so themselves, for the layers directly in them too.
        loss_scale: What losses are multiplied with for backward, a power of two; clipping factors
            are divided by it, so the sum stays the same. In float16 small gradients vanish without
            one: 65536 is usual. A sample that overflows is excluded.
        as_one: Names of modules, such as ``"layers.*.mixer"``, that run as one layer each, without
            the rules of the layers inside. They get and return samples first (``as_one``).

    Raises:
        UnsupportedError: A layer has no exact per-sample gradient, or no rule, or the model is
            distributed otherwise than by ``DistributedDataParallel``, or ``fully_shard`` over one
            mesh of ranks.
        ValueError: C is not positive and finite, or another argument is out of its range.

    Formal guarantees: the sum has L2 sensitivity C when one sample is added or removed
    (add/remove neighbouring batches): each sample contributes at most C, for any input, whatever is
    frozen; ``norms.rounding`` says what rounding adds to C, and how little it lets another sample,
    or padding, move what a sample contributes. A sample whose loss or gradient is
    NaN or infinite contributes nothing, and is counted in ``nonfinite_samples``; one whose gradient
    is zero contributes zero; a batch without samples leaves no gradient. The gradient is that of
    the forward that ran: a layer that changed since is refused. A step changes trained parameters
    alone, and those in the optimizer's ``step()`` alone: what else forward writes, into tensors
    that modules hold, would leave the run or reach a later step without noise, and is refused
    (``released_state`` and ``forwards`` say what is seen). Samples must be handled independently of
    each other: the first batch shows most code that does not
    (``first_batch``), and ``check`` shows more.

    Example:
        >>> import torch
        >>> from dpprof.private import BookKeeping
        >>> model = torch.nn.Linear(3, 2)
        >>> clipping = BookKeeping(model, max_grad_norm=1.0)
        >>> losses_B = model(torch.ones(4, 3)).square().sum(1)
        >>> clipping.backward(losses_B)  # in place of losses_B.mean().backward()
        >>> clipping.sample_norms.shape, clipping.nonfinite_samples
        (torch.Size([4]), 0)
    """

    why_once = "which reentrant checkpointing hides; checkpoint with use_reentrant=False"
    """Why a parameter was expected to be used once."""

    keeps = False
    """Whether contributions are kept until the norms are known."""

    batches = 0
    """How many batches were clipped: every ``backward`` that was not refused."""

    repeated: "RepeatedChecks | None" = None
    """If not None, samples and gradients are verified again at random steps."""

    failures = 0
    """How many times ``backward`` raised."""

    batches_at_loss = 0
    """How many batches were clipped when sums were last thrown away, because it raised."""

    is_removed = False
    """Whether ``remove`` was called."""

    def __init__(
        self,
        model: nn.Module,
        max_grad_norm: float,
        *,
        stability: float | None = None,
        psac: bool = False,
        first_batch: str = "verified",
        public_buffers: Collection[str] = (),
        batch_second: Collection[str] = (),
        as_one: Collection[str] = (),
        loss_scale: float = 1.0,
    ) -> None:
        refuse_other_class("model", model, nn.Module)
        self.model = model
        self._stability, self._is_psac = stability, psac
        self.max_grad_norm = max_grad_norm
        self.sample_norms: Tensor | None = None
        """(B,) norms of the last batch's gradients, before clipping."""

        self.nonfinite_samples = 0
        """Samples of the last batch that were excluded: their loss or norm was not finite, also
        because it overflowed in 16 bits. Like the norms, it is private, and never logged."""

        self.nonfinite_samples_total = 0
        """The same over all batches."""

        self.plan: dict[str, WayChoice] = {}
        """How the last norms of each matrix were found, by its name, and why."""

        self.squares: dict[nn.Parameter, Tensor] | None = None
        """If not None, receives the squared per-sample norms of each parameter, (B,) each."""

        self.watch: Watch = _call
        """Called with layer, way, function and its arguments, in place of the function."""

        self.continues: Callable[[], bool] = lambda: False
        """Whether the coming batch is a part of one, and other parts follow."""

        self.deferral: Deferral | None = None
        """If not None, nothing waits for the device: takes what only values show."""

        self._is_running = threading.Lock()
        self.ranks = find_ranks(model)
        """The ranks that train the model."""

        self.sums = ClippedSums()
        self.shard_sums = ShardSums(self.ranks, self.sums.add)

        self._loss_scale = refuse_loss_scale(loss_scale)
        self._first_batches = FirstBatches(
            first_batch, self._loss_scale, self.ranks, self.name_of_layer
        )
        self._in_order: set[int] = set()
        """The outlines of graphs that keep samples in order; others are proven in each batch."""

        self._batch_second = find_batch_second(model, batch_second)
        rules = find_rules(
            model, self.ranks.wrapper, self._batch_second, is_sharded=self.ranks.is_sharded
        )
        self._choices = find_choices(model, rules, as_one, self.ranks)
        self._layers = [*rules, *self._choices]
        own = self._list_own()
        self._loose = {
            parameter: layer
            for layer, parameters in own.items()
            if layer not in rules
            for parameter in parameters.values()
        }
        """Parameters of modules that contain layers, which have no rule, and their modules."""

        self._coverage = Coverage(own, self.ranks)
        self._shared = self._coverage.verify(model)
        self._released = ReleasedState(model, self.ranks.own, self.clips, public_buffers)
        self.forwards = self._find_forwards(public_buffers)
        self._receiver = Receiver(
            self._coverage,
            self._loose,
            self.ranks,
            self.forwards,
            self.shard_sums,
            is_normalised=stability is not None,
            name_of=self.name_of,
            name_of_layer=self.name_of_layer,
            why_no_gradients=lambda: self._why_no_gradients,
        )
        self._rewritten = self._patch_layers(rules)
        try:
            self._receiver.watch()
        except BaseException:
            self._let_go()  # nobody else has this clipping
            raise
        self.ranks.take_over()

    @property
    @abstractmethod
    def _batch_type(self) -> type[Batch]:
        """The way in which a batch is clipped."""

    def _list_own(self) -> dict[nn.Module, dict[str, nn.Parameter]]:
        """List the trained parameters of each module that has some of its own.

        Raises:
            UnsupportedError: They are shards in 16 bits.
        """
        own = {
            layer: {name: self.ranks.own(p) for name, p in trained_in(layer).items()}
            for layer in self.model.modules()
            if trained_in(layer)
        }
        trained = (parameter for parameters in own.values() for parameter in parameters.values())
        if self.ranks.is_sharded and any(
            dtype_of_sum(parameter) != parameter.dtype for parameter in trained
        ):
            raise UnsupportedError(
                "under fully_shard trained parameters need float32, because their sums have their "
                "dtype; let MixedPrecisionPolicy(param_dtype=...) gather them in 16 bits"
            )
        return own

    def _patch_layers(self, rules: Mapping[nn.Module, Found]) -> Collection[nn.Module]:
        """Let rules run layers, and watch calls of the model; return what else runs otherwise."""
        choices = {
            module: Found(choice.run, type(module)) for module, choice in self._choices.items()
        }
        for layer, (rule, replaced) in (*rules.items(), *choices.items()):
            receive = partial(self._receiver.receive, layer)
            run = partial(
                _run_uncompiled,
                _make_uncompiled(),
                self.ranks,
                self.forwards,
                rule,
                layer,
                receive,
            )
            around = [choice for choice in self._choices.values() if layer in choice.inside]
            patch_layer(layer, run, replaced, partial(self._is_on, around))
        rewritten = find_rewritten(self.model)
        for module, run_module in rewritten.items():
            patch_layer(module, run_module, type(module), lambda: not self._receiver.is_disabled)
        is_on = lambda: not (self._receiver.is_disabled or torch.compiler.is_exporting())  # noqa: E731
        watch_calls(self.model, self.forwards.watcher(), is_on)
        return rewritten

    def _find_forwards(self, public: Collection[str]) -> Forwards:
        names = {
            self.ranks.own(parameter): name
            for name, parameter in self.model.named_parameters()
            if name not in public
        }
        return Forwards(names, lambda: self.deferral is None)

    def _is_on(self, around: Sequence[Choice]) -> bool:
        """Tell whether a layer is clipped by itself, and not with a module around it."""
        return not self._receiver.is_disabled and not any(choice.is_one for choice in around)

    @property
    def max_grad_norm(self) -> float:
        """Bound C. It may change between a step and the next ``backward``."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, bound: float) -> None:
        verify_bound(bound, self._stability, psac=self._is_psac)
        self._max_grad_norm = float(bound)

    @property
    def stability(self) -> float | None:
        """The gamma of normalised clipping, or the r of PSAC; None for flat clipping."""
        return self._stability

    @property
    def is_psac(self) -> bool:
        """Whether the factor is that of PSAC."""
        return self._is_psac

    @property
    def named_stability(self) -> float | str | None:
        """The stability, with the name of PSAC."""
        return f"{self._stability} of psac" if self._is_psac else self._stability

    def find_least_norm(self, bound: float) -> float:
        """Return a bound over the largest factor that it gives."""
        return find_least_norm(bound, self._stability, psac=self._is_psac)

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with for backward."""
        return self._loss_scale

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [self.ranks.own(p) for p in self.model.parameters() if p.requires_grad]

    def check(
        self,
        losses_of: Callable[..., Tensor],
        *batch: Any,
        samples: Sequence[Any] = (),
        collate: Callable[[list[Any]], Any] | None = None,
        tolerance: float | None = None,
        users: Segments | None = None,
    ) -> Any:
        """Check on one batch that this clips the gradients of single samples.

        This is ``dpprof.private.check`` of the clipping alone, without optimizer and noise.

        Args:
            losses_of: Computes losses, one for each sample; it may draw numbers.
            batch: The arguments of ``losses_of``, of any structure, or one batch as the data loader
                hands it out; at least two samples. Without any, ``samples`` are collated.
            samples: Samples of the dataset, of different lengths, which are also collated each
                alone (``company``).
            collate: Makes a batch of some, as the data loader's ``collate_fn``.
            tolerance: Largest relative error.
            users: As of ``backward``.

        Returns:
            ``dpprof.private.Checked``.

        Raises:
            WrongTrainingError: Something is wrong. The message names the first such thing.
        """
        # By name, because it is in a higher layer, which also knows Opacus.
        verification = importlib.import_module("dpprof.private")

        def loss(_: nn.Module, /, *parts: Any, **named: Any) -> Tensor:
            return losses_of(*parts, **named)

        if bool(samples) != (collate is not None):
            raise ValueError("give samples and collate together: collate makes a batch of some")
        if not batch and collate is not None:
            batch = (collate(list(samples)),)
        takes_all = may_call(losses_of, *batch) and not isinstance(batch[0], Mapping)
        arguments, named = (batch, {}) if takes_all or batch[1:] else give(losses_of, batch[0])
        checked = verification.check(
            self.model, loss, named or arguments, self, tolerance=tolerance, users=users
        )
        problems = []
        if collate is not None:
            problems = compare_samples(
                self, losses_of, lambda: samples, collate, keeps_order=users is not None
            )
        missed = {"samples that are collated anew": "; ".join(problems)} if problems else {}
        return checked._replace(unchecked=checked.unchecked | missed)

    @property
    def first_batch_verified(self) -> bool:
        """Whether no batch is to be verified any more."""
        return self._first_batches.are_verified

    @property
    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Parameters that are clipped together, and the bound of each group."""
        return [(self.parameters, self.max_grad_norm)]

    @property
    def _why_no_gradients(self) -> str:
        """Why no loss may contain a gradient; nothing where it may."""
        is_sharded = self.ranks.is_sharded
        return "under fully_shard no gradient is differentiated again" if is_sharded else ""

    @property
    def generators(self) -> list[torch.Generator]:
        """Sources of random numbers that the clipping itself draws."""
        return []

    def clips(self, parameter: nn.Parameter) -> bool:
        """Tell whether this clips a parameter's gradient, if it is trained."""
        return parameter in self._coverage

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return a parameter's name in the model, or its shape if the model does not have it."""
        name = self._coverage.names.get(parameter)
        return name or f"a parameter of shape {tuple(parameter.shape)}"

    def remove(self) -> None:
        """Restore the model's layers, and remove all hooks."""
        self._let_go()
        self.ranks.release()

    def _let_go(self) -> None:
        for layer in (*self._layers, *self._rewritten, self.model):
            unpatch_layer(layer)
        self._receiver.remove()
        self._layers.clear()
        self.is_removed = True

    def __reduce_ex__(self, _: Any) -> Any:
        """Refuse a copy: it would clip the layers of the model that this one clips."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled; copy its model, which is then a "
            "plain one, and make a clipping of the copy"
        )

    def backward(
        self,
        losses: Tensor,
        enter: Enter = lambda _: None,
        *,
        users: Segments | None = None,
    ) -> None:
        """Sum the clipped gradients of a batch, in place of ``loss.backward()``.

        A ``NoisyOptimizer`` takes the sums in its step, and ``.grad`` stays None until they have
        noise. It refuses to step on more than one batch, and says how to split one. Without a
        ``NoisyOptimizer`` the sums are added to ``.grad``, as autograd does, WITHOUT NOISE: they
        have sensitivity C, and are not private. If it raises, it adds nothing.

        Under ``DistributedDataParallel`` the sum is that of this rank's samples until the step.
        Under ``fully_shard`` it is this rank's shard of the sum of all ranks' samples, or of those
        of its replica, unless a ``NoisyOptimizer`` knows that other parts of the batch follow.

        Args:
            losses: (B,) the loss of each sample, which depends on that sample alone; empty
                for a batch without samples, which contributes nothing. Under ``fully_shard`` the
                model must have run on every rank: on any sample for a batch without, ``[:0]``.
            enter: Called as a phase begins: ``backward``, ``clip``, ``second_backward``.
            users: How many of these samples each user has. Then a user's gradient is clipped as
                one, so that he contributes at most C, and ``sample_norms`` are those of users; one
                with a sample that is not finite contributes nothing.

        Raises:
            ValueError: The losses are not one for each sample, in float32 or float64.
            RuntimeError: A trained parameter would not be clipped: it was used outside of its
                layer, or was not trained when this was made. Or a ``.grad`` is where the
                ``NoisyOptimizer`` will put its own, such as the last step's. Or a layer changed, or
                a tensor that a module holds, or forward wrote a trained parameter. Or ranks
                disagree, or another ``backward`` is under way, or ``remove`` was called.
            UnsupportedError: Samples are mixed, or a hook or a transform would see gradients.
        """
        if self.is_removed:
            raise RuntimeError("this clipping was removed, and clips nothing; make a new one")
        if not self._is_running.acquire(blocking=False):
            raise RuntimeError("another backward of this clipping is under way")
        try:
            self._backward(losses, enter, users)
        except BaseException:
            self.failures += 1
            self.ranks.note_failure()
            raise
        finally:
            self._is_running.release()

    def _backward(self, losses: Tensor, enter: Enter, users: Segments | None) -> None:
        self._prepare(losses)
        if users is not None:
            verify_segments(users, len(losses))
        is_due = self.repeated is not None and self.repeated.is_due(goes_on=self.continues())
        if is_due:
            self._first_batches.look_again()
        self._first_batches.begin()
        try:
            with ExitStack() as precision:  # of norms and sums, wherever backward is called
                for kind in filter(torch.is_autocast_enabled, {"cpu", losses.device.type}):
                    precision.enter_context(torch.autocast(kind, enabled=False))
                self._sum(losses, enter, users if len(losses) else None)
            if is_due and self.repeated is not None:
                self.repeated.compare()
        except BaseException:
            self.sums.forget_part()  # part of a batch must not be applied
            self.batches_at_loss = self.batches
            self.shard_sums.forget()
            if not self.ranks.is_sharded:  # whose ranks verify together
                self._first_batches.undo()
            raise
        finally:
            self._receiver.forget_batch()
            self.forwards.close()
        if self.sums.owner is None:
            self.sums.give()
        self.batches += 1
        self.nonfinite_samples_total += self.nonfinite_samples

    def _prepare(self, losses: Tensor) -> None:
        """Refuse what the model and the losses show, and forget the last batch's results."""
        refuse_losses(losses)
        refuse_transforms(self.model)
        self.ranks.verify()
        self._shared = self._coverage.verify(self.model)
        self._receiver.watch()
        if self.sums.owner is not None:
            refuse_gradients(self._coverage, self.name_of)
        self.sums.begin(self.max_grad_norm)
        self.sample_norms, self.nonfinite_samples, self.plan = None, 0, {}

    def _sum(self, losses: Tensor, enter: Enter, users: Segments | None) -> None:
        """Add the clipped gradients of a batch to the sums."""
        batch = self._receiver.batch = self._read_graph(losses, users)
        strangers = self._list_strangers(batch.layout)
        with _gradients_kept([leaf for _, leaf in strangers]):
            self._verify_graph(losses, batch.layout, strangers)
            self._clip(batch, enter)

    def _verify_graph(
        self, losses: Tensor, layout: Layout, strangers: Sequence[tuple[Any, Any]]
    ) -> None:
        """Refuse what the graph of a batch shows, and what its backwards show where it does not."""
        self._first_batches.verify(losses, self.handling, self._coverage, layout)
        layout.raises = True
        for node, leaf in strangers:
            if layout.is_shared(node):  # and losses do not mix samples
                _refuse_stranger(leaf)
        if layout.is_trusted and self.deferral is not None and self._first_batches.verifies:
            raise UnsupportedError(f"{layout.doubt}; a captured step is not")
        if len(losses) > 1 and not (layout.has_orders or layout.is_trusted):
            self._in_order.add(layout.outline)

    def _clip(self, batch: Batch, enter: Enter) -> None:
        """Run the backwards of a batch, and add up."""
        losses = batch.losses
        batch.changed.clear()
        if self.ranks.is_sharded:
            self._expect_shards(losses)
        if len(losses) or self.ranks.is_sharded:
            self.plan = batch.norms.plan
            batch.clip(enter)
        self.sample_norms = batch.sample_norms
        if batch.nonfinite_B is not None:
            self.nonfinite_samples = sum(batch.nonfinite_B.tolist())
        batch.refuse_changed_outputs()
        self.shard_sums.finish()
        self.ranks.refuse_unclipped()
        self.forwards.verify()
        if self.deferral is None:
            self.verify_released()

    def _read_graph(self, losses: Tensor, users: Segments | None) -> Batch:
        """Find which rows samples have, and what enters for all samples."""

        def name_of(leaf: nn.Parameter) -> str:
            return self.name_of(self.ranks.own(leaf))

        reads = self.deferral is None
        layout = Layout(losses, name_of, in_order=self._in_order, reads=reads)
        for node, leaf in self._list_strangers(layout):
            if isinstance(leaf, nn.Parameter) or not layout.may_be_of_samples(node):
                _refuse_stranger(leaf)
        leaves = {leaf for parameter in self._loose for leaf in self.ranks.leaves(parameter)}
        broadcasts = Broadcasts(layout, leaves, name_of)
        try:
            layout.group()
            ways = broadcasts.ways | layout.describe() | describe(self._batch_second)
            self._first_batches.expect(ways, layout.doubt)
            reused = self._find_reused(layout.nodes, broadcasts)
            return self._batch_type(self, losses, layout, broadcasts, reused, users=users)
        except BaseException:
            broadcasts.remove()
            raise

    def _list_strangers(self, layout: Layout) -> list[tuple[Any, Any]]:
        """List the leaves, with their nodes, that get a gradient and are not clipped."""
        leaves = [(node, variable_of(node)) for node in layout.nodes if is_leaf(node)]
        return [pair for pair in leaves if not self.clips(self.ranks.own(pair[1]))]

    def agree(self) -> None:
        """Let sharded ranks agree on a batch, before sums leave them."""
        late = self._first_batches.has_late_ways
        self.shard_sums.agree(self._coverage.names, has_late_ways=late)
        self._first_batches.refuse_late_ways()

    def verify_released(self) -> None:
        """Refuse a step if a tensor that modules hold changed; this may wait for the device.

        Raises:
            RuntimeError: One did.
        """
        self._released.verify()

    def _expect_shards(self, losses: Tensor) -> None:
        if not losses.requires_grad:
            raise RuntimeError(
                "the losses depend on no trained parameter, and other ranks wait for this one's "
                "part in running the model; for a batch without samples, run it on any sample and "
                "pass losses[:0]"
            )
        self.shard_sums.start(self.max_grad_norm, continues=self.continues())

    def _find_reused(
        self, nodes: Sequence[Any], broadcasts: Broadcasts
    ) -> Collection[nn.Parameter]:
        uses = count_uses(nodes)
        for parameter in broadcasts.of:
            uses[parameter] += 1
        return self._shared | {self.ranks.own(p) for p, count in uses.items() if count > 1}

    def name_of_layer(self, layer: nn.Module) -> str:
        """Return a layer's name in the model, or its type."""
        names = (name for name, module in self.model.named_modules() if module is layer)
        return next(names, "") or type(layer).__name__

    def handling(self, handler: Handler) -> AbstractContextManager[None]:
        """Let ``handler`` take the contributions of all layers inside the context."""
        return self._receiver.handling(handler)

    def disabled(self) -> AbstractContextManager[None]:
        """Run the model and autograd without clipping inside the context."""
        return substitute(self._receiver, "is_disabled", value=True)

    @contextmanager
    def first_batch_trusted(self) -> Iterator[None]:
        """Verify no batch inside the context."""
        trusted = substitute(self._first_batches, "are_verified", value=True)
        with trusted, substitute(self, "repeated", value=None):
            yield


@contextmanager
def _gradients_kept(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Leave leaves that are not clipped as they were: the sums of a batch are nobody else's.

    Of a batch of one sample nothing tells an input from what is trained.
    """
    before = [(leaf, leaf.grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


def _refuse_stranger(leaf: Tensor) -> NoReturn:
    what = "parameter" if isinstance(leaf, nn.Parameter) else "trained tensor"
    raise RuntimeError(
        f"the losses depend on a {what} of shape {tuple(leaf.shape)} that the model does not have, "
        "and its gradient would be neither clipped nor noised; make it a part of the model before "
        "its clipping is made, or detach() it"
    )


def _run(
    ranks: Ranks,
    forwards: Forwards,
    rule: LayerRule,
    layer: nn.Module,
    receive: Callable[..., None],
    *inputs: Any,
    **named: Any,
) -> Any:
    refuse_other_wrapper(ranks)
    refuse_transforms(layer)
    forward = forwards.of(layer) if torch.is_grad_enabled() else None
    if forward is not None and not isinstance(getattr(rule, "__self__", None), Choice):
        arguments = (*inputs, *named.values())
        is_alone = len(arguments) == 1  # without the loss of a head
        refuse_inputs(layer, arguments, may_be_sparse=is_alone and isinstance(layer, nn.Linear))
    call = LayerCall(layer, forward)
    y = rule(layer, partial(receive, call), *inputs, **named)
    call.end()
    return y


def _run_uncompiled(uncompiled: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Run a layer where ``torch.compile`` leaves it alone, which costs time where it is at work."""
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback  # noqa: SLF001 (no public name)
    is_at_work = torch.compiler.is_dynamo_compiling() or callback() is not None
    return (uncompiled if is_at_work else _run)(*arguments, **named)


@functools.cache
def _make_uncompiled() -> Callable[..., Any]:
    """Return ``_run`` as ``torch.compile`` leaves it alone; what that needs is imported late."""
    reason = "a layer that is clipped cannot be compiled; leave out fullgraph=True"
    uncompiled: Callable[..., Any] = torch.compiler.disable(_run, reason=reason)  # type: ignore[no-untyped-call]
    return uncompiled
