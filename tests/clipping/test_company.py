"""A sample's loss is the same alone and beside others; where it is not, training is refused."""

import random
import traceback
from functools import partial
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from one_call import seeded
from small_models import TINY, is_clear, take_step
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from dpprof.private import BookKeeping, UnsupportedError, check, make_private
from dpprof.private.samples.company import Company, WrongTrainingError, choose, compare_samples
from dpprof.private.samples.random_state import States, random_state_kept

V, D, SAMPLES = 13, 6, 12
OWN = seeded(5)
LENGTH, COLLATED, MIXED = "length to which a batch pads", "collate_fn gives", "samples beside it"


class Text(nn.Module):
    """Classifies texts, (B, T) with a mask, by the mean of their tokens."""

    def __init__(self, pool=None, between=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.pool, self.between = pool or mean_of, between

    def forward(self, ids_BT, mask_BT):
        h_BTd = self.first(self.embed(ids_BT)).tanh()
        if self.between is not None:
            h_BTd = self.between(self, h_BTd)
        return self.head(self.pool(h_BTd, mask_BT))


def mean_of(h_BTd, mask_BT):
    return (h_BTd * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdim=True)


def texts(count: int = SAMPLES):
    lengths = [5, 7, 2, 6, 3, 4]
    return [
        ([1 + (7 * at + 5 * place * place) % (V - 1) for place in range(lengths[at % 6])], at % 3)
        for at in range(count)
    ]


def pad(samples, length: int | None = None):
    T = length or max(len(ids) for ids, _ in samples)
    rows = [ids + [0] * (T - len(ids)) for ids, _ in samples]
    ids_BT = torch.tensor(rows)
    return ids_BT, (ids_BT > 0).float(), torch.tensor([y for _, y in samples])


def plain_losses(model, ids_BT, mask_BT, y_B):
    return functional.cross_entropy(model(ids_BT, mask_BT), y_B, reduction="none")


class Drawing(list):
    """Samples that are drawn from a generator of their own."""

    def __getitem__(self, at):
        torch.rand(2, generator=OWN)
        return super().__getitem__(at)


def compare(model=None, losses=plain_losses, collate=pad, data=None):
    model = Text() if model is None else model
    clipping = BookKeeping(model, 1.0)
    compute = partial(losses, model)
    return compare_samples(clipping, compute, partial(choose, data or texts()), collate)


def rotate(h_BTd, mask_BT):
    T = h_BTd.shape[1]
    angles = torch.arange(T) * (0.5 if T > 5 else 1.0)  # as of the longest sample
    return mean_of(h_BTd * angles.cos()[:, None], mask_BT)


POOLS = {
    "the mean over padding": lambda h, _: h.mean(1),
    "the last token, which is padding": lambda h, _: h[:, -1],
    "positions from the end": lambda h, m: mean_of(
        h * torch.arange(h.shape[1]).flip(0)[:, None], m
    ),
    "rotations of the longest sample": rotate,
    "attention without a mask": lambda h, m: mean_of((h @ h.mT).softmax(2) @ h, m),
    "a scale of the longest sample": lambda h, m: mean_of(h, m) * h.shape[1] ** -0.5,
    "a norm over all tokens": lambda h, m: mean_of(functional.layer_norm(h, h.shape[1:]), m),
}


def louder(draw, samples):
    """Collate, and draw a number for each sample."""
    ids, mask, y = pad(samples)
    return ids, mask * (1 + torch.tensor([float(draw()) for _ in samples])[:, None]), y


DRAWS = [random.random, np.random.rand, partial(torch.rand, ())]


@pytest.mark.parametrize("collate", [pad, *(partial(louder, draw) for draw in DRAWS)])
@pytest.mark.parametrize("pool", POOLS)
def test_a_loss_that_follows_the_longest_sample_is_refused(pool, collate) -> None:
    with pytest.raises(WrongTrainingError, match=LENGTH):
        compare(Text(POOLS[pool]), collate=collate)


def drop_words(ids, draw=random.random):
    return [V - 1 if draw() < 0.3 else one for one in ids]


def with_words_dropped(samples):
    return pad([(drop_words(ids), y) for ids, y in samples])


def windows(samples):
    """Cut a random window of each sample, as long as the shortest."""
    T = min(len(ids) for ids, _ in samples)
    starts = [int(random.random() * (len(ids) - T + 1)) for ids, _ in samples]  # noqa: S311
    return pad([(ids[at : at + T], y) for at, (ids, y) in zip(starts, samples, strict=True)])


def noise(model, ids, mask, y):
    return plain_losses(model, ids, mask, y) * (1 + 0.1 * torch.rand(len(y)))


def noise_of_tokens(model, ids, mask, y):
    return plain_losses(model, ids, mask * (1 + torch.rand(mask.shape)), y)


@pytest.mark.parametrize(
    ("pool", "losses", "collate", "message"),
    [
        ("the last token, which is padding", plain_losses, with_words_dropped, LENGTH),
        ("the mean over padding", noise, pad, LENGTH),
        ("the mean over padding", noise_of_tokens, with_words_dropped, LENGTH),
        (None, plain_losses, windows, COLLATED),
    ],
)
def test_it_is_refused_where_as_many_numbers_are_drawn_as_there_are_tokens(
    pool, losses, collate, message
) -> None:
    with pytest.raises(WrongTrainingError, match=message):
        compare(Text(POOLS.get(pool)), losses, collate)


def mix_up(samples, share, order):
    ids, mask, y = pad(samples)
    one_hot = functional.one_hot(y, 3).float()
    return ids, mask, share * one_hot + (1 - share) * one_hot[order]


def mix_up_at_random(samples):
    share = float(np.random.beta(0.4, 0.4))  # noqa: NPY002 (as users' collators do)
    return mix_up(samples, share, torch.randperm(len(samples)))


def cut_mix(samples):
    ids, mask, y = pad(samples)
    ids, order = ids.clone(), torch.randperm(len(samples))
    half = int(torch.randint(1, 3, ()))
    ids[:, :half] = ids[order, :half]
    return ids, mask, y


def refill(samples):
    """Fill the padding with tokens of the next sample, and mask nothing."""
    ids, mask, y = pad(samples)
    return torch.where(mask > 0, ids, ids.roll(1, 0).clamp(min=1)), torch.ones_like(mask), y


def draw_labels(samples):
    ids, mask, y = pad(samples)
    return ids, mask, torch.where(torch.rand(len(y)) < 0.5, y, y[torch.randint(len(y), y.shape)])


def shift(samples):
    ids, mask, y = pad(samples, 8)
    return ids, mask, (y + ids.sum()) % 3


def mix_up_with_the_next(samples):
    return mix_up(samples, 0.7, [*range(1, len(samples)), 0])


def mix_up_pairs(samples, draw):
    order = [min(place ^ 1, len(samples) - 1) for place in range(len(samples))]
    return mix_up(samples, float(draw()), order)


def mix_up_with_the_first(samples):
    ids, mask, y = louder(random.random, samples)
    return torch.cat([ids[:1, :1].expand(len(y), 1), ids[:, 1:]], 1), mask, y


COLLATES = [
    *((partial(mix_up_pairs, draw=draw), COLLATED) for draw in DRAWS),
    (mix_up_with_the_first, COLLATED),
    (mix_up_at_random, COLLATED),
    (mix_up_with_the_next, COLLATED),
    (cut_mix, COLLATED),
    (draw_labels, COLLATED),
    (shift, COLLATED),
    (refill, "collate_fn puts in place of padding"),
]


@pytest.mark.parametrize(("collate", "message"), COLLATES)
def test_a_collate_that_mixes_is_refused(collate, message) -> None:
    with pytest.raises(WrongTrainingError, match=message):
        compare(collate=collate)


def contrast(model, *batch):
    z = model(*batch[:2])
    return functional.cross_entropy(z @ z.T.detach(), torch.arange(len(z)), reduction="none")


def times(weigh):
    def losses(model, ids, mask, y):
        found = plain_losses(model, ids, mask, y)
        return weigh(found, mask)

    return losses


def only_the_first(losses, _):
    return torch.cat([losses[:1] * (1 + 0.1 * losses.detach().mean()), losses[1:]])


LOSSES = {
    "contrast": contrast,
    "over the tokens of the batch": times(lambda losses, mask: losses / mask.sum()),
    "minus a detached mean": times(lambda losses, _: losses - losses.detach().mean()),
    "over the largest": times(lambda losses, _: losses / losses.detach().max()),
    "by rank": times(lambda losses, _: losses * (1 + losses.argsort().argsort())),
    "other for one sample": times(lambda losses, _: losses * (2 if len(losses) == 1 else 1)),
    "of the first sample alone": times(only_the_first),
}


def antithetic(size):
    half = torch.rand(size // 2 + 1)
    return torch.cat([half, 1 - half])[:size]


def stratified(size):
    drawn = np.random.rand()  # noqa: NPY002 (as users do)
    return torch.tensor([(drawn + at / size) % 1 for at in range(size)])


@pytest.mark.parametrize("draw", [antithetic, stratified])
def test_numbers_that_follow_the_size_of_the_batch_are_refused(draw) -> None:
    def losses(model, ids, mask, y):
        return plain_losses(model, ids, mask, y) * (1 + draw(len(y)))

    with pytest.raises(WrongTrainingError, match="numbers that follow its size"):
        compare(losses=losses, collate=partial(pad, length=8))


@pytest.mark.parametrize("losses", LOSSES)
def test_a_loss_that_mixes_values_is_refused(losses) -> None:
    with pytest.raises(WrongTrainingError, match=MIXED):
        compare(losses=LOSSES[losses])


def test_targets_of_objects_are_samples_whatever_their_number() -> None:
    """As detectors get: a list of dictionaries, one for each image."""
    model = nn.Linear(D, 2)
    samples = [(torch.randn(D), {"boxes": torch.randn(n, 2)}) for n in (1, 4, 2, 1)]

    def collate(rows):
        x, targets = zip(*rows, strict=True)
        return torch.stack(x), list(targets)

    def losses(x, targets):
        pairs = zip(model(x), targets, strict=True)
        return torch.stack([(y - own["boxes"]).square().sum() for y, own in pairs])

    clipping = BookKeeping(model, 1.0)
    assert compare_samples(clipping, losses, lambda: samples, collate) == []


class Scaled(nn.Module):
    """Rounds activations to 8 bits by one scale for the batch."""

    def forward(self, h_BTd):
        step = h_BTd.detach().abs().amax() / 127
        return h_BTd + ((h_BTd / step).round() * step - h_BTd).detach()


class Limited(nn.Module):
    """Limits the norm of a batch, which only large samples have."""

    def forward(self, h_BTd):
        return h_BTd * (100 / h_BTd.detach().norm()).clamp(max=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("between", [Scaled, Limited])
def test_one_scale_for_a_batch_is_refused_that_equal_samples_hardly_show(between, dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 32), between(), nn.Linear(32, 3)).to(dtype)
    samples = [(torch.randn(D), at % 3) for at in range(4)]

    def collate(rows):
        x, y = zip(*rows, strict=True)
        return torch.stack(x).to(dtype), torch.tensor(y)

    def losses(x, y):
        return functional.cross_entropy(model(x).float(), y, reduction="none")

    clipping = BookKeeping(model, 1.0)
    with pytest.raises(WrongTrainingError, match="one scale for all"):
        compare_samples(clipping, losses, lambda: samples, collate)


def test_mixing_in_an_activations_hook_is_refused() -> None:
    model = Text()
    model.first.register_forward_hook(lambda *given: given[2] - given[2].detach().mean(0))
    clipping = BookKeeping(Text(), 1.0)
    with pytest.raises(WrongTrainingError, match=MIXED):
        compare_samples(
            clipping, partial(plain_losses, model), lambda: texts(3), partial(pad, length=8)
        )


@pytest.mark.parametrize(
    ("losses", "collate"),
    [
        (lambda model, *batch: batch_norm(plain_losses(model, *batch)), pad),
        (lambda model, *batch: plain_losses(model, *batch) + batch[0][1].sum() * 0, pad),
        (plain_losses, lambda samples: pad(samples) if len(samples) > 1 else 1 / 0),
    ],
)
def test_what_fails_on_one_sample_is_said_to(losses, collate) -> None:
    told = r"one sample alone fails \((Value|Index|Zero)"
    with pytest.raises(WrongTrainingError, match=told) as error:
        compare(losses=losses, collate=collate)
    assert "contrastive" in str(error.value)


def squeezed(model, ids, mask, y):
    logits = model(ids, mask)[:, :1].squeeze()
    return functional.binary_cross_entropy_with_logits(logits, y / 2, reduction="none")


def in_another_order(model, ids, mask, y):
    """Give the head the samples of one kind after those of the other, and put them back."""
    h, order = mean_of(model.embed(ids), mask), y.argsort(stable=True)
    return model.head(model.first(h[order])).square().sum(1)[order.argsort()]


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (squeezed, r"squeeze\(\) without an axis"),
        (in_another_order, "the first axis of every layer's"),
    ],
)
def test_a_check_names_the_cause_of_what_fails(losses, message) -> None:
    model = Text()
    with pytest.raises(WrongTrainingError, match=message) as error:
        BookKeeping(model, 1.0).check(partial(losses, model), pad(texts(5)))
    assert "position ids" not in str(error.value)


