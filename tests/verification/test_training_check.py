"""Users' own loops: right ones pass, and of wrong ones the first wrong thing is named.

Shape legend: B samples, T tokens, V vocabulary.
"""

import copy
import doctest
import sys
from typing import NamedTuple

import pytest
import torch
from opacus import PrivacyEngine
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping, DPPerLayerOptimizer
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.nn import functional
from torch.optim import SGD

from dpprof.clipping import BookKeeping, FlashClipping, NoisyOptimizer, PerLayerClipping
from dpprof.verification import Mechanism, WrongTrainingError, check

B, T, V = 4, 6, 13
SETTINGS = {"noise_multiplier": 0.8, "expected_batch_size": 5}
BOUND = 0.5


def build_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.1), nn.Linear(7, 3))


def build_gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=T, n_embd=8, n_layer=1, n_head=2, tie_word_embeddings=False
    )
    return transformers.GPT2LMHeadModel(config)


def build_llama(*, adapters: bool = True):
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=T,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    if not adapters:
        return model
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(model, lora)


def points():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, 5, generator=generator), torch.randn(B, 3, generator=generator)


def tokens(*, left: bool = False):
    """Ids, mask and labels; three samples are padded."""
    generator = torch.Generator().manual_seed(2)
    ids_BT = torch.randint(1, V, (B, T), generator=generator)
    lengths_B = torch.tensor([6, 4, 5, 3])[:, None]
    at_T = torch.arange(T)
    mask_BT = (at_T >= T - lengths_B if left else at_T < lengths_B).long()
    ids_BT = ids_BT * mask_BT
    return ids_BT, mask_BT, ids_BT.masked_fill(mask_BT == 0, -100)


def points_loss(model, x, y):
    return (model(x) - y).square().mean(1)


def logits_of(model, ids_BT, mask_BT):
    positions_BT = torch.arange(ids_BT.shape[1]).repeat(len(ids_BT), 1)
    found = model(
        input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, use_cache=False
    )
    return found.logits[:, :-1]


def token_loss(model, ids_BT, mask_BT, labels_BT):
    labels_BT = labels_BT[:, 1:]
    logits_BVT = logits_of(model, ids_BT, mask_BT).transpose(1, 2)
    losses_BT = functional.cross_entropy(logits_BVT, labels_BT, reduction="none")
    return losses_BT.sum(1) / (labels_BT != -100).sum(1)


class Setup(NamedTuple):
    model: nn.Module
    loss: object
    private: object


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def with_dpprof(way, model, loss):
    clipping = way(model, BOUND)
    return Setup(model, loss, NoisyOptimizer(SGD(trained(model), lr=0.1), clipping, **SETTINGS))


def with_hooks(model, loss, *, functorch: bool = False):
    wrapped = GradSampleModule(model, force_functorch=functorch)
    optimizer = DPOptimizer(SGD(trained(model), lr=0.1), max_grad_norm=BOUND, **SETTINGS)
    return Setup(wrapped, loss, optimizer)


def with_ghost(model, loss, *, ghost: bool = True, bound: float = BOUND):
    wrapped = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=bound, use_ghost_clipping=ghost
    )
    optimizer = DPOptimizerFastGradientClipping(
        SGD(trained(model), lr=0.1), max_grad_norm=BOUND, **SETTINGS
    )

    class Criterion:
        """A loss of one entry a sample, as Opacus's wrapper calls it."""

        reduction = "mean"

        def __call__(self, *batch):
            return loss(*batch)

    return Setup(wrapped, DPLossFastGradientClipping(wrapped, optimizer, Criterion()), optimizer)


WAYS = {
    "flash-bk": lambda model, loss: with_dpprof(BookKeeping, model, loss),
    "flash": lambda model, loss: with_dpprof(FlashClipping, model, loss),
    "opacus hooks": with_hooks,
    "opacus functorch": lambda model, loss: with_hooks(model, loss, functorch=True),
    "opacus ghost": with_ghost,
    "opacus fast gradient clipping": lambda model, loss: with_ghost(model, loss, ghost=False),
}
MODELS = {
    "mlp": (build_mlp, points_loss, points),
    "gpt2": (build_gpt2, token_loss, tokens),
    "llama": (build_llama, token_loss, tokens),
}


