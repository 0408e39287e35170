"""Batches of any structure are split by samples, leaf by leaf."""

import copy
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from dpprof.private.samples.batches import find_sizes, find_whole, move, take

B = 4
ROWS = torch.arange(B * 3.0).view(B, 3)
WEIGHTS = torch.ones(7)
Pair = namedtuple("Pair", "x y")  # noqa: PYI024 (as users write them)


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    weights: Tensor
    name: str = "digits"


@dataclass(slots=True)
class Slotted:
    x: Tensor
    names: list


class Graphs:
    """An object of a user's class, with a method and several tensors."""

    def __init__(self) -> None:
        self.x, self.weights, self.nested = ROWS, WEIGHTS, {"names": list("abcd")}

    def sum(self) -> Tensor:
        return self.x.sum()


def is_taken(found, at) -> bool:
    return torch.equal(found, ROWS[at])


@pytest.mark.parametrize("at", [[2], [3, 0], [], [1, 1, 1, 1]])
@pytest.mark.parametrize(
    ("batch", "read"),
    [
        (ROWS, lambda one: one),
        ({"a": {"x": ROWS}, "y": 3}, lambda one: one["a"]["x"]),
        (OrderedDict(x=ROWS, w=WEIGHTS), lambda one: one["x"]),
        (UserDict(x=ROWS), lambda one: one["x"]),
        (MappingProxyType({"x": ROWS}), lambda one: one["x"]),
        (Pair(ROWS, None), lambda one: one.x),
        ((ROWS, [ROWS, {"z": "text"}]), lambda one: one[1][0]),
        (Frozen(ROWS, WEIGHTS), lambda one: one.x),
        (Slotted(ROWS, list("abcd")), lambda one: one.x),
        (SimpleNamespace(x=ROWS), lambda one: one.x),
        (Graphs(), lambda one: one.x),
        (ROWS.numpy(), torch.from_numpy),
    ],
)
def test_every_structure_is_split_and_stays_what_it_is(batch, read, at) -> None:
    before = copy.deepcopy(batch) if not isinstance(batch, MappingProxyType) else None
    found = take(batch, B, at)

    assert is_taken(read(found), at)
    assert type(found) is type(batch) or isinstance(batch, MappingProxyType)
    if before is not None:
        assert torch.equal(torch.as_tensor(read(batch)), torch.as_tensor(read(before)))


def test_lists_of_samples_are_split_and_the_rest_is_kept() -> None:
    boxes = [{"box": torch.rand(n, 4)} for n in (1, 5, 2, 3)]
    words = [torch.rand(n) for n in (2, 3, 1, 5)]
    lists = {"s": ("a", "b", "c", "d"), "n": [1, 2, 3, None], "t": boxes, "w": words}
    others = {"size": (2, 3), "all": WEIGHTS, "none": None, "one": torch.tensor(1.0)}
    found = take(lists | others, B, [3, 1])

    assert found["s"] == ("d", "b")
    assert found["n"] == [None, 2]
    assert found["size"] == (2, 3)
    assert found["t"] == [boxes[3], boxes[1]]
    assert [len(one) for one in found["w"]] == [5, 3]
    assert found["all"] is WEIGHTS
    assert (found["none"], found["one"]) == (None, 1)


def test_a_packed_sequence_is_split_by_its_samples() -> None:
    sequences = [torch.rand(n, 2) for n in (1, 4, 2, 3)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    rows, lengths = pad_packed_sequence(take((packed,), B, [3, 1])[0], batch_first=True)

    assert lengths.tolist() == [3, 4]
    assert torch.equal(rows[0, :3], sequences[3])
    assert torch.equal(rows[1], sequences[1])


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        (({"pair": [ROWS[:2], ROWS[:2]]},), r"batch\[0\]\['pair'\]"),
        ((Pair(1, [ROWS[:2], ROWS[2:]]),), r"batch\[0\]\[1\]"),
        ((SimpleNamespace(t=(ROWS[:2], np.ones(2))),), r"batch\[0\]\.t"),
        ((1, [{"x": ROWS[:2]}, {"y": ROWS[:2]}]), r"batch\[1\]"),
    ],
)
def test_a_list_that_may_be_read_in_two_ways_is_refused_by_its_path(batch, path) -> None:
    with pytest.raises(ValueError, match=path + " has 2 entries that are as long as"):
        take(batch, 2, [0])


def test_what_belongs_to_all_samples_is_named() -> None:
    batch = {"x": ROWS, "g": [Frozen(ROWS, WEIGHTS), torch.tensor(1.0)]}
    assert list(find_whole(batch, B)) == ["batch['g'][0].weights"]
    assert set(find_sizes(batch)) == {B, 7, 2}  # a list of two may be one of samples


class Attributes(dict):
    """A dictionary by attributes, which raises another error than a missing attribute does."""

    __getattr__ = dict.__getitem__


class Store(MutableMapping):
    """A mapping that keeps what it has in a dictionary, which a shallow copy shares."""

    def __init__(self, **own) -> None:
        self.own = own

    def __getitem__(self, key):
        return self.own[key]

    def __setitem__(self, key, value) -> None:
        self.own[key] = value

    def __delitem__(self, key) -> None:
        del self.own[key]

    def __iter__(self):
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)


@pytest.mark.parametrize("kind", [Attributes, Store, lambda **own: MappingProxyType(own)])
def test_a_mapping_is_split_and_stays_as_it_was(kind) -> None:
    batch = kind(x=torch.arange(3), y={"z": torch.ones(3, 2)})
    taken = take(batch, 3, [2])

    assert type(taken) is type(batch)
    assert (taken["x"].tolist(), taken["y"]["z"].shape) == ([2], (1, 2))
    assert (batch["x"].tolist(), batch["y"]["z"].shape) == ([0, 1, 2], (3, 2))


def test_tensors_move_wherever_they_are() -> None:
    batch = {"a": Store(x=torch.ones(2)), "b": (torch.ones(3), 3), "c": "text"}
    moved = move(batch, torch.device("meta"))

    assert moved["a"]["x"].device.type == moved["b"][0].device.type == "meta"
    assert (moved["b"][1], moved["c"]) == (3, "text")
    assert batch["a"]["x"].device.type == "cpu"
