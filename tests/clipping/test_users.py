"""Whole users as the unit: each user's gradient is drawn, clipped and counted as one.

Shape legend: B samples, U users.
"""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from one_call import Model, load, prepare, seeded, train, weights
from opacus.data_loader import DPDataLoader
from scipy.stats import chi2
from small_models import Composed, Small, default_dtype, draw, gradients, squares
from snapshots import assert_sentences, refusals_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dpprof.private import (
    BookKeeping,
    NoisyOptimizer,
    PerLayerClipping,
    Segments,
    UnsupportedError,
    WrongTrainingError,
    causal_lm_losses,
    check,
    linear_cross_entropy,
)
from dpprof.private.accounting.accountants import bound_epsilon
from dpprof.private.accounting.schedule import Sampling
from dpprof.private.loop.poisson_batches import PoissonLoader
from dpprof.private.loop.public_numbers import find_public_numbers
from dpprof.private.samples.users import read_users

SIZES = (3, 1, 9, 2, 1)
"""Samples of the users of a batch."""

IDS = [0, 0, 0, 0, 0, 1, 2, 2, 3, 3, 3, 4, 5, 5, 5, 5, 6, 7, 7, 7, 9, 9, 8, 0]
"""Whose the samples of ``one_call`` are: user 0 has six, users 1, 4, 6 and 8 have one."""

OWN = [[at for at, owner in enumerate(IDS) if owner == user] for user in range(10)]


def join_rows(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Join samples and tokens before a layer, and give it two rows of each sample after."""
    y = model.first(x.flatten(0, 1)).tanh().unflatten(0, x.shape[:2])
    pairs = torch.stack([y.sum(1), y[:, 0]], 1).flatten(0, 1)
    return model.second(pairs).view(len(x), -1).square().sum(1)


def chunked(model: nn.Module, ids: torch.Tensor, *, keep: bool) -> torch.Tensor:
    return linear_cross_entropy(model.table(ids).tanh(), model.head, ids, keep=keep).sum(1)


def make(kind: str):
    """Make a model, what computes its samples' losses, and a batch of as many as ``SIZES`` says."""
    B, T, d = sum(SIZES), 5, 6
    ids, x = torch.randint(6, (B, T)), torch.randn(B, T, d)
    layers = {
        "lstm": lambda: nn.LSTM(d, 4, batch_first=True),
        "attention": lambda: nn.TransformerEncoderLayer(d, 2, 8, dropout=0.0, batch_first=True),
        "convolution": lambda: nn.Sequential(nn.Conv1d(T, 4, 3), nn.GroupNorm(2, 4)),
    }
    if kind in layers:
        model = layers[kind]()
        pick = (lambda y: y[0]) if kind == "lstm" else (lambda y: y)
        return model, lambda x: pick(model(x)).square().flatten(1).sum(1), (x,)
    if kind == "rows":
        model = Composed(join_rows, first=nn.Linear(d, 4), second=nn.Linear(4, 3))
        return model, model, (x,)
    if kind in ("chunked", "kept"):
        run = functools.partial(chunked, keep=kind == "kept")
        model = Composed(run, table=nn.Embedding(6, d), head=nn.Linear(d, 6))
        return model, model, (ids,)
    if kind.startswith("lora"):
        peft = pytest.importorskip("peft")
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
        config = transformers.LlamaConfig(vocab_size=6, num_attention_heads=2, **sizes)
        lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config).double(), lora)
        return model, lambda ids: causal_lm_losses(model, ids, ids, keep=False), (ids,)
    model = Small(kind, d, 4, bias=True)
    ids, labels, factors = draw(B, T)
    return model, model.losses, (ids, labels, factors + 0.1)


def clip_users(model, losses, users: Segments, bound: float | None = None):
    """Return the norms of users, their clipped sum, by definition, and the bound: the median."""
    own = []
    for loss in users.join(losses):
        loss.backward(retain_graph=True)
        own.append(gradients(model))
        model.zero_grad()
    norms = torch.stack([gradient.norm() for gradient in own])
    bound = float(norms.median()) if bound is None else bound
    return norms, (bound / (norms + 1e-6)).clamp(max=1) @ torch.stack(own), bound