def cases():
    for way in WAYS:
        for kind in MODELS:
            is_rare = way in ("opacus functorch", "opacus fast gradient clipping")
            marks = [pytest.mark.slow] if is_rare and kind != "mlp" else []
            yield pytest.param(way, kind, marks=marks, id=f"{way}, {kind}")


@pytest.mark.parametrize(("way", "kind"), [*cases()])
def test_right_loops_pass(way, kind) -> None:
    build, loss, draw = MODELS[kind]
    model, loss, private = WAYS[way](build(), loss)
    found = check(model, loss, draw(), private)

    assert (found.samples, found.parameters) == (B, len(trained(model)))
    assert found.max_relative_error < 1e-2
    assert any(one.startswith("noise of the right scale") for one in found.checked)
    assert set(found.unchecked) <= {"empty batch", "padding"}
    assert ("padding changes nothing" in found.checked) == (kind != "mlp")


class ByHand:
    """A loop of single samples, and what it says of itself; or with something wrong."""

    def __init__(self, model, loss, wrong: str = "nothing") -> None:
        self.model, self.loss, self.wrong = model, loss, wrong
        self.optimizer = SGD(trained(model), lr=0.1)
        self.mechanism = Mechanism(self.optimizer, max_grad_norm=BOUND, **SETTINGS)

    def clip(self, parts):
        bound = 2 * BOUND if self.wrong == "bound" else BOUND
        norm = torch.cat([part.flatten() for part in parts]).norm()
        return [part * (bound / (norm + 1e-6)).clamp(max=1) for part in parts]

    def sum(self, *batch):
        clips_the_sum = self.wrong == "clips the sum"
        sums = [torch.zeros_like(p) for p in trained(self.model)]
        for sample in zip(*batch, strict=True):
            one = self.loss(self.model, *(part[None] for part in sample)).sum()
            parts = torch.autograd.grad(one, trained(self.model))
            parts = parts if clips_the_sum else self.clip(parts)
            sums = [total + part for total, part in zip(sums, parts, strict=True)]
        return self.clip(sums) if clips_the_sum else sums

    def give(self, sums) -> None:
        std = SETTINGS["noise_multiplier"] * BOUND * (1.1 if self.wrong == "noise" else 1)
        for at, (p, total) in enumerate(zip(trained(self.model), sums, strict=True)):
            if self.wrong == "seed":
                torch.manual_seed(0)
            is_noised = not (self.wrong == "no noise" and at == 2)
            given = (total + std * torch.randn_like(p) * is_noised) / 5
            given = given / 5 if self.wrong == "divided twice" else given
            p.grad = given if p.grad is None else p.grad + given

    def step(self, *batch) -> None:
        if self.wrong != "clears nothing":
            self.optimizer.zero_grad()
        self.give(self.sum(*batch))
        if self.wrong == "dropped":
            self.model[0].bias.grad = None
        for _ in range({"forgets to step": 0, "steps twice": 2}.get(self.wrong, 1)):
            self.optimizer.step()
        if self.wrong == "thaws":
            self.model[0].weight.data += 1


def check_by_hand(model, loss=points_loss, wrong: str = "nothing"):
    loop = ByHand(model, loss, wrong)
    return check(model, loss, points(), loop.mechanism, step=loop.step)


def test_a_right_loop_by_hand_passes() -> None:
    model = build_mlp()
    found = check_by_hand(model)

    assert found.max_relative_error < 1e-4
    assert "an empty batch contributes nothing" in found.checked


@pytest.mark.parametrize(("scale", "what"), [(1e3, "scale of the loss"), (1e-3, "clipping")])
def test_what_a_fixed_bound_hides_is_told(scale, what) -> None:
    def loss(*batch):
        return scale * points_loss(*batch)

    model = build_mlp()
    found = check_by_hand(model, loss)
    assert set(found.unchecked) == {what, "padding"}