def test_what_a_collate_says_of_a_sample_is_in_the_details_alone() -> None:
    def pair(samples):
        if len({y for _, y in samples}) == 1:
            raise ValueError(f"no negative for {samples[0]}")
        return pad(samples)

    with pytest.raises(WrongTrainingError) as error:
        compare(collate=pair)
    assert "no negative for ([" in error.value.details
    assert "no negative for ([" not in "".join(traceback.format_exception(error.value))


def test_a_collate_that_joins_samples_is_refused() -> None:
    with pytest.raises(WrongTrainingError, match=r"of 4 samples have shape \(1,\)"):
        compare(collate=lambda samples: pad([(list(chain(*(ids for ids, _ in samples))), 0)]))


def batch_norm(losses):
    return functional.batch_norm(losses[:, None], None, None, training=True)[:, 0]


def mask_tokens(samples):
    """As masked language models: other ids at tokens that are drawn, each for itself."""
    ids, mask, y = pad(samples)
    return torch.where(torch.rand(ids.shape) < 0.3, torch.full_like(ids, 1), ids), mask, y


def sort(samples):
    return pad(sorted(samples, key=lambda one: len(one[0]), reverse=True))


def dropping(model, h):
    return functional.dropout(h, 0.3, model.training)


def with_own_generator(samples):
    ids, mask, y = pad(samples)
    return ids, mask * (1 + torch.rand(mask.shape, generator=OWN)), y