KINDS = ["linear", "layer norm", "no rule", "used twice", "tied", "rows", "convolution", "lstm"]
KINDS += ["attention", "chunked", "kept", "lora"]


@pytest.mark.parametrize(("at", "kind"), list(enumerate(KINDS)))
def test_the_sum_is_that_of_users_clipped_by_definition(way, at, kind) -> None:
    with default_dtype(torch.float64):
        model, losses_of, batch = make(kind)
        users = Segments(SIZES, averages=at % 2 == 0)
        norms, expected, bound = clip_users(model, losses_of(*batch), users)
        clipping = way(model, bound)
        clipping.backward(losses_of(*batch), users=users)

    assert (clipping.sample_norms - norms).norm() <= 1e-9 * norms.norm()
    assert (gradients(model) - expected).norm() <= 1e-9 * expected.norm()


@pytest.mark.parametrize("size", range(1, 10))
def test_in_float32_users_of_any_size_are_exact_to_1e_5(way, size) -> None:
    model, losses_of, batch = make("kept" if size % 2 else "layer norm")
    batch = [part[: size + 4] for part in batch]
    users = Segments((size, 1, 3))
    _, expected, bound = clip_users(model.double(), losses_of(*batch), users)
    clipping = way(model.float(), bound)
    clipping.backward(losses_of(*batch), users=users)

    assert (gradients(model) - expected).norm() <= 1e-5 * expected.norm()


def test_normalised_and_layerwise_clipping_take_users_as_one() -> None:
    model, losses_of, batch = make("linear")
    users, bound = Segments(SIZES), 0.1
    clipping = BookKeeping(model.double(), bound, stability=0.01)
    clipping.backward(losses_of(*batch), users=users)
    total = gradients(model)
    clipping.remove()
    model.zero_grad()
    own = []
    for loss in users.join(losses_of(*batch)):
        loss.backward(retain_graph=True)
        own.append(gradients(model))
        model.zero_grad()
    expected = sum(bound * gradient / (gradient.norm() + 0.01) for gradient in own)
    assert (total - expected).norm() <= 1e-9 * expected.norm()

    by_layer = PerLayerClipping(model, 1e6)  # so large that it clips nothing
    by_layer.backward(losses_of(*batch), users=users)
    assert (gradients(model) - sum(own)).norm() <= 1e-6 * sum(own).norm()
    whole = torch.stack([gradient.norm() for gradient in own])
    assert torch.allclose(by_layer.sample_norms.norm(dim=1), whole)


@pytest.mark.parametrize("averages", [True, False])
def test_a_user_moves_the_sum_by_his_clipped_gradient_and_no_order_matters(way, averages) -> None:
    model, losses_of, batch = make("attention")
    model.double()
    batch = [part.double() for part in batch]
    starts = np.cumsum([0, *SIZES])
    places = [list(range(a, b)) for a, b in itertools.pairwise(starts)]
    bound = 0.5 * float(clip_users(model, losses_of(*batch), Segments(SIZES, averages))[0].min())
    clipping = way(model, bound)

    def total(users: list[list[int]]) -> torch.Tensor:
        model.zero_grad()
        rows = [at for own in users for at in own]
        segments = Segments(tuple(map(len, users)), averages)
        clipping.backward(losses_of(*(part[rows] for part in batch)), users=segments)
        return gradients(model)

    whole, alone = total(places), [total([own]) for own in places]
    for user, own in enumerate(alone):
        without = total(places[:user] + places[user + 1 :])
        moved = whole - without
        assert moved.norm() <= bound
        assert (moved - own).norm() <= 1e-9 * bound  # the others contribute what they did
    shuffled = [own[::-1] for own in reversed(places)]
    assert (total(shuffled) - whole).norm() <= 1e-9 * whole.norm()


