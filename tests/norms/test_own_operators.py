"""Every operator that the package registers is one to PyTorch: in autograd, modes and versions.

Triton's interpreter runs the kernels, in a process of its own.
"""

import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import dpprof
from dpprof.private.noise import noise
from dpprof.private.norms import triton_ops

SOURCES = Path(dpprof.__file__).parent


def draw_examples():
    """Return arguments for each operator, by its name."""
    x, g = torch.randn(3, 20, 8), torch.randn(3, 20, 5)
    per_token = torch.rand(3, 20)
    long_sum = torch.zeros(noise.DRAWN_IN_TURN + 7)
    states = noise.draw_states(2, long_sum.device, torch.Generator().manual_seed(1))
    words = [torch.arange(1, 41, dtype=torch.int32), torch.arange(7, dtype=torch.int32)]
    logits, labels = torch.randn(6, 11), torch.arange(6)
    return {
        "gram_squares": (x, g),
        "product_squares": (x, g),
        "scale_gradients": (x, x.clone(), per_token, per_token + 1, True),
        "weigh": (x, torch.rand(3)),
        "differentiate_cross_entropy_": (logits, labels, torch.ones(6), -100, 0.0, 1.0, None),
        "add_noise_": (torch.zeros(40), torch.ones(2, dtype=torch.int64), 2, 1.0, 0.5),
        "digest_": (torch.zeros(2, dtype=torch.int64), words, torch.arange(5000)),
        "add_noise_in_threads_": (long_sum, states, noise.make_room(2, long_sum), 1.0, 0.5),
    }


EXAMPLES = draw_examples()
ON_A_GPU = {name for name in EXAMPLES if hasattr(triton_ops, name)}


def find_operator(name):
    return getattr(torch.ops.dpprof, name).default


def count_changes(name, given):
    """Run an operator; return how often its tensors' versions changed."""
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    before = [one._version for one in tensors]
    find_operator(name)(*given)
    return [one._version - old for one, old in zip(tensors, before, strict=True)]


def declared_changes(name, given):
    """Return 1 for each tensor that the operator says it changes, and 0 for the others."""
    pairs = zip(find_operator(name)._schema.arguments, given, strict=True)
    is_written = [one.is_write for one, value in pairs if isinstance(value, torch.Tensor)]
    assert any(is_written) == name.endswith("_")
    return [int(one) for one in is_written]


def examine(name):
    """Return what ``opcheck`` says, versions' changes, and whether inference changes a result."""
    verdict = torch.library.opcheck(
        find_operator(name), draw_examples()[name], raise_exception=False
    )
    torch.manual_seed(0)
    given = draw_examples()[name]
    changes = count_changes(name, given)
    torch.manual_seed(0)
    with torch.inference_mode():
        again = draw_examples()[name]
        find_operator(name)(*again)
    is_same = torch.equal(given[0], again[0])
    return {key: str(said) for key, said in verdict.items()}, changes, is_same


def test_every_operator_of_the_package_has_an_example() -> None:
    names = {
        one.removeprefix("dpprof::")
        for one in torch._C._dispatch_get_all_op_names()
        if one.startswith("dpprof::")
    }
    assert names == set(EXAMPLES)


def test_operators_are_defined_in_one_way() -> None:
    used = {
        name
        for path in SOURCES.rglob("*.py")
        for name in re.findall(r"torch\.library\.(\w+)", path.read_text(encoding="utf-8"))
    }
    assert used == {"custom_op"}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_pytorch_finds_nothing_wrong_with_an_operator(interpreting, name) -> None:
    if name in ON_A_GPU:
        pytest.importorskip("triton", reason="the extra dpprof[triton] is not installed")
    verdict, changes, is_same_in_inference = interpreting(examine, name)

    assert set(verdict.values()) == {"SUCCESS"}, verdict
    assert changes == declared_changes(name, EXAMPLES[name])
    assert is_same_in_inference


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_versions_of_fake_tensors_change_as_those_of_real_ones(name) -> None:
    with FakeTensorMode() as mode:
        given = tree_map_only(torch.Tensor, mode.from_tensor, EXAMPLES[name])
        assert count_changes(name, given) == declared_changes(name, given)