@pytest.mark.parametrize(
    ("multiplier", "rate", "what", "why"),
    [
        (0.0, 0.1, "noise", "the noise multiplier is 0"),
        (0.8, 0.0, "weights change", "the learning rate of 3.bias is 0"),
    ],
)
def test_what_cannot_be_seen_is_told(multiplier, rate, what, why) -> None:
    model, loss, private = with_dpprof(FlashClipping, build_mlp(), points_loss)
    private.noise_multiplier = multiplier
    private.param_groups[0]["lr"] = rate
    assert check(model, loss, points(), private).unchecked[what] == why


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("clips the sum", "gradient of the batch is clipped as a whole, and not that of each"),
        ("bound", r"samples are clipped to a bound of 1, and the noise is for one of 0\.5"),
        ("no noise", r"3\.weight gets no noise"),
        ("noise", r"the noise has a standard deviation of 0\.0\d+, and noise multiplier"),
        ("seed", r"0\.weight gets the same noise in every step"),
        ("dropped", r"0\.bias: the optimizer is given no gradient, and it is trained"),
        ("divided twice", "is divided twice by the expected batch size, 5"),
        ("clears nothing", "a second step adds to the gradients of the first; clear them in each"),
        ("steps twice", "one step on a batch steps the optimizer 2 times, and an accountant"),
        ("forgets to step", "the step did not step the optimizer"),
    ],
)
def test_wrong_loops_by_hand_are_found(wrong, message) -> None:
    model = build_mlp()
    model[0] = nn.Linear(5, 700)  # so many elements that the noise's scale is known
    model[3] = nn.Linear(700, 3)
    with pytest.raises(WrongTrainingError, match=message):
        check_by_hand(model, wrong=wrong)


def test_a_frozen_parameter_that_changes_is_found() -> None:
    model = build_mlp()
    model[0].weight.requires_grad_(False)
    with pytest.raises(WrongTrainingError, match=r"0\.weight is frozen, and a step changes it"):
        check_by_hand(model, wrong="thaws")


@pytest.mark.parametrize("way", ["flash-bk", "opacus hooks", "opacus ghost"])
def test_adapters_that_the_optimizer_does_not_have_are_found(way) -> None:
    pytest.importorskip("peft")
    model = build_llama()
    model.get_output_embeddings().requires_grad_(True)
    setup = WAYS[way](model, token_loss)
    setup.private.original_optimizer.param_groups[0]["params"] = list(
        model.get_output_embeddings().parameters()
    )
    message = r"lora_A\.default\.weight is trained, and the optimizer does not have it"
    with pytest.raises(WrongTrainingError, match=message):
        check(setup.model, setup.loss, tokens(), setup.private)


def test_an_optimizer_of_another_copy_is_found() -> None:
    model = build_mlp()
    setup = with_hooks(model, points_loss)
    setup.private.original_optimizer.param_groups[0]["params"] = trained(copy.deepcopy(model))
    with pytest.raises(WrongTrainingError, match=r"0\.weight is trained, and the optimizer does"):
        check(setup.model, setup.loss, points(), setup.private)


def test_adapters_without_gradient_are_found() -> None:
    """Reentrant checkpointing of a frozen model: nothing below requires a gradient."""
    model = build_llama()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    setup = with_dpprof(BookKeeping, model.train(), token_loss)
    with pytest.raises(WrongTrainingError, match=r"so nothing is learned; .* reentrant checkpoint"):
        check(setup.model, token_loss, tokens(), setup.private)


def test_a_loss_that_is_cut_off_is_found() -> None:
    setup = with_hooks(build_mlp(), lambda *batch: points_loss(*batch).detach())
    with pytest.raises(WrongTrainingError, match="the loss depends on no trained parameter"):
        check(setup.model, setup.loss, points(), setup.private)


def test_a_model_that_trains_nothing_is_found() -> None:
    setup = with_hooks(build_mlp(), points_loss)
    setup.model.requires_grad_(False)
    with pytest.raises(WrongTrainingError, match="no parameter of the model requires a gradient"):
        check(setup.model, setup.loss, points(), setup.private)


