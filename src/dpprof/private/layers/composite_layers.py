"""Runs modules that use parameters in ways that no rule sees as one layer each.

A module may compute with parameters of its own beside its layers, or with a layer's weight without
calling the layer: adapters, mixers of state-space models, routers. Where such parameters only enter
for all samples (``broadcasts``), or multiply by ``functional.linear``, the layers inside run by
their rules, which is cheaper. Otherwise the module as a whole runs as a layer without a rule.

Its first forward decides: the graph of what it returned shows each use of its parameters. If a
later forward uses them otherwise, backward refuses that. Under ``fully_shard`` ranks decide
together. ``as_one`` of ``Clipping`` declares modules whose graph shows nothing, such as those that
give their layers tokens in the order of experts.
"""

import fnmatch
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpprof.private.contributions.contributions import Receive
from dpprof.private.errors import UnsupportedError
from dpprof.private.graph.broadcasts import LOSSES, follow
from dpprof.private.graph.nodes import find_users, is_leaf, nodes_behind
from dpprof.private.graph.rows import Rows
from dpprof.private.layers.layers import multiply
from dpprof.private.layers.layers_without_rule import run_any_layer, versions_of
from dpprof.private.layers.patching import PatchedLayer, unpatch_layer
from dpprof.private.layers.quantized_layers import is_quantized
from dpprof.private.layers.reruns import parametrizing_safely
from dpprof.private.layers.rules import Found
from dpprof.private.ranks.ranks import Ranks, is_sharded_alone
from dpprof.private.refusals.coverage import class_names, trained_in

_ADAPTER = "peft.tuners.tuners_utils.BaseTunerLayer"


class Choice:
    """How a module runs: its layers by their rules, or all of it as one layer.

    ``is_one`` tells whether it runs as one layer; None where its first forward shows it. ``ranks``
    run the module together. ``UnsupportedError`` if it is to run as one layer and cannot.
    """

    def __init__(self, module: nn.Module, name: str, *, is_one: bool | None, ranks: Ranks) -> None:
        self._module, self._name, self._ranks = module, name, ranks
        self.is_one = is_one
        self.inside = {inner for inner in module.modules() if inner is not module}
        """The modules in it."""

        self.ruled: Collection[nn.Parameter] = ()  # parameters of layers that have a rule
        if is_one:
            self._refuse_shards_inside()

    def run(self, layer: nn.Module, receive: Receive, *inputs: Any, **named: Any) -> Any:
        """Run the module, which is patched; ``UnsupportedError`` as for the class."""
        if self.is_one:
            return self._run_as_one(layer, receive, *inputs, **named)
        # The module runs as it is, and the graph of what it returns shows how it is to run. Its
        # calls of ``linear`` with its own parameters run by a rule, so the graph shows none.
        tensors = _tensors_in((inputs, named))
        versions = versions_of(tensors)
        assert isinstance(layer, PatchedLayer)
        own = trained_in(layer).values()
        with parametrizing_safely(), _LinearSeen(own, receive) as seen:
            returned = layer.original.forward(layer, *inputs, **named)
        if self.is_one is None and torch.is_grad_enabled():
            self._decide(_tensors_in(returned), tensors)
            # Rules of the layers in it see every use: it needs no patch. With calls of ``linear``
            # it keeps the patch, and looks at no graph any more.
            if self.is_one is False and not seen.has_run:
                unpatch_layer(layer)
            # What the layers in it contributed to this graph is dropped with it: the module runs a
            # second time. That needs the same inputs; and a checkpoint, which runs it once in
            # backward, would find other saved tensors.
            if self.is_one:
                if versions_of(tensors) != versions:
                    self._refuse("changes its inputs in place")
                hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
                if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
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

    def _decide(self, returned: Collection[Tensor], inputs: Collection[Tensor]) -> None:
        """Look at how parameters were used between what the module got and what it returned."""
        until = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
        nodes = list(nodes_behind(*returned, until=until))
        users = find_users(nodes)
        own = self._ranks.own
        trained = {own(p) for p in self._module.parameters() if p.requires_grad}
        uses = [node for node in nodes if is_leaf(node) and own(node.variable) in trained]
        if uses:
            is_one = any(self._is_unseen(leaf, users) for leaf in uses)
            # A rank with a single sample cannot tell what enters for all samples: others decide.
            shows = any(len(tensor) > 1 for tensor in inputs if tensor.dim())
            has_one, any_shows = self._ranks.any(is_one and shows, shows)
            self.is_one = has_one if any_shows else is_one

    def _is_unseen(self, leaf: Any, users: Mapping[Any, list[tuple[Any, int]]]) -> bool:
        """Tell whether code uses a parameter in a way that neither rules nor ``broadcasts`` see."""
        # Which rows samples have is not known inside of a module, and ``broadcasts`` looks again.
        entries, others = follow(leaf, users, lambda _: Rows.in_order(1, 0))
        # A layer's own parameter may not enter for all samples beside its rule.
        is_beside_rule = bool(entries) and self._ranks.own(leaf.variable) in self.ruled
        return is_beside_rule or bool(others - {LOSSES})


