"""Noise is bound to what it hides: other sums get independent noise, whatever is resumed."""

import copy
import itertools
import math
import os
import random

import pytest
import torch
from small_models import batch, build, private
from torch import nn

from dpprof.private import BookKeeping, NoisyOptimizer
from dpprof.private.capture import step_graphs
from dpprof.private.noise import digest, noise, noise_keys
from dpprof.private.noise.digest import LANES, hash_words
from dpprof.private.noise.noise import NoiseOfStep
from dpprof.private.noise.noise_keys import NoiseKeys, make_generator
from dpprof.private.norms import triton_ops

N = 2**17


def draw(keys: NoiseKeys, summed: torch.Tensor, step: int = 1) -> torch.Tensor:
    """Return the noise of a step on a sum, in float64."""
    keys.begin(step, [summed], 1.0)
    noised = summed.clone()
    NoiseOfStep(1.0, 1.0, keys.bind([summed])).add_to(noised)
    return noised.double() - summed.double()


def are_independent(noises) -> bool:
    """Tell whether no two of them correlate, by five standard errors."""
    both = torch.corrcoef(torch.stack([one.flatten() for one in noises]))
    return bool((both - torch.eye(len(noises))).abs().max() < 5 / math.sqrt(noises[0].numel()))


def alike(keys: NoiseKeys) -> NoiseKeys:
    other = NoiseKeys()
    other.load_state_dict(keys.state_dict())
    return other