def test_an_optimizer_that_moves_nothing_is_found() -> None:
    class Still(SGD):
        def step(self, closure=None):
            """Do nothing."""

    model = build_mlp()
    wrapped = GradSampleModule(model)
    private = DPOptimizer(Still(model.parameters(), lr=0.1), max_grad_norm=BOUND, **SETTINGS)
    with pytest.raises(WrongTrainingError, match=r"0\.weight: a step does not change it"):
        check(wrapped, points_loss, points(), private)


def divided(model, x, y):
    return points_loss(model, x, y) / len(x)


def mean_of_means(model, x, y):
    return points_loss(model, x, y).mean() / len(x)


def summed(model, x, y):
    return points_loss(model, x, y).sum()


@pytest.mark.parametrize(
    ("way", "loss", "message"),
    [
        ("flash-bk", divided, "1/4 of its loss alone: the mean over the batch is taken twice"),
        ("flash", divided, "the mean over the batch is taken twice"),
        ("opacus hooks", divided, "the mean over the batch is taken twice"),
        ("opacus ghost", divided, "the mean over the batch is taken twice"),
        ("opacus hooks", mean_of_means, "the loss is 1/4 of the samples' mean: the mean over"),
        ("opacus hooks", summed, "the loss sums over the batch, and the optimizer expects a mean"),
    ],
)
def test_wrong_scales_of_losses_are_found(way, loss, message) -> None:
    setup = WAYS[way](build_mlp(), loss)
    with pytest.raises(WrongTrainingError, match=message):
        check(setup.model, setup.loss, points(), setup.private)


def test_a_wrong_scale_inside_of_a_step_is_found_although_samples_are_clipped() -> None:
    setup = with_hooks(build_mlp(), points_loss)
    setup.private.max_grad_norm = 1e-3

    def step(x, y):
        setup.private.zero_grad()
        (points_loss(setup.model, x, y).mean() / len(x)).backward()
        setup.private.step()

    with pytest.raises(WrongTrainingError, match="is 1/4 of its own before it is clipped"):
        check(setup.model, points_loss, points(), setup.private, step=step)


def test_a_mean_over_all_tokens_is_found() -> None:
    def loss(model, ids_BT, mask_BT, labels_BT):
        logits_BVT = logits_of(model, ids_BT, mask_BT).transpose(1, 2)
        return functional.cross_entropy(logits_BVT, labels_BT[:, 1:])

    setup = with_hooks(build_gpt2(), loss)
    with pytest.raises(WrongTrainingError, match="the mean is over all tokens of the batch"):
        check(setup.model, loss, tokens(), setup.private)


@pytest.mark.parametrize("way", ["opacus hooks", "opacus ghost", "flash-bk"])
def test_position_ids_that_samples_share_are_found(way) -> None:
    def loss(model, ids_BT):
        logits_BVT = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].transpose(1, 2)
        return functional.cross_entropy(logits_BVT, ids_BT[:, 1:], reduction="none").mean(1)

    setup = WAYS[way](build_gpt2(), loss)
    with pytest.raises(
        WrongTrainingError, match=r"wpe: this layer sees 1 in the place of 4 samples.*position ids"
    ):
        check(setup.model, setup.loss, tokens()[:1], setup.private)


@pytest.mark.parametrize("way", ["opacus hooks", "flash-bk"])
def test_a_mask_that_is_ignored_is_found(way) -> None:
    def loss(model, ids_BT, mask_BT, labels_BT):
        return token_loss(model, ids_BT, torch.ones_like(mask_BT), labels_BT)

    batch = tokens(left=True)
    setup = WAYS[way](build_llama(), token_loss)
    assert "padding changes nothing" in check(*setup[:2], batch, setup.private).checked
    with pytest.raises(WrongTrainingError, match="its gradient depends on padded tokens; give"):
        check(setup.model, loss, batch, setup.private)


