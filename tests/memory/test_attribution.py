"""Who is believed, and that a wrong label does not pass."""

from typing import ClassVar

import pytest
import torch
from memory_steps import B, P, at_end_of, keep
from torch import nn

from dpprof.experiments.config import registry
from dpprof.predict.memory.events import Storage
from dpprof.predict.memory.owners import find_owner
from dpprof.private.allocation_marks import components_by_code
from dpprof.subjects.methods.opacus.hooks import OpacusHooks
from dpprof.subjects.methods.opacus.opacus_paths import OpacusPath


def make_noise() -> None:
    """Stands for a function that a method declares."""


NOISE = make_noise.__code__
NORMS = {"sampler": OpacusPath.NORM_SAMPLER, "shape": (2, 5, 5)}
BOTH, SEEN = {"roles": {"gradients", "summed_gradients"}}, {"code": NOISE, "roles": {"noise"}}
HOOKED = {"module": "a", "roles": {"dp_activations"}}
ADAM = {"phase": "step", "function": "torch.optim.adam:_adam"}
SAVED, TEMPORARY = {"saved": True}, {"temporary": True}
OWNERS = {
    "a role is identity": ({"roles": {"gradients"}}, {}, "gradients", "identity"),
    "the stronger role": (BOTH, {}, "summed_gradients", "identity"),
    "saved": ({"phase": "forward", "module": "head"}, SAVED, "saved_activations", "identity"),
    "saved outside the model": ({"phase": "forward"}, SAVED, "logits_and_loss", "identity"),
    "held by autograd and a hook": (HOOKED, SAVED, "saved_activations", "identity"),
    "held by a hook alone": (HOOKED, {}, "dp_activations", "identity"),
    "a declared function": ({"code": NOISE}, {}, "noise", "birthplace"),
    "a declared function, seen in that role": (SEEN, {}, "noise", "identity"),
    "a square product of a norm sampler": (NORMS, {}, "gram_matrices", "birthplace"),
    "a square copy is no Gram matrix": (NORMS | {"op": "clone"}, {}, "workspace", "birthplace"),
    "an autograd node": ({"node": "MmBackward0"}, {}, "output_gradients", "birthplace"),
    "backward and nothing more": ({}, {}, "output_gradients", "phase"),
    "a library call that gives all back": (ADAM, TEMPORARY, "workspace", "birthplace"),
    "a library call that keeps something": (ADAM, {}, "unattributed", None),
    "setup and nothing more": ({"phase": "setup"}, TEMPORARY, "unattributed", None),
}


@pytest.mark.parametrize("case", OWNERS)
def test_owners_by_hand(case) -> None:
    facts, state, component, evidence = OWNERS[case]
    storage = Storage(**{"nbytes": 100, "op": "bmm", "phase": "backward", "module": None} | facts)
    births = components_by_code({make_noise: "noise"})
    found = find_owner(storage, births, **{"saved": False, "temporary": False} | state)

    assert found == (component, evidence)


class Unknown(OpacusHooks):
    """A third party's method: it declares nothing, and keeps things on parameters."""

    attributes: ClassVar = {}
    births: ClassVar = {}


def test_an_undeclared_method_gets_sensible_owners(monkeypatch) -> None:
    monkeypatch.setattr(registry, "load", lambda *_: Unknown)
    step = keep("opacus-hooks")

    assert at_end_of(step, "backward")["per_sample_gradients"] == B * P * 4
    assert at_end_of(step, "clip")["summed_gradients"] == P * 4


def test_watching_leaves_nothing_behind() -> None:
    before = len(nn.modules.module._global_forward_hooks)
    keep("opacus-ghost")

    assert len(nn.modules.module._global_forward_hooks) == before
    assert torch._C._len_torch_dispatch_stack() == 0