def test_a_sample_that_is_not_finite_leaves_its_user_out_and_no_other(way) -> None:
    model, losses_of, (ids, labels, factors) = make("linear")
    factors[4] = torch.nan  # the first of the third user's nine
    users = Segments(SIZES)
    clipping = way(model.double(), 0.1)
    clipping.backward(losses_of(ids, labels, factors.double()), users=users)
    total, count = gradients(model), clipping.nonfinite_samples
    model.zero_grad()
    rest = [*range(4), *range(13, sum(SIZES))]
    parts = (part[rest] for part in (ids, labels, factors.double()))
    clipping.backward(losses_of(*parts), users=Segments((3, 1, 2, 1)))

    assert count == 1
    assert (gradients(model) - total).norm() <= 1e-9 * total.norm()


def test_samples_that_are_mixed_within_users_are_refused(way) -> None:
    def mix(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model.layer(x)
        return (y + y.view(-1, 2, *y.shape[1:]).flip(1).flatten(0, 1)).square().flatten(1).sum(1)

    model = Composed(mix, layer=nn.Linear(3, 2))
    clipping = way(model, 1.0)  # in another batch these samples are of different users
    losses = model(torch.randn(40, 3))  # so many that random halves of them part some pair
    with pytest.raises(UnsupportedError, match="mixes samples"):
        clipping.backward(losses, users=Segments((2,) * 20))


def test_rows_that_the_graph_does_not_show_are_refused(way) -> None:
    def hide(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda x: model.layer(x.flatten(0, 1)), x, use_reentrant=True)
        return y.view(len(x), -1).square().sum(1)

    model = Composed(hide, layer=nn.Linear(3, 2))
    clipping = way(model, 1.0, first_batch="trusted")
    losses = model(torch.randn(4, 5, 3, requires_grad=True))
    with pytest.raises(UnsupportedError, match=r"layer\.weight saw 20 samples, and there are 4"):
        clipping.backward(losses, users=Segments((1, 3)))


@pytest.mark.parametrize("sizes", [(2, 1), (4, 0), (5, -1), (2.0, 2.0), (4, 4), ()])
def test_segments_must_be_those_of_the_losses(sizes) -> None:
    model = nn.Linear(3, 1)
    clipping = BookKeeping(model, 1.0)
    for users in (Segments(sizes), Segments(list(sizes)), sizes):
        with pytest.raises(ValueError, match=r"whole numbers of at least 1 that add up to 4, and"):
            clipping.backward(squares(model, torch.ones(4, 3)), users=users)
    clipping.backward(squares(model, torch.ones(4, 3)), users=Segments(tuple(np.array([3, 1]))))
    model.zero_grad()
    clipping.backward(squares(model, torch.ones(4, 3))[:0], users=Segments(()))
    assert not gradients(model).any()


def draw_users(steps: int, most: int, rank: int = 0, **options):
    """Return what is accounted for, and the samples of each step, with what is known of parts."""
    owners = read_users("user", IDS, most, "mean", IDS)
    loader = DataLoader(TensorDataset(torch.arange(len(IDS))), batch_size=4, shuffle=True)
    largest = options.pop("max_batch_size", None)
    numbers = find_public_numbers(loader, users=owners, **options)
    ranks = options.get("ranks", 1)
    made = PoissonLoader(
        *(loader, numbers),
        max_batch_size=largest,
        generator=seeded(3),
        rank=rank,
        ranks=ranks,
        users=owners,
    )
    made._parts.steps = steps
    batches: list[list[int]] = [[]]
    for samples in made._parts:
        part = made._parts.drawn.popleft()
        assert max(part.users.sizes) * len(part.users.sizes) <= (largest or math.inf)
        assert sum(part.users.sizes) == part.size == len(samples)
        whose = [IDS[at] for at in samples]
        runs = [(user, len(list(run))) for user, run in itertools.groupby(whose)]
        assert tuple(size for _, size in runs) == part.users.sizes  # one user after another
        if not part.is_empty:
            assert all(size == min(most, len(OWN[user])) for user, size in runs)  # never split
            batches[-1] += samples
        if part.is_last:
            batches.append([])
    return numbers, batches[:-1]


@pytest.mark.parametrize("steps", [4_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_step_draws_users_at_the_rate_and_uniform_samples_of_each(steps) -> None:
    """A rate of 0.4 is seen to be off by 0.039 (or 0.017), by five deviations."""
    numbers, batches = draw_users(steps, 3, max_batch_size=4)

    assert numbers.sampling == Sampling(0.4, unit="user")
    assert (numbers.samples, numbers.steps_of_epoch, numbers.expected_batch_size) == (10, 3, 4)
    drawn = np.zeros((len(batches), len(IDS)), dtype=bool)
    for step, samples in enumerate(batches):
        assert len(set(samples)) == len(samples)
        drawn[step, samples] = True
    there = np.stack([drawn[:, own].any(1) for own in OWN], 1)
    assert (np.abs(there.mean(0) - 0.4) < 5 * np.sqrt(0.24 / len(batches))).all()
    both = (there[:, :1] & there[:, 1:]).mean(0)
    assert (np.abs(both - 0.16) < 5 * np.sqrt(0.14 / len(batches))).all()  # independently
    subsets = list(itertools.combinations(range(6), 3))  # of user 0's six samples
    rows = drawn[there[:, 0]][:, OWN[0]]
    counts = np.array([sum((np.flatnonzero(row) == s).all() for row in rows) for s in subsets])
    expected = len(rows) / len(subsets)
    assert ((counts - expected) ** 2 / expected).sum() < chi2.isf(1e-6, len(subsets) - 1)


def test_a_user_lies_on_one_rank_and_in_one_fold_and_truncation_counts_users() -> None:
    seen = {}
    for rank in range(2):
        numbers, batches = draw_users(400, 2, rank, folds=2, ranks=2, truncated_batch_size=4)
        assert numbers.sampling == Sampling(0.8, 2, 2, 3, "user")
        assert max(len({IDS[at] for at in samples}) for samples in batches) == 2
        for step, samples in enumerate(batches):
            for at in samples:
                seen.setdefault(IDS[at], set()).add((rank, step % 2))
    assert len(seen) == 10
    assert all(len(places) == 1 for places in seen.values())


USERS = {"unit": "user", "users": IDS, "samples_of_user": 3, "max_batch_size": 4}


@pytest.mark.parametrize("user_gradient", ["mean", "sum"])
@pytest.mark.parametrize("method", ["flash", "flash-bk"])
def test_a_step_is_the_sum_of_drawn_users_over_the_expected_number(method, user_gradient) -> None:
    model = Model().double()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    options = USERS | {"noise_multiplier": 0.0, "user_gradient": user_gradient, "method": method}
    _, optimizer, loader = prepare(model, optimizer=sgd, data_loader=load(), **options)
    before, expected, sizes = weights(model), 0, set()
    for batch in loader:
        users = optimizer._part.users
        sizes |= set(users.sizes)
        with optimizer.clipping.disabled():
            _, total, _ = clip_users(model, model.losses(*batch), users, 0.5)
        expected = expected + total
        losses = optimizer.backward(model.losses, *batch)
        assert losses.shape == (len(batch[0]),)
        optimizer.step()
        optimizer.zero_grad()
        if loader.is_last_part:
            moved = (before - weights(model)) * 6  # load()'s batch size counts users
            assert (moved - expected).norm() <= 1e-5 * expected.norm()
            before, expected = weights(model), 0
    assert sizes == {1, 2, 3}


def test_accounting_and_guarantee_are_of_users() -> None:
    model = Model().double()
    budget = {"noise_multiplier": None, "epsilon": 4.0, "delta": 1e-3, "epochs": 2}
    private = prepare(model, **USERS, **budget, accountant="rdp")
    train(private, model)

    (noise, rate, steps), *others = private.spent.history
    assert (rate, steps, others) == (0.6, 4, [])
    assert private.epsilon_spent() == bound_epsilon([(noise, 0.6, 4)], 1e-3, "rdp") <= 4
    for said in (
        "draws each user with probability 0.6",
        "Of each at most 3 samples take part",
        "A user adds at most 0.5",
        "divided by 6",
        "differ by one user that is added or removed, with all samples",
        "The number of users, 10, is public",
    ):
        assert said in private.guarantee
    with pytest.raises(ValueError, match="unit 'user', and this training 'sample'"):
        prepare(Model().double(), spent=private.spent, delta=1e-3, accountant="rdp")


def test_a_state_of_other_users_is_refused() -> None:
    options = USERS | {"samples_of_user": 2}
    state = prepare(Model().double(), **options).state_dict(exact=True)
    for change, named in (
        ({"samples_of_user": 1}, "samples of a user: 2, and here there are 1"),
        ({"users": [0, 1, *IDS[2:]]}, "users of samples"),
    ):
        with pytest.raises(ValueError, match=named):
            prepare(Model().double(), **options | change).load_state_dict(state, exact=True)


def test_what_is_no_user_is_refused_by_name() -> None:
    def refuse(options) -> str:
        model = Model().double()
        said = refusals_of(functools.partial(prepare, model))(USERS | options)
        assert train(prepare(model), model, 1) > 0  # nothing stays behind
        return said

    assert_sentences("clipping/users", refuse)


def test_loaders_that_draw_otherwise_are_refused_by_name() -> None:
    own = DPDataLoader.from_data_loader(load(), generator=seeded(1))
    with pytest.raises(ValueError, match=r"Opacus's data loader .* for unit='user' give"):
        prepare(Model().double(), **USERS, data_loader=own)


def test_ids_may_be_tensors_and_arrays_in_any_order() -> None:
    each = [[at] for at in range(24)]
    kinds = [(torch.tensor(IDS), OWN), (np.array(IDS, dtype=np.uint8), OWN), (range(24), each)]
    for ids, expected in kinds:
        users = read_users("user", ids, 6, "mean", range(24))
        assert [users.draw(user, seeded(0)) for user in range(len(users))] == expected


@pytest.mark.parametrize("where", ["collate_fn", "losses"])
def test_samples_in_another_order_are_refused(where) -> None:
    def shuffle(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = x[:, 0].argsort()
        return x[order], y[order]

    model = Model().double()
    if where == "losses":
        keeping = model.losses
        model.losses = lambda x, y: keeping(*shuffle(x, y))
        options = {}
    else:
        options = {"collate_fn": lambda rows: shuffle(*map(torch.stack, zip(*rows, strict=True)))}
    with pytest.raises(WrongTrainingError, match=r"another order|mixes samples"):
        prepare(model, **USERS, data_loader=load(**options))


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean(1)


def test_check_compares_by_user() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    batch = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    users = Segments((3, 1, 2))
    clipping = BookKeeping(model, 0.1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"noise_multiplier": 1.0, "expected_batch_size": 3}
    optimizer = NoisyOptimizer(sgd, clipping, **settings)
    done = check(model, loss, batch, optimizer, users=users)
    assert done.max_relative_error < 1e-5
    assert "the gradient is that of single samples, clipped" in done.checked
    assert set(done.unchecked) == {"padding"}

    def step(x: torch.Tensor, y: torch.Tensor) -> None:  # which clips each sample by itself
        optimizer.zero_grad()
        clipping.backward(loss(model, x, y))
        optimizer.step()

    with pytest.raises(WrongTrainingError, match="not the sum of the samples' clipped gradients"):
        check(model, loss, batch, optimizer, step=step, users=users)
    check(model, loss, batch, optimizer, step=step)
    with pytest.raises(ValueError, match=r"each of at least 2 users has .*sizes=\(6,\)"):
        check(model, loss, batch, optimizer, users=Segments((6,)))
    with pytest.raises(ValueError, match="add up to 6, and are"):
        check(model, loss, batch, optimizer, users=Segments((6, 1)))


def test_check_of_a_training_with_users_asks_for_users() -> None:
    model = Model().double()
    x, y = load().dataset[:6]
    private = prepare(model, **USERS)

    def of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model.losses(x, y)

    assert check(model, of, (x, y), private.optimizer, users=Segments((3, 1, 2))).samples == 6
    with pytest.raises(ValueError, match=r"unit='user': give users=Segments\(sizes\)"):
        check(model, of, (x, y), private.optimizer)
    users = Segments((3, 3), averages=False)
    with pytest.raises(ValueError, match=r"users\.averages must be True, as user_gradient"):
        check(model, of, (x, y), private.optimizer, users=users)