def test_padding_is_read_from_labels_where_there_is_no_mask() -> None:
    def loss(model, ids_BT, labels_BT):
        return token_loss(model, ids_BT, torch.ones_like(ids_BT), labels_BT)

    ids_BT, mask_BT, labels_BT = tokens()
    setup = with_dpprof(BookKeeping, build_llama(), loss)
    assert "padding changes nothing" in check(*setup[:2], (ids_BT, labels_BT), setup[2]).checked
    prompt = torch.where(torch.arange(T) < 2, -100, ids_BT)
    found = check(*setup[:2], (ids_BT, prompt), setup.private)
    assert found.unchecked["padding"] == "labels of -100 are not at the end of samples"
    found = check(*setup[:2], (ids_BT, labels_BT), setup[2], padding=mask_BT == 0)
    assert "padding changes nothing" in found.checked


def test_ghost_clipping_to_another_bound_is_found() -> None:
    setup = with_ghost(build_mlp(), points_loss, bound=2 * BOUND)
    with pytest.raises(WrongTrainingError, match=r"clipped to a bound of 1, .* one of 0\.5"):
        check(setup.model, setup.loss, points(), setup.private)


def test_ghost_clipping_without_its_criterion_is_found() -> None:
    setup = with_ghost(build_mlp(), points_loss)
    with pytest.raises(WrongTrainingError, match="not that of the criterion that Opacus wrapped"):
        check(setup.model, points_loss, points(), setup.private)


def test_a_step_of_the_optimizer_that_opacus_wraps_is_found() -> None:
    setup = with_hooks(build_mlp(), points_loss)

    def step(x, y):
        setup.private.zero_grad()
        points_loss(setup.model, x, y).mean().backward()
        setup.private.original_optimizer.step()

    with pytest.raises(WrongTrainingError, match="no sample's gradient is clipped"):
        check(setup.model, points_loss, points(), setup.private, step=step)


def test_a_step_that_splits_its_batch_passes() -> None:
    setup = with_hooks(build_mlp(), points_loss)

    def step(x, y):
        for at in range(0, B, 2):
            if at + 2 < B:
                setup.private.signal_skip_step()
            setup.private.zero_grad()
            points_loss(setup.model, x[at : at + 2], y[at : at + 2]).mean().backward()
            setup.private.step()

    found = check(setup.model, points_loss, points(), setup.private, step=step)
    assert found.max_relative_error < 1e-4


def test_samples_that_are_mixed_are_found() -> None:
    def loss(model, x, y):
        return points_loss(model, x - x.mean(0), y)

    setup = with_hooks(build_mlp(), loss)
    with pytest.raises(WrongTrainingError, match=r"loss of sample 0 is .* mixes samples"):
        check(setup.model, loss, points(), setup.private)


def test_an_empty_batch_that_fails_or_is_skipped_is_told() -> None:
    def loss(model, x, y):
        if not len(x):
            raise ValueError("no samples")
        return points_loss(model, x, y)

    setup = with_hooks(build_mlp(), loss)
    found = check(setup.model, loss, points(), setup.private)
    assert found.unchecked["empty batch"] == "not supported: ValueError: no samples"

    model = build_mlp()
    loop = ByHand(model, points_loss)

    def skipping(x, y):
        if len(x):
            loop.step(x, y)

    found = check(model, points_loss, points(), loop.mechanism, step=skipping)
    assert "reveals that it is empty" in found.unchecked["empty batch"]


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_opacus_may_listen_to_a_model_without_wrapping_it(mode) -> None:
    model = build_mlp()
    data = torch.utils.data.TensorDataset(*points())
    hooks, private, *criterion, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=SGD(model.parameters(), lr=0.1),
        criterion=nn.MSELoss(),
        data_loader=torch.utils.data.DataLoader(data, batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        grad_sample_mode=mode,
        wrap_model=False,
    )

    def loss(model, x, y):
        if not criterion:
            return points_loss(model, x, y)
        found = criterion[0](model(x), y)
        found.loss_per_sample = found.loss_per_sample.mean(1)
        return found

    found = check(model, loss, points(), private)
    assert found.max_relative_error < 1e-2
    assert "every trained parameter is in the optimizer" in found.checked
    hooks.cleanup()


