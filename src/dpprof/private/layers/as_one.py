"""Modules that use parameters in ways that no rule sees run as one layer each.

A module may compute with parameters of its own beside its layers, or with a layer's weight without
calling the layer: adapters, mixers of state-space models, routers. Where such parameters only enter
for all samples (``broadcasts``), or multiply by ``functional.linear``, the layers inside run by
their rules, which is cheaper. Otherwise the module as a whole runs as a layer without a rule.

Its first forward decides: the graph of what it returned shows each use of its parameters. What was
decided wrongly, because a later forward uses them otherwise, is refused in backward. Under
``fully_shard`` ranks decide together. ``as_one`` of ``Clipping`` declares it for modules that
nothing shows, such as those that give their layers tokens in the order of experts.
"""

import fnmatch
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpprof.private.contributions.contributions import Receive
from dpprof.private.errors import UnsupportedError
from dpprof.private.graph.broadcasts import LOSSES, follow
from dpprof.private.graph.nodes import find_users, nodes_behind
from dpprof.private.graph.rows import Rows
from dpprof.private.layers.layers import multiply
from dpprof.private.layers.layers_without_rule import (
    parametrizing_safely,
    run_any_layer,
    versions_of,
)
from dpprof.private.layers.patching import PatchedLayer, unpatch_layer
from dpprof.private.layers.quantized_layers import is_quantized
from dpprof.private.layers.rules import Found
from dpprof.private.ranks.ranks import Ranks, is_sharded_alone
from dpprof.private.refusals.coverage import trained_in

_ADAPTER = "peft.tuners.tuners_utils.BaseTunerLayer"


class Choice:
    """How a module runs: its layers by their rules, or all of it as one layer.

    Args:
        module: The module.
        name: Its name in the model.
        is_one: Whether it runs as one layer; None where its first forward shows it.
        ranks: Run the module together.

    Raises:
        UnsupportedError: It is to run as one layer and cannot.
    """

    def __init__(self, module: nn.Module, name: str, *, is_one: bool | None, ranks: Ranks) -> None:
        self._module, self._name, self._ranks = module, name, ranks
        self.is_one = is_one
        self.inside = {one for one in module.modules() if one is not module}
        """The modules in it."""

        if is_one:
            self._refuse_shards_inside()

        self.ruled: Collection[nn.Parameter] = ()
        """Parameters of layers that have a rule."""

    def run(self, layer: nn.Module, receive: Receive, *inputs: Any, **named: Any) -> Any:
        """Run the module, which is patched.

        Raises:
            UnsupportedError: It is to run as one layer and cannot.
        """
        if self.is_one:
            return self._run_as_one(layer, receive, *inputs, **named)
        given = _tensors_in((inputs, named))
        versions = versions_of(given)
        assert isinstance(layer, PatchedLayer)
        own = trained_in(layer).values()
        with parametrizing_safely(), _LinearSeen(own, receive) as seen:
            returned = layer.original.forward(layer, *inputs, **named)
        if self.is_one is None and torch.is_grad_enabled():
            self._decide(_tensors_in(returned), given)
            if self.is_one is False and not seen.has_run:
                unpatch_layer(layer)  # its layers do without it
            if self.is_one:
                if versions_of(given) != versions:
                    self._refuse("changes its inputs in place")
                if _is_checkpointed():
                    self._refuse("is checkpointed, so what it does shows too late")
                return self._run_as_one(layer, receive, *inputs, **named)
        return returned

    def _refuse_shards_inside(self) -> None:
        if any(map(is_sharded_alone, self.inside)):
            raise UnsupportedError(
                f"{self._name} runs as one layer, and fully_shard shards modules in it by "
                "themselves, whose parameters are not there where it runs again; shard it whole, "
                "or with more around it"
            )

    def _run_as_one(self, layer: nn.Module, receive: Receive, *inputs: Any, **named: Any) -> Any:
        self._refuse_shards_inside()
        held = next(filter(is_quantized, layer.modules()), None)
        if held is not None:  # whose product torch.func cannot transform
            raise UnsupportedError(
                f"{self._name} computes with its parameters in a way that no rule knows, and with "
                f"the quantised weight of a {type(held).__name__}; use plain LoRA there, or a base "
                "that is not quantised"
            )
        return run_any_layer(layer, receive, *inputs, **named)

    def _refuse(self, why: str) -> None:
        self.is_one = None
        raise UnsupportedError(
            f"{self._name} computes with its parameters in a way that no rule knows, and {why}; "
            f"name it in as_one=[{self._name!r}], or freeze its parameters"
        )

    def _decide(self, returned: Collection[Tensor], given: Collection[Tensor]) -> None:
        """Look at how parameters were used between what the module got and what it returned."""
        until = {one.grad_fn for one in given if one.grad_fn is not None}
        nodes = list(nodes_behind(*returned, until=until))
        users = find_users(nodes)
        own = self._ranks.own
        trained = {own(p) for p in self._module.parameters() if p.requires_grad}
        leaves = [one for one in nodes if hasattr(one, "variable")]
        uses = [one for one in leaves if own(one.variable) in trained]
        if uses:
            is_one = any(self._is_unseen(one, users) for one in uses)
            # One sample alone, as on a rank without any, does not show what enters for all.
            shows = any(len(one) > 1 for one in given if one.dim())
            has_one, any_shows = self._ranks.any(is_one and shows, shows)
            self.is_one = has_one if any_shows else is_one

    def _is_unseen(self, leaf: Any, users: Mapping[Any, list[tuple[Any, int]]]) -> bool:
        """Tell whether a parameter is used otherwise than by its rule, or for all samples."""
        entries, others = follow(leaf, users, lambda _: Rows.in_order(1, 0))
        return bool(others - {LOSSES}) or (
            bool(entries) and self._ranks.own(leaf.variable) in self.ruled
        )