def drop_each(samples):
    """Draw as many numbers for a sample as it has tokens."""
    return pad([(drop_words(ids, partial(torch.rand, ())), y) for ids, y in samples])


def drop_left(samples):
    """Pad on the left, and draw for each token of the batch."""
    ids, mask, y = (part.flip(1) if part.dim() > 1 else part for part in pad(samples))
    return torch.where(torch.rand(ids.shape) < 0.3, 1, ids), mask, y


def two_views(samples):
    """Draw for all samples, and then for all again."""
    rows = [torch.tensor(ids) for ids, _ in samples]
    dropped = [torch.where(torch.rand(len(ids)) < 0.3, 1, ids).tolist() for ids in 2 * rows]
    first, second = dropped[: len(rows)], dropped[len(rows) :]
    labels = [y for _, y in samples]
    return *pad(list(zip(first, labels, strict=True))), pad(list(zip(second, labels, strict=True)))


def noise_of_rows(model, ids, mask, y):
    return plain_losses(model, ids, mask * (1 + torch.rand(mask.numel()).view_as(mask)), y)


def at_times(model, ids, mask, y):
    return plain_losses(model, ids, mask, y) * torch.rand(()).round()


def several_at_once(model, ids, mask, y):
    return (plain_losses(model, ids, mask, y) * torch.rand(3 * len(y)).view(3, -1)).mean(0)