def test_each_layers_own_bound_is_known() -> None:
    setup = with_dpprof(PerLayerClipping, build_mlp(), points_loss)
    assert check(*setup[:2], points(), setup.private).max_relative_error < 1e-2

    model = build_mlp()
    private = DPPerLayerOptimizer(
        SGD(model.parameters(), lr=0.1), max_grad_norm=[0.1, 0.2, 0.3, 0.4], **SETTINGS
    )
    assert check(GradSampleModule(model), points_loss, points(), private).parameters == 4


def test_a_batch_may_be_a_dictionary() -> None:
    x, y = points()
    setup = with_dpprof(BookKeeping, build_mlp(), points_loss)
    assert check(*setup[:2], {"y": y, "x": x}, setup.private).samples == B


@pytest.mark.parametrize("way", ["flash-bk", "opacus hooks", "opacus ghost"])
def test_it_leaves_everything_as_it_was(way) -> None:
    model, loss, private = WAYS[way](build_mlp(), points_loss)
    private.original_optimizer.param_groups[0]["momentum"] = 0.9
    counted = []
    private.attach_step_hook(counted.append)

    def train():
        private.zero_grad()
        value = loss(model, *points())
        value = value.mean() if way == "opacus hooks" else value
        private.clipping.backward(value) if way == "flash-bk" else value.backward()
        private.step()

    train()
    other = copy.deepcopy([p.detach() for p in model.parameters()])
    momenta = copy.deepcopy(private.original_optimizer.state_dict()["state"])
    gradients = [p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    check(model, loss, points(), private)

    assert len(counted) == 1
    assert torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, model.parameters(), other))
    assert all(map(torch.equal, [p.grad for p in model.parameters()], gradients))
    for at, one in private.original_optimizer.state_dict()["state"].items():
        assert torch.equal(one["momentum_buffer"], momenta[at]["momentum_buffer"])
    train()
    assert len(counted) == 2


def test_a_clipping_alone_is_checked_and_the_loop_goes_on() -> None:
    model = build_mlp()
    clipping = BookKeeping(model, BOUND)
    optimizer = NoisyOptimizer(SGD(trained(model), lr=0.1), clipping, **SETTINGS)

    found = check(model, points_loss, points(), clipping)

    assert set(found.unchecked) >= {"optimizer", "noise"}
    assert "the gradient is that of single samples, clipped" in found.checked
    clipping.backward(points_loss(model, *points()))
    optimizer.step()
    with pytest.raises(ValueError, match="give that as private"):
        check(model, points_loss, points(), clipping, step=optimizer.step)


def test_bad_arguments_are_refused() -> None:
    model, loss, private = with_hooks(build_mlp(), points_loss)
    x, y = points()
    with pytest.raises(TypeError, match=r"private must be an optimizer of Opacus, .* is a SGD"):
        check(model, loss, (x, y), private.original_optimizer)
    with pytest.raises(ValueError, match=r"at least two samples, samples first, and is \(1, 5\)"):
        check(model, loss, (x[:1], y[:1]), private)
    with pytest.raises(ValueError, match="give the loop's step"):
        check(model, loss, (x, y), Mechanism(private.original_optimizer, 1.0, 1.0, 4))
    with pytest.raises(ValueError, match="loss is random with dropout off"):
        check(model, lambda *batch: loss(*batch) * torch.rand(()), (x, y), private)
    with pytest.raises(ValueError, match="padding must be bool and as large as the tokens"):
        check(model, loss, (x, y), private, padding=torch.ones(2, 2, dtype=torch.bool))


def test_the_example_runs_and_says_what_is_guaranteed() -> None:
    module = sys.modules[check.__module__]
    (test,) = doctest.DocTestFinder(recurse=False).find(check, "check", module=module, globs={})

    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0
    assert "Guarantee:" in check.__doc__
    assert "it does not prove that there is none" in check.__doc__