SUMS = {
    "one element": (lambda s: s[3].add_(1)),
    "the last element": (lambda s: s[-1].add_(1e-3)),
    "one sign": (lambda s: s[201].neg_()),
    "the sign of another": (lambda s: s[202].neg_()),
    "all signs": (lambda s: s.neg_()),
    "the sign of zero": (lambda s: s[:100].zero_().neg_()),
    "an order": (lambda s: s[200:202].copy_(s[200:202].flip(0))),
    "a row": (lambda s: s.copy_(s.roll(2 * LANES))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_sums_have_equal_noise_and_others_independent_noise(dtype) -> None:
    keys = NoiseKeys()
    sums = [torch.randn(N, dtype=dtype)]
    sums[0][:100] = 0
    for change in SUMS.values():
        sums.append(sums[0].clone())
        change(sums[-1])
    noises = [draw(keys, one) for one in sums]

    assert torch.equal(draw(alike(keys), sums[0]), noises[0])
    assert are_independent(noises)


def test_another_step_nonce_secret_or_rank_has_independent_noise() -> None:
    keys, summed = NoiseKeys(), torch.randn(N)
    renewed, ranks = alike(keys), [NoiseKeys(source=make_generator(), rank=r) for r in (0, 1)]
    renewed.renew()
    ranks[1].load_state_dict(ranks[0].state_dict())
    flipped = []
    for at in range(0, 256, 51):
        flipped.append(alike(keys))
        bits = int.from_bytes(keys.secret, "big") ^ (1 << at)
        flipped[-1].secret = bits.to_bytes(32, "big")
    noises = [draw(one, summed) for one in (keys, renewed, *ranks, *flipped)]

    assert are_independent([*noises, draw(keys, summed, 2), draw(keys, summed, 2**40)])


@pytest.mark.parametrize(
    ("expected_batch_size", "changed"), [(1.0, (1.0, 2.0, 1.0)), (2.0, (1.0, 1.0, 1.0))]
)
def test_noise_of_another_scale_is_independent(expected_batch_size, changed) -> None:
    """Two releases of a sum, whose noise differs by its scale alone, would tell the sum."""
    model = nn.Linear(512, 256, bias=False)
    optimizer = private(BookKeeping(model, 1.0, first_batch="trusted"), model, lr=0.0)
    state, noises = copy.deepcopy(optimizer.state_dict(exact=True)), []
    for noise_multiplier, size in zip(changed, (1.0, expected_batch_size, 1.0), strict=True):
        optimizer.load_state_dict(copy.deepcopy(state), exact=True)
        optimizer.noise_multiplier, optimizer.expected_batch_size = noise_multiplier * size, size
        optimizer.clipping.backward(model(torch.zeros(1, 512)).sum(1))
        optimizer.step()
        noises.append(model.weight.grad.clone())
        optimizer.zero_grad()

    assert torch.equal(noises[0], noises[2])
    assert are_independent(noises[:2])


WAYS = pytest.mark.parametrize("bytewise", [False, True])
"""A processor without units for matrices of bytes takes the first way."""


@WAYS
def test_a_digest_tells_every_bit_of_every_place(bytewise, monkeypatch) -> None:
    monkeypatch.setattr(digest, "has_byte_products", lambda: bytewise)
    table = noise_keys._make_table(b"secret" * 6, torch.device("cpu"))
    words = torch.randint(-(2**31), 2**31, (2 * LANES + 3,), dtype=torch.int32)
    sums = [words, words[1:], words[:-1], words[:0]]
    for place, bit in itertools.product([0, 1, LANES, 2 * LANES - 1, 2 * LANES, -2, -1], range(32)):
        other = words.clone()
        other[place] ^= -(2**31) if bit == 31 else 1 << bit
        sums.append(other)
    digests = {tuple(hash_words([one], table)) for one in sums}

    assert len(digests) == len(sums)


def test_a_digest_is_the_sum_of_products_modulo_2_to_the_64(monkeypatch) -> None:
    monkeypatch.setattr(digest, "has_byte_products", lambda: False)
    table = noise_keys._make_table(bytes(32), torch.device("cpu"))
    words = torch.tensor([7, -5, 2**31 - 1, -(2**31), 3], dtype=torch.int32)
    one, other = table[:, :3].tolist()
    lanes = [7 - 5 * 2**32, 2**31 - 1 - 2**63, 3]
    expected = [
        sum(a * b for a, b in zip(lanes, one, strict=True)),
        sum(a * b for a, b in zip([-5, -(2**31), 0], other, strict=True)),
    ]
    found = hash_words([words], table)

    assert [value % 2**64 for value in found] == [value % 2**64 for value in expected]


@pytest.mark.parametrize("number", [0x7F7F7F7F, -0x7F7F7F80])
@pytest.mark.parametrize("sizes", [(2**13,), (3, 2**13 - 3), (2**20 + 2**13,), (2**13, 2**20)])
def test_a_digest_is_exact_products_of_bytes_on_every_processor(number, sizes, monkeypatch) -> None:
    """Pairs of products of the largest bytes and larger keys would not fit into 16 bits."""
    monkeypatch.setattr(digest, "has_byte_products", lambda: True)
    table = torch.full((2, LANES), -1, dtype=torch.int64)
    keys = table.view(torch.int8).view(8, -1)
    keys[0], keys[1], keys[2] = -128, 127, torch.arange(2**15) % 256 - 128
    words = [torch.full((size,), number, dtype=torch.int32) for size in sizes]
    found = torch.tensor(hash_words(words, table)).view(torch.int32).view(-1, 8)
    byte = number.to_bytes(4, "little", signed=True)[0] - 256 * (number < 0)
    row = [2**15 * byte * key for key in (-64, 63)] + [-(2**14) * byte] + 5 * [-(2**15) * byte]

    assert found.tolist() == [row] * (sum(sizes) // 2**13)


class Run:
    """A private training of a small model, of which each step's noise is known."""

    def __init__(self, way=BookKeeping) -> None:
        self.model = build()
        self.clipping = way(self.model, 0.5, first_batch="trusted")
        self.optimizer = private(self.clipping, self.model, noise_multiplier=2.0)
        self.optimizer.param_groups[0]["lr"] = 0.0  # so that equal batches have equal sums

    def step(self, seed: int = 0) -> torch.Tensor:
        self.clipping.backward(self.model.losses(*batch(4, 5 + seed)))
        sums = [self.clipping.sums.part[p].clone() for p in self.model.parameters()]
        self.optimizer.step()
        released = [p.grad.clone() for p in self.model.parameters()]
        self.optimizer.zero_grad()
        size = self.optimizer._divisor
        parts = zip(released, sums, strict=True)
        return torch.cat([(size * one - summed).flatten() for one, summed in parts])


def test_resumed_rolled_back_and_reordered_steps_have_independent_noise(way) -> None:
    run = Run(way)
    noises = [run.step(), run.step()]
    state = copy.deepcopy(run.optimizer.state_dict(exact=True))
    noises += [run.step(1), run.step(2)]
    run.optimizer.load_state_dict(state)  # rolled back
    noises += [run.step(1), run.step(2)]
    other = Run(way)
    other.optimizer.load_state_dict(state)  # resumed
    noises += [other.step(1), other.step(2)]
    exact = Run(way)
    exact.optimizer.load_state_dict(state, exact=True)
    again = exact.step(1)
    exact.optimizer.load_state_dict(state, exact=True)
    noises.append(exact.step(3))  # other sums than in this step before
    noises.append(exact.step(1))

    assert torch.equal(again, noises[2])
    assert are_independent(noises)


def test_a_fork_draws_noise_of_its_own(monkeypatch) -> None:
    keys, summed = NoiseKeys(), torch.randn(N)
    mine, parent = draw(keys, summed), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert are_independent([mine, draw(keys, summed)])


def test_a_fork_does_not_repeat_a_given_generator(monkeypatch) -> None:
    keys = NoiseKeys(generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="was forked, and its copy of the generator"):
        keys.begin(1, [], 1.0)


def test_a_generator_is_a_source_of_secrets() -> None:
    one, again = (NoiseKeys(source=torch.Generator().manual_seed(4)) for _ in range(2))
    other = NoiseKeys(source=torch.Generator().manual_seed(2**32 + 4 + 1))
    assert (one.secret, one.nonce) == (again.secret, again.nonce)
    assert len({one.secret, one.nonce, other.secret, other.nonce}) == 4
    assert len(one.secret) == 32


def test_ranks_with_one_seed_draw_other_numbers() -> None:
    drawn = [torch.rand(N, generator=make_generator(torch.Generator(), rank)) for rank in (0, 1)]
    assert are_independent([one.double() - 0.5 for one in drawn])


def draw_by_words(summed, words, which, std, factor) -> None:
    """Stand in for the kernel: noise that follows from the words."""
    generator = torch.Generator().manual_seed(hash((*words.tolist(), which)) % 2**63)
    summed.mul_(factor).add_(torch.normal(0.0, std, summed.shape, generator=generator))


def digest_by_bytes(words, sums, _table) -> None:
    words[1] = hash(b"".join(one.numpy().tobytes() for one in sums))


@pytest.fixture
def kernels(monkeypatch):
    """As where Triton's kernels run."""
    for module in (noise, noise_keys, step_graphs):
        monkeypatch.setattr(module, "takes_kernel", lambda _: True)
    monkeypatch.setattr(triton_ops, "add_noise_", draw_by_words)
    monkeypatch.setattr(triton_ops, "digest_", digest_by_bytes)


def test_a_kernel_gets_a_seed_for_each_step_and_the_digest_of_its_sums(kernels) -> None:
    keys, summed = NoiseKeys(), torch.randn(N)
    other = summed.clone()
    other[7] = -other[7]
    noises = [draw(keys, summed), draw(keys, other), draw(keys, summed, 2)]

    assert torch.equal(draw(alike(keys), summed), noises[0])
    assert are_independent(noises)
    assert keys.on_devices[-1].shape == (2,)


def test_ranks_that_add_up_share_digests() -> None:
    shared = []

    def share(digest):
        shared.append(digest)
        return torch.cat([digest, digest + len(shared)])

    keys, summed = NoiseKeys(), torch.randn(N)
    keys.begin(1, [summed], 1.0)
    first, second = (keys.bind([summed], share) for _ in range(2))

    assert torch.equal(shared[0], shared[1])
    drawn = [
        torch.rand(N, generator=one.generator_on(torch.device("cpu"))) for one in (first, second)
    ]
    assert are_independent([one.double() - 0.5 for one in drawn])


@pytest.mark.slow
def test_of_500_steps_only_those_with_equal_sums_share_noise(monkeypatch) -> None:
    """Steps of runs that are new, resumed, rolled back, forked, re-ordered or resumed exactly."""
    draws, n = random.Random(1), 10**6  # noqa: S311 (choices of a test)
    torch.manual_seed(0)
    model, others = nn.Linear(1000, 1000, bias=False), [torch.randn(3, 1000) for _ in range(4)]
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"noise_multiplier": 1.0, "expected_batch_size": 1}

    def begin() -> NoisyOptimizer:
        return NoisyOptimizer(sgd, BookKeeping(model, 1.0, first_batch="trusted"), **options)

    optimizer = begin()
    states, sums, noises = (
        [copy.deepcopy(optimizer.state_dict(exact=True))],
        [],
        torch.empty(500, n),
    )
    for step in range(500):
        kind = draws.choice(["new", "resumed", "rolled back", "forked", "other order", "exactly"])
        if kind in ("new", "resumed"):
            optimizer.remove()
            optimizer = begin()
        if kind in ("resumed", "rolled back", "exactly"):
            optimizer.load_state_dict(draws.choice(states), exact=kind == "exactly")
        if kind == "forked":
            monkeypatch.setattr(os, "getpid", lambda step=step: -step)
        x = draws.choice(others)
        x = x.flip(0) if kind == "other order" else x * (1 + draws.random())
        optimizer.clipping.backward(model(x).square().sum(1))
        summed = optimizer.clipping.sums.part[model.weight].clone()
        optimizer.step()
        noises[step] = (model.weight.grad - summed).flatten()
        sums.append(summed.numpy().tobytes())
        optimizer.zero_grad()
        if draws.random() < 0.2:
            states.append(copy.deepcopy(optimizer.state_dict(exact=True)))

    both = torch.corrcoef(noises).fill_diagonal_(0).abs() * math.sqrt(n)
    related = [(one, other) for one, other in (both > 5.5).nonzero().tolist() if one < other]
    assert all(sums[one] == sums[other] for one, other in related)
    assert len(related) < 10


def test_a_module_that_is_saved_holds_no_sums(tmp_path) -> None:
    run = Run()
    run.optimizer.signal_skip_step()
    for part in (0, 1):
        run.clipping.backward(run.model.losses(*batch(4, 5 + part)))
        torch.save(run.model, tmp_path / "model.pt")
        saved = torch.load(tmp_path / "model.pt", weights_only=False)
        assert all(p.grad is None and not vars(p) for p in saved.parameters())
        run.optimizer.step()
    with pytest.raises(TypeError, match="clipped sums without noise cannot be copied or saved"):
        copy.deepcopy(run.clipping.sums)


def test_hooks_and_other_optimizers_find_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    clipping = BookKeeping(model, 1.0)
    optimizer = private(clipping, model, noise_multiplier=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    seen = []
    model.register_full_backward_hook(lambda *_: seen.extend(p.grad for p in model.parameters()))
    clipping.backward(model(torch.ones(2, 3, requires_grad=True))[:, 0])
    torch.optim.AdamW(model.parameters(), weight_decay=1.0).step()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    assert seen
    assert not [one for one in seen if one is not None]
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))