def _is_checkpointed() -> bool:
    """Tell whether a checkpoint will run this code again."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _tensors_in(values: Any) -> list[Tensor]:
    return [one for one in pytree.tree_leaves(values) if isinstance(one, Tensor)]


class _LinearSeen(TorchFunctionMode):
    """Runs ``functional.linear`` with a module's own parameters by the rule of linear layers."""

    def __init__(self, own: Collection[nn.Parameter], receive: Receive) -> None:
        super().__init__()
        self._own, self._receive = {id(one) for one in own}, receive
        self.has_run = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and self._is_own(*args, **kwargs):
            self.has_run = True
            return multiply(*args, **kwargs, receive=self._receive)
        return func(*args, **kwargs)

    def _is_own(
        self,
        input: Tensor,  # noqa: A002, ARG002 (torch's)
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> bool:
        return id(weight) in self._own and (bias is None or id(bias) in self._own)


def find_choices(
    model: nn.Module,
    rules: dict[nn.Module, Found],
    declared: Collection[str],
    ranks: Ranks,
) -> dict[nn.Module, Choice]:
    """Find the modules that may have to run as one layer, and those that are declared to.

    Args:
        model: The model.
        rules: The rule of each layer; those of layers that turn out to be such modules, or to
            belong to one alone, are taken out.
        declared: Names of modules, with wildcards.
        ranks: Run the model together.

    Raises:
        UnsupportedError: A declared module cannot run as one layer.
        ValueError: A name fits no module.
    """
    names = {module: name for name, module in model.named_modules()}
    choices: dict[nn.Module, Choice] = {}
    for pattern in declared:
        fitting = [one for one, name in names.items() if fnmatch.fnmatch(name, pattern)]
        if not fitting:
            raise ValueError(f"as_one has {pattern!r}, which no module of the model is named")
        for module in fitting:
            rules.pop(module, None)
            choices[module] = Choice(module, names[module], is_one=True, ranks=ranks)
    modules = dict(model.named_modules(remove_duplicate=False))
    ruled = {ranks.own(p) for layer in rules for p in trained_in(layer).values()}
    for name, module in modules.items():
        owner = _find_owner(module, [modules[one] for one in _enclosing(name)], rules)
        if owner is not None and "forward" not in vars(owner):
            choices.setdefault(owner, Choice(owner, names[owner], is_one=None, ranks=ranks))
    for choice in choices.values():
        choice.ruled = ruled
    return choices


def _enclosing(name: str) -> Iterator[str]:
    """Yield the names of the modules around one, from the inside."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _find_owner(
    module: nn.Module, around: Sequence[nn.Module], rules: dict[nn.Module, Found]
) -> nn.Module | None:
    """Return the module whose forward uses a module's parameters otherwise than by its rule.

    None where the module has a rule, and likely no other code uses its parameters.
    """
    found = rules.get(module)
    trained = trained_in(module)
    if not trained:
        return None
    # The outermost: one adapter of experts may change another's weights while it runs.
    adapter = next((one for one in reversed(around) if _is_adapter(one)), None)
    is_any = found is not None and found.rule is run_any_layer
    if is_any and (adapter or _names_linear(module) or _takes_nothing(module)):
        del rules[module]
    if adapter is not None:
        return adapter
    if is_any and _takes_nothing(module):
        return None  # what it returns has no samples yet
    runs = (one for one in (module, *around) if _has_forward(one))
    if found is None or module not in rules:
        return next(runs, None)
    is_by_channel = isinstance(module, nn.Conv1d) and module.groups > 1
    return next((one for one in runs if one is not module), None) if is_by_channel else None


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _takes_nothing(layer: nn.Module) -> bool:
    """Tell whether a layer computes something from its parameters alone, as Swin's biases do."""
    return len(inspect.signature(type(layer).forward).parameters) == 1


def _names_linear(layer: nn.Module) -> bool:
    """Tell whether the code of a layer without a rule names ``linear``, as that of routers does."""
    code = getattr(inspect.unwrap(type(layer).forward), "__code__", None)
    return code is not None and "linear" in code.co_names


def _is_adapter(module: nn.Module) -> bool:
    """Tell whether a module is one that peft puts around a layer."""
    bases = type(module).__mro__
    return any(f"{base.__module__}.{base.__qualname__}" == _ADAPTER for base in bases)