def _tensors_in(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


class _LinearSeen(TorchFunctionMode):
    """Runs ``functional.linear`` with a module's own parameters by the rule of linear layers."""

    def __init__(self, own: Collection[nn.Parameter], receive: Receive) -> None:
        super().__init__()
        self._own, self._receive = {id(parameter) for parameter in own}, receive
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
    model: nn.Module, rules: dict[nn.Module, Found], declared: Collection[str], ranks: Ranks
) -> dict[nn.Module, Choice]:
    """Find the modules that may have to run as one layer, and those that are declared to.

    Names that are ``declared`` may have wildcards; ``ValueError`` if one fits no module. The rules
    of layers that such a module runs are taken out of ``rules``.

    Raises:
        UnsupportedError: A declared module cannot run as one layer.
    """
    names = {module: name for name, module in model.named_modules()}
    choices: dict[nn.Module, Choice] = {}
    for pattern in declared:
        fitting = [module for module, name in names.items() if fnmatch.fnmatch(name, pattern)]
        if not fitting:
            raise ValueError(f"as_one has {pattern!r}, which no module of the model is named")
        for module in fitting:
            rules.pop(module, None)
            choices[module] = Choice(module, names[module], is_one=True, ranks=ranks)
    modules = dict(model.named_modules(remove_duplicate=False))
    ruled = {ranks.own(p) for layer in rules for p in trained_in(layer).values()}
    for name, module in modules.items():
        path = name.split(".") if name else []
        around = [modules[".".join(path[:depth])] for depth in reversed(range(len(path)))]
        owner = _find_owner(module, around, rules)
        if owner is not None and "forward" not in vars(owner):
            choices.setdefault(owner, Choice(owner, names[owner], is_one=None, ranks=ranks))
    for choice in choices.values():
        choice.ruled = ruled
    return choices


def _find_owner(
    module: nn.Module, around: Sequence[nn.Module], rules: dict[nn.Module, Found]
) -> nn.Module | None:
    """Return the module whose forward may use a module's parameters otherwise than by its rule.

    None where the module has a rule, and likely no other code uses its parameters. ``around`` are
    the modules around it, from the inside. The rule of a layer which another module runs is taken
    out of ``rules``.
    """
    if not trained_in(module):
        return None
    # The outermost: one adapter of experts may change another's weights while it runs.
    adapter = next((outer for outer in reversed(around) if _ADAPTER in class_names(outer)), None)
    has_rule = module in rules
    if has_rule and rules[module].rule is run_any_layer:
        forward = type(module).forward
        # Some layers compute from their parameters alone, as Swin's biases do.
        takes_nothing = len(inspect.signature(forward).parameters) == 1
        code = getattr(inspect.unwrap(forward), "__code__", None)
        # Routers call ``linear`` with a weight of theirs, which runs by the rule of linear layers.
        names_linear = code is not None and "linear" in code.co_names
        if adapter is not None or takes_nothing or names_linear:
            del rules[module]
            has_rule = False
        if adapter is None and takes_nothing:
            return None  # what it returns has no samples yet
    if adapter is not None:
        return adapter
    runs = [m for m in (module, *around) if type(m).forward is not nn.Module.forward]
    if not has_rule:
        return next(iter(runs), None)
    # Code of state-space models reads the weight of such a convolution without calling it.
    is_by_channel = isinstance(module, nn.Conv1d) and module.groups > 1
    return next((m for m in runs if m is not module), None) if is_by_channel else None
