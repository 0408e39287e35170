"""Who is believed, and that a wrong label does not pass."""

from typing import ClassVar

import pytest
import torch
from memory_steps import B, P, at_end_of, at_peak, keep
from torch import nn

from dpprof.memory.events import Storage
from dpprof.memory.owners import Owner, find_owner
from dpprof.methods.opacus.hooks import OpacusHooks
from dpprof.methods.opacus.opacus_paths import OpacusPath
from dpprof.records.births import components_by_code
from dpprof.spec import registry


def storage(phase: str = "backward", **facts) -> Storage:
    made = Storage(100, "mm", phase, facts.pop("module", None))
    for name, value in facts.items():
        setattr(made, name, value)
    return made


def make_noise() -> None:
    """Stands for a function that a method declares."""


def owner(made: Storage, *, saved: bool = False, temporary: bool = False) -> Owner:
    births = components_by_code({make_noise: "noise"})
    return find_owner(made, births, saved=saved, temporary=temporary)


OWNERS = {
    "a role is identity": (storage(roles={"gradients"}), {}, ("gradients", "identity")),
    "the stronger role": (
        storage(roles={"gradients", "summed_gradients"}),
        {},
        ("summed_gradients", "identity"),
    ),
    "saved": (
        storage("forward", module="head"),
        {"saved": True},
        ("saved_activations", "identity"),
    ),
    "saved outside the model": (
        storage("forward"),
        {"saved": True},
        ("logits_and_loss", "identity"),
    ),
    "held by autograd and a hook": (
        storage("forward", module="a", roles={"dp_activations"}),
        {"saved": True},
        ("saved_activations", "identity"),
    ),
    "held by a hook alone": (
        storage("forward", module="a", roles={"dp_activations"}),
        {},
        ("dp_activations", "identity"),
    ),
    "a declared function": (storage(code=make_noise.__code__), {}, ("noise", "birthplace")),
    "a declared function, seen in that role": (
        storage(code=make_noise.__code__, roles={"noise"}),
        {},
        ("noise", "identity"),
    ),
    "a square product of a norm sampler": (
        storage(sampler=OpacusPath.NORM_SAMPLER, op="bmm", shape=(2, 5, 5)),
        {},
        ("gram_matrices", "birthplace"),
    ),
    "a square copy is no Gram matrix": (
        storage(sampler=OpacusPath.NORM_SAMPLER, op="clone", shape=(2, 5, 5)),
        {},
        ("workspace", "birthplace"),
    ),
    "an autograd node": (storage(node="MmBackward0"), {}, ("output_gradients", "birthplace")),
    "backward and nothing more": (storage(), {}, ("output_gradients", "phase")),
    "a library call that gives all back": (
        storage("step", function="torch.optim.adam:_adam"),
        {"temporary": True},
        ("workspace", "birthplace"),
    ),
    "a library call that keeps something": (
        storage("step", function="torch.optim.adam:_adam"),
        {},
        ("unattributed", None),
    ),
    "setup and nothing more": (storage("setup"), {"temporary": True}, ("unattributed", None)),
}


@pytest.mark.parametrize("case", OWNERS)
def test_owners_by_hand(case) -> None:
    made, state, expected = OWNERS[case]
    made.op = made.op or "mm"

    assert owner(made, **state) == expected


def test_a_wrong_label_breaks_a_known_answer(monkeypatch) -> None:
    """Were per-sample gradients called noise, the sum would still be right; this would not."""
    wrong = dict.fromkeys(OpacusHooks.births, "noise")
    monkeypatch.setattr(OpacusHooks, "births", wrong)
    step = keep("opacus-hooks")

    assert sum(at_peak(step).values()) == step.peak_bytes
    assert at_end_of(step, "backward")["per_sample_gradients"] != B * P * 4


class Unknown(OpacusHooks):
    """A third party's method: it declares nothing, and keeps things on parameters."""

    attributes: ClassVar = {}
    births: ClassVar = {}


def test_an_undeclared_method_gets_sensible_owners(monkeypatch) -> None:
    load = registry.load
    monkeypatch.setattr(
        registry,
        "load",
        lambda group, name: Unknown if name == "opacus-hooks" else load(group, name),
    )
    step = keep("opacus-hooks")

    assert at_end_of(step, "backward")["per_sample_gradients"] == B * P * 4
    assert at_end_of(step, "clip")["summed_gradients"] == P * 4


def test_watching_leaves_nothing_behind() -> None:
    before = len(nn.modules.module._global_forward_hooks)
    keep("opacus-ghost")

    assert len(nn.modules.module._global_forward_hooks) == before
    assert torch._C._len_torch_dispatch_stack() == 0
