"""Several optimizers of one model as one: they step together, on one draw of noise."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dpprof.private.errors import refuse_other_class
from dpprof.private.noise.inner_optimizers import refuse_optimizer
from dpprof.private.noise.schedules import NOISY


@dataclass
class _Member:
    """An optimizer, and what refuses its own steps while it is joined."""

    optimizer: Optimizer
    hook: RemovableHandle | None = None


class JoinedOptimizers(Optimizer):
    """Optimizers that step together, each on its own parameters.

    Groups and states are those of the members, so that a learning rate schedule of one of them,
    or of all, works as before. ``ValueError``: there are none, a parameter is in two, one is in
    another private training, or noise cannot be put inside of one (``refuse_optimizer``).
    """

    _is_made = False

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers:
            raise ValueError("optimizer is an empty list; give the optimizers of the model")
        owners: dict[Any, int] = {}
        for at, member in enumerate(optimizers):
            refuse_optimizer(member)
            if hasattr(member, NOISY):
                raise ValueError(
                    f"optimizer {at} is part of another private training; end that by remove()"
                )
            for parameter in (p for group in member.param_groups for p in group["params"]):
                if owners.setdefault(parameter, at) != at:
                    raise ValueError(
                        f"a parameter of shape {tuple(parameter.shape)} is in optimizers "
                        f"{owners[parameter]} and {at}, which would both step on its gradient; "
                        "leave it in one of them"
                    )
        self._members = [_Member(member) for member in optimizers]
        self._is_stepping = False
        super().__init__([torch.empty(0)], {})  # which the members' groups replace
        self._is_made = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all members, in their order."""
        return [group for member in self._members for group in member.optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, _: Any) -> None:
        """Keep the members' own."""

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The states of all members, by parameter."""
        states = (member.optimizer.state.items() for member in self._members)
        return defaultdict(dict, chain.from_iterable(states))

    @state.setter
    def state(self, _: Any) -> None:
        """Keep the members' own."""

    def attach(self) -> None:
        """Let members step as a part of this one's step alone."""
        for member in self._members:
            member.hook = member.optimizer.register_step_pre_hook(self._refuse_alone)
            setattr(member.optimizer, NOISY, self)  # of which schedules ask for the last part

    def detach(self) -> None:
        """Let members step alone again."""
        for member in self._members:
            if member.hook is not None:
                member.hook.remove()
                member.hook = None
                delattr(member.optimizer, NOISY)

    @property
    def is_last_part(self) -> bool:
        """Whether the part at hand is the last one of its batch, for the members' schedules."""
        return bool(getattr(getattr(self, NOISY, None), "is_last_part", True))

    def _refuse_alone(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_stepping:
            raise RuntimeError(
                f"{type(optimizer).__name__} was asked to step alone, and its gradients have no "
                "noise; call step() of the optimizer that make_private returned, which steps all"
            )

    def step(self) -> None:  # type: ignore[override]  # there is never a closure
        """Step on all gradients, which have noise."""
        self._is_stepping = True
        try:
            for member in self._members:
                member.optimizer.step()
        finally:
            self._is_stepping = False

    def add_param_group(self, _: dict[str, Any]) -> None:
        """Refuse a group, which does not say whose it is."""
        if self._is_made:
            raise RuntimeError(
                "a group of parameters is added to one optimizer, and these are several: call "
                "add_param_group of the one that is to step on it"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the members' states, in their order."""
        return {"optimizers": [member.optimizer.state_dict() for member in self._members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the members' states, or raise (``ValueError``) and change nothing."""
        states, before = state_dict.get("optimizers", []), self.state_dict()["optimizers"]
        if len(states) != len(self._members):
            raise ValueError(
                f"this state is of {len(states) or 'no'} joined optimizers, and there are "
                f"{len(self._members)}"
            )
        try:
            for member, state in zip(self._members, states, strict=True):
                member.optimizer.load_state_dict(state)
        except BaseException:
            for member, state in zip(self._members, before, strict=True):
                member.optimizer.load_state_dict(state)
            raise


def join_optimizers(optimizers: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """Return an optimizer as it is, and several as one; refuse others (``TypeError``)."""
    if isinstance(optimizers, list | tuple):
        return JoinedOptimizers(optimizers)
    refuse_other_class("optimizer", optimizers, Optimizer)
    assert isinstance(optimizers, Optimizer)
    return optimizers