def losses_of_views(model, ids, mask, y, other):
    return plain_losses(model, ids, mask, y) + plain_losses(model, *other)


def of_the_system(model, ids, mask, y):
    return plain_losses(model, ids, mask, y) * (1 + random.SystemRandom().random())


RIGHT = {
    "pads": {},
    "sorts by length": {"collate": sort},
    "draws for each token": {"collate": mask_tokens},
    "draws from a generator of its own": {"collate": with_own_generator},
    "data that draw": {"data": Drawing(texts())},
    "drops in forward": {"model": Text(between=dropping)},
    "the mean over one length": {
        "model": Text(POOLS["the mean over padding"]),
        "collate": partial(pad, length=8),
    },
    "draws in the loss": {"losses": noise},
    "draws in the loss for each token": {"losses": noise_of_tokens},
    "draws for each token of each sample": {"collate": drop_each},
    "draws in Python for each token": {"collate": with_words_dropped},
    "is zero for some draws": {"losses": at_times, "collate": drop_each},
    "draws for rows of tokens": {"losses": noise_of_rows},
    "draws several times in one": {"losses": several_at_once},
    "draws in both": {"losses": noise_of_tokens, "collate": drop_each},
    "drops in both": {"model": Text(between=dropping), "collate": with_words_dropped},
    "draws for each token after padding on the left": {"collate": drop_left},
    "draws two views": {"losses": losses_of_views, "collate": two_views},
    "draws what does not repeat": {"losses": of_the_system},
    "16 bits": {
        "model": Text().bfloat16(),
        "losses": lambda m, i, k, y: plain_losses(m, i, k.bfloat16(), y).float(),
    },
    "float64": {"model": Text().double()},
    "no labels: not a number": {"losses": times(lambda losses, _: losses * torch.nan)},
}
IRREPEATABLE = (
    "the loss or collate_fn draws numbers that cannot be repeated, such as those of the operating "
    "system"
)
OTHERS = ["the loss draws numbers, which alone are others"]
UNCHECKED = {
    "draws in the loss": OTHERS,
    "draws in the loss for each token": OTHERS,
    "is zero for some draws": OTHERS,
    "draws for rows of tokens": OTHERS,
    "draws several times in one": OTHERS,
    "draws in both": OTHERS,
    "draws what does not repeat": [IRREPEATABLE],
}


