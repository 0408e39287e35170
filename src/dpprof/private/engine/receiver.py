"""What arrives in backward: contributions of layers, and what autograd computes by itself."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpprof.private.contributions.contributions import (
    Contributions,
    refuse_computed_again,
    refuse_float16,
)
from dpprof.private.contributions.sample_gradients import SampleGradients
from dpprof.private.graph.first_batch import Handler
from dpprof.private.norms.complex_numbers import interleave
from dpprof.private.ranks.ranks import Ranks
from dpprof.private.ranks.shard_sums import ShardSums
from dpprof.private.refusals.calls import LayerCall
from dpprof.private.refusals.coverage import Coverage
from dpprof.private.refusals.double_backward import (
    DIFFERENTIATED_AGAIN,
    computes_gradients,
    refuse_gradient,
)
from dpprof.private.refusals.forwards import Forwards
from dpprof.private.refusals.gradient_hooks import refuse_hooks
from dpprof.private.substitutes import substitute

if TYPE_CHECKING:
    from dpprof.private.engine.batch import Batch


class Receiver:
    """Hands over what a backward computes of clipped parameters, to whoever handles it then.

    Layers that have a rule hand over contributions. Of a loose parameter, which a module around
    layers uses itself, autograd computes the sum over samples; the graph of a batch says how to
    find the gradients of its samples (``Broadcasts``), which are handed over in its place. Any
    other gradient of a clipped parameter is refused. ``forwards`` sees who writes parameters,
    and ``shard_sums`` count the uses of parameters. ``why_no_gradients`` returns why no loss
    may contain a gradient; nothing where it may.
    """

    def __init__(
        self,
        coverage: Coverage,
        loose: Mapping[nn.Parameter, nn.Module],
        ranks: Ranks,
        forwards: Forwards,
        shard_sums: ShardSums,
        *,
        is_normalised: bool,
        name_of: Callable[[nn.Parameter], str],
        name_of_layer: Callable[[nn.Module], str],
        why_no_gradients: Callable[[], str],
    ) -> None:
        self._coverage, self._loose, self._ranks = coverage, loose, ranks
        self._forwards, self._shard_sums = forwards, shard_sums
        self._is_normalised = is_normalised
        self._name_of, self._name_of_layer = name_of, name_of_layer
        self._why_no_gradients = why_no_gradients
        self._handler: Handler | None = None
        self.is_disabled = False
        self.batch: Batch | None = None  # the batch whose backward runs
        self._hooks: dict[nn.Parameter, list[Any]] = {}
        self._stashed: dict[nn.Parameter, tuple[Tensor | None, Tensor]] = {}
        """While autograd adds up a loose parameter's gradient: what was there, and what it adds."""

    def handling(self, handler: Handler) -> AbstractContextManager[None]:
        """Let a function take all contributions inside the context."""
        return substitute(self, "_handler", handler)

    def receive(
        self,
        layer: nn.Module,
        call: LayerCall,
        contributions: Contributions,
        changed_B: Tensor | None = None,
        *,
        may_repeat: bool = False,
    ) -> None:
        """Take what one use of a layer contributes (``Receive``)."""
        call.verify(self._name_of_layer)
        if torch.is_grad_enabled() and (not may_repeat or self._why_no_gradients()):
            problem = self._why_no_gradients() or DIFFERENTIATED_AGAIN
            refuse_gradient(self._name_of_layer(layer), type(layer).__name__, problem)
        if not computes_gradients(contributions, self._name_of):
            return  # somebody else's gradient, of an input
        if self._handler is None:
            raise RuntimeError(
                "this model's gradients are clipped: call backward(losses) of its Clipping in "
                "place of loss.backward()"
            )
        if call.forward is not None:
            self._forwards.differentiate(call.forward)
        if changed_B is not None:
            assert self.batch is not None
            self.batch.changed.append((layer, changed_B))
        owned = [(self._ranks.own(parameter), use) for parameter, use in contributions]
        if any(parameter not in self._coverage for parameter, _ in owned):
            raise RuntimeError(
                f"{self._name_of_layer(layer)} ran with tensors in place of its parameters, as "
                "torch.func.functional_call gives them, which are not clipped; call the model with "
                "its own"
            )
        # A parameter may have been frozen after forward.
        trained = [pair for pair in owned if pair[0].requires_grad]
        if self._ranks.is_sharded:
            refuse_computed_again(trained)
        if trained:
            self._pass_on(layer, trained)

    def _pass_on(self, layer: nn.Module, contributions: Contributions) -> None:
        assert self._handler is not None
        if self._is_normalised:
            refuse_float16(contributions)
        if self._shard_sums.is_counting:
            for parameter, _ in contributions:
                self._shard_sums.count(parameter)
        self._handler(layer, contributions)

    def watch(self) -> None:
        """Watch everything that may get a gradient of a clipped parameter from autograd."""
        for parameter in self._coverage:
            for leaf in self._ranks.leaves(parameter):
                if not leaf.requires_grad:
                    continue
                refuse_hooks(self._name_of(parameter), leaf, self._hooks.get(leaf, ()))
                if leaf in self._hooks:
                    continue
                if parameter in self._loose:
                    self._hooks[leaf] = [
                        leaf.register_hook(partial(self._stash, leaf)),  # type: ignore[no-untyped-call]
                        leaf.register_post_accumulate_grad_hook(self._take_loose),  # type: ignore[no-untyped-call]
                    ]
                else:
                    refuse = partial(self._refuse_unclipped, parameter)
                    self._hooks[leaf] = [leaf.register_hook(refuse)]  # type: ignore[no-untyped-call]

    def _refuse_unclipped(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is None or self.is_disabled:
            return
        if self._handler is None:
            raise RuntimeError(
                f"autograd computed a gradient of {self._name_of(parameter)} that is not clipped; "
                "call backward(losses) of its Clipping, or remove() that first"
            )
        raise RuntimeError(
            f"{self._name_of(parameter)} was used outside of its layer, where clipping does not "
            "see it; call the layer, name a module around it that gets and returns samples in "
            "as_one=[...], or freeze the parameter; in place of a loss that takes the weight of a "
            "head, as Liger's does, use dpprof.private.linear_cross_entropy"
        )

    def _stash(self, leaf: nn.Parameter, gradient: Tensor | None) -> None:
        """Let autograd leave what it adds up of a loose parameter where nothing else is."""
        if gradient is None or self.is_disabled:
            return
        if self._handler is None:
            self._refuse_unclipped(self._ranks.own(leaf), gradient)
        self._stashed[leaf] = leaf.grad, gradient
        leaf.grad = None

    def _take_loose(self, leaf: nn.Parameter) -> None:
        """Handle a loose parameter's per-sample gradients in place of their sum."""
        if leaf not in self._stashed:
            return
        assert self.batch is not None
        self._forwards.differentiate()
        leaf.grad, gradient = self._stashed.pop(leaf)
        parameter = self._ranks.own(leaf)
        broadcast = self.batch.broadcasts.of.get(leaf)
        gradients = None if broadcast is None else broadcast.take(gradient)
        if not len(self.batch.losses):  # of the sample that stands for a batch without
            gradients = gradient[None]
        if gradients is None:
            self._refuse_unclipped(parameter, gradient)
        assert gradients is not None
        if parameter.requires_grad:  # it may have been frozen after forward
            # A copy: a hook may write what autograd still has.
            own = gradients.reshape(len(gradients), *parameter.shape).clone()
            self._pass_on(self._loose[parameter], [(parameter, SampleGradients(interleave(own)))])

    def forget_batch(self) -> None:
        """Forget the batch, and put back what lay where autograd added up."""
        if self.batch is not None:
            self.batch.throw_away()
        self.batch = None
        for leaf, (before, _) in self._stashed.items():
            leaf.grad = before
        self._stashed.clear()

    def remove(self) -> None:
        """Remove all hooks."""
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