@pytest.mark.parametrize("kind", RIGHT)
def test_right_losses_pass_and_leave_all_generators_as_they_were(kind) -> None:
    options = {"model": Text()} | RIGHT[kind]
    before = read_generators()
    assert compare(**options) == UNCHECKED.get(kind, [])
    assert read_generators() == before


def read_generators():
    of_torch = torch.get_rng_state().tolist(), OWN.get_state().tolist()
    return random.getstate(), str(np.random.get_state()), of_torch  # noqa: NPY002


def private(model, losses=plain_losses, collate=pad, **options):
    torch.manual_seed(7)  # the loader's first batch follows it
    loader = DataLoader(texts(), batch_size=6, shuffle=True, collate_fn=collate)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    given |= {"sampling_generator": seeded(1)}
    given |= {"noise_generator": seeded(2)}
    return make_private(model, sgd, loader, partial(losses, model), **given | options)


def train(made, losses=plain_losses, before=lambda _: None) -> torch.Tensor:
    model, optimizer, loader = made
    torch.manual_seed(0)
    for _ in range(2):
        for batch in loader:
            before(optimizer.steps)
            take_step(optimizer, losses(model, *batch))
    made.remove()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize(
    ("model", "losses", "collate", "message"),
    [
        (Text(POOLS["the mean over padding"]), plain_losses, pad, LENGTH),
        (Text(rotate), plain_losses, pad, LENGTH),
        (Text(), plain_losses, mix_up_at_random, COLLATED),
        (Text(), plain_losses, refill, "collate_fn puts in place of padding"),
        (Text(), contrast, pad, "mixes samples"),  # which a cut batch shows before
    ],
)
def test_make_private_refuses_it_and_says_no_loss(model, losses, collate, message) -> None:
    with pytest.raises(WrongTrainingError, match=message) as error:
        private(model, losses, collate)
    numbers = [one for one in str(error.value).replace(":", " ").split() if "." in one[:-1]]
    assert numbers == []
    made = private(model, losses, collate, check=False, verify_every=1)
    with pytest.raises((WrongTrainingError, UnsupportedError)):
        train(made, losses)
    assert is_clear(model)


@pytest.mark.parametrize("parts", [None, 2])
def test_verifying_at_every_step_changes_no_bits(parts) -> None:
    random.seed(1)
    trained = [
        train(private(Text(between=dropping), max_batch_size=parts, verify_every=every))
        for every in (None, 1)
    ]
    assert torch.equal(*trained)


class Later(Text):
    """Mixes samples once it is told to."""

    mixes = False

    def forward(self, ids_BT, mask_BT):
        logits = super().forward(ids_BT, mask_BT)
        return self.change(logits) if self.mixes else logits

    def change(self, logits):
        return logits - logits.detach().mean(0)


class LaterInLargeBatches(Later):
    """Mixes by a gradient, in batches that are larger than those that are compared."""

    def change(self, logits):
        return logits - logits.mean(0) if len(logits) > 4 else logits


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Later, MIXED), (LaterInLargeBatches, "depends on what head computed for another")],
)
def test_a_loss_that_mixes_later_is_refused_in_that_step(kind, message) -> None:
    model = kind()
    made = private(model, verify_every=1, expected_batch_size=9)

    def mix(step: int) -> None:
        model.mixes = step == 3

    with pytest.raises((WrongTrainingError, UnsupportedError), match=message):
        train(made, before=mix)
    assert made.optimizer.steps == 3


def test_steps_are_chosen_on_average_as_often_as_asked_and_only_at_their_first_part() -> None:
    made = private(Text(), verify_every=4, check=False)
    repeated = made.optimizer.clipping.repeated
    drawn = [repeated.is_due(goes_on=at % 2 == 0) for at in range(8_000)]
    assert 850 < sum(drawn[::2]) < 1150  # five and a half standard deviations of 27
    assert not any(drawn[1::2])
    assert made.optimizer.clipping.check(partial(plain_losses, made.model), pad(texts(4)))


def test_check_collates_samples_anew_where_they_are_given() -> None:
    model, samples = Text(POOLS["the mean over padding"]), choose(texts())
    clipping, losses = BookKeeping(model, 1.0), partial(plain_losses, model)
    for options in ({"samples": samples}, {"collate": pad}):
        with pytest.raises(ValueError, match="samples and collate together"):
            clipping.check(losses, pad(samples), **options)
        with pytest.raises(ValueError, match="samples and collate together"):
            check(model, plain_losses, pad(samples), clipping, **options)
    for ask in (
        lambda: clipping.check(losses, samples=samples, collate=pad),
        lambda: check(model, plain_losses, pad(samples), clipping, samples=samples, collate=pad),
        lambda: clipping.check(losses, pad(samples)),  # by the mask alone
    ):
        with pytest.raises(WrongTrainingError, match=LENGTH):
            ask()
    clipping.remove()
    model, to_one_length = Text(rotate), partial(pad, length=9)
    options = {"samples": samples, "collate": to_one_length}
    found = check(model, plain_losses, to_one_length(samples), BookKeeping(model, 1.0), **options)
    assert "each sample's loss is the same beside others" in found.checked


HEADS = TINY | {"vocab_size": V, "num_key_value_heads": 2, "max_position_embeddings": 5}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0]}
LONG |= {"original_max_position_embeddings": 5, "rope_theta": 10_000.0}
FOLLOWING = {"longrope": LONG, "dynamic": {"rope_type": "dynamic", "factor": 4.0}}
FIXED = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 5},
    "longrope of one kind": LONG | {"long_factor": LONG["short_factor"]},
}


def llama(rope) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = {"rope_theta": 10_000.0} | rope
    config = transformers.LlamaConfig(**HEADS, rope_parameters=settings)
    return transformers.LlamaForCausalLM(config)


def tokens(samples):
    ids, mask, _ = pad(samples)
    return ids, mask, ids.masked_fill(mask == 0, -100)


def token_losses(model, ids, mask, labels):
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    losses = functional.cross_entropy(logits.mT, labels[:, 1:], reduction="none")
    return losses.sum(1) / (labels[:, 1:] != -100).sum(1)


@pytest.mark.parametrize("rope", FOLLOWING)
def test_positions_that_follow_the_longest_sample_are_refused_by_name(rope) -> None:
    model = llama(FOLLOWING[rope])
    with pytest.raises(UnsupportedError, match=rf"config has positions of rope_type '{rope}'"):
        private(model)
    company = Company(
        model,
        lambda batch: token_losses(model, *batch),
        lambda at: tokens([choose(texts())[one] for one in at]),
        4,
    )
    longest = pytest.raises(WrongTrainingError, match="RoPE that follows the longest")
    with random_state_kept() as others, longest:
        company.compare(States(others))


@pytest.mark.parametrize("rope", FIXED)
def test_positions_that_do_not_are_kept(rope) -> None:
    assert compare(llama(FIXED[rope]), token_losses, tokens) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "other": dict(LONG)}},
        {"rope_parameters": LONG | {"long_factor": [1, 1], "long_mscale": 2.0, "short_mscale": 1}},
    ],
)
def test_settings_of_kinds_of_layers_and_older_ones_are_read(settings) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].config = SimpleNamespace(**settings)
    with pytest.raises(UnsupportedError, match=r"0\.config has positions of rope_type"):
        BookKeeping(model, 1.0)
