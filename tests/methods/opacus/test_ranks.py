"""Opacus's methods on several ranks make the update of the joint batch, or say what they cannot."""

import opacus_ranks
import pytest
import torch
from factory import make_experiment
from opacus.grad_sample import GradSampleModuleFastGradientClippingFSDP
from rank_pool import RankPool
from snapshots import assert_sentences, refusals_of

from dpprof.experiments.config import registry
from dpprof.predict.estimate import estimate
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.models.build import build_model

pytestmark = pytest.mark.filterwarnings("ignore")

SUPPORTED = [
    ("opacus-hooks", "ddp"),
    ("opacus-functorch", "ddp"),
    ("opacus-ew", "ddp"),
    ("opacus-per-layer", "ddp"),
    ("opacus-fast-gradient-clipping", "ddp"),
    ("opacus-ghost", "ddp"),
    ("opacus-ghost", "fsdp"),
]
QUICK = [("opacus-hooks", "ddp"), ("opacus-per-layer", "ddp"), ("opacus-ghost", "fsdp")]
"""Gradients of samples, of layers, and norms alone; Opacus's own rules are those of one process."""

GPT2 = {"hf": "tiny-gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
UNTIED = {**GPT2, "tie_word_embeddings": False}
LLAMA = {"hf": "tiny-llama", "tie_word_embeddings": False}
OTHERS = [
    ("opacus-hooks", "ddp", {"model": GPT2}),
    ("opacus-functorch", "ddp", {"model": GPT2}),
    ("opacus-per-layer", "ddp", {"model": GPT2}),
    ("opacus-fast-gradient-clipping", "ddp", {"model": GPT2}),
    ("opacus-ghost", "ddp", {"model": UNTIED}),
    ("opacus-ghost", "fsdp", {"model": UNTIED}),
    ("opacus-ghost", "fsdp", {"model": UNTIED, "lora": "rank=2"}),
    ("opacus-ghost", "fsdp", {"model": LLAMA}),
    ("opacus-ghost", "fsdp", {"trainable": "bias"}),
    ("opacus-ghost", "fsdp", {"checkpointing": "reentrant"}),
    ("opacus-hooks", "ddp", {"checkpointing": "reentrant"}),
]


@pytest.fixture
def pool(pools) -> RankPool:
    return pools[2]


@pytest.mark.parametrize(
    ("method", "kind", "fields"),
    [
        *((method, kind, {}) for method, kind in QUICK),
        *(pytest.param(*one, {}, marks=pytest.mark.slow) for one in SUPPORTED if one not in QUICK),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS),
    ],
)
def test_weights_are_those_of_the_joint_batch(pool, method, kind, fields) -> None:
    ranks = pool.compute(opacus_ranks.train_rank, method=method, kind=kind, **fields)
    alone, norms = opacus_ranks.train_alone(2, method=method, **fields)

    references = [alone]
    if not fields and method != "opacus-per-layer":
        references.append(opacus_ranks.train_alone(2, method="microbatch")[0])
    for weights, _ in ranks:
        for reference in references:
            assert weights.keys() == reference.keys()
            for name, expected in reference.items():
                torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-9)
    assert norms.max() > opacus_ranks.BOUND  # some are clipped
    torch.testing.assert_close(torch.cat([own for _, own in ranks]), norms, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("opacus-per-layer", "ddp"),
        ("opacus-ghost", "fsdp"),
        *(
            pytest.param(method, "ddp", marks=pytest.mark.slow)
            for method in ("opacus-hooks", "opacus-ghost")
        ),
    ],
)
def test_the_step_is_that_of_opacus_privacy_engine(pool, method, kind) -> None:
    for own, opacus in pool.compute(opacus_ranks.step_apart_and_whole, method, kind):
        torch.testing.assert_close(own, opacus, rtol=0, atol=0)


@pytest.mark.parametrize(("method", "kind"), [("opacus-hooks", "ddp"), ("opacus-ghost", "fsdp")])
def test_each_element_gets_the_noise_of_one_process_with_the_joint_batch(
    pool, method, kind
) -> None:
    (noise, sharded), (other, _) = pool.compute(opacus_ranks.draw_noise, method, kind)

    assert torch.equal(noise, other)
    assert sharded == (kind == "fsdp")
    # sigma C / (2 ranks x 2 samples), from about 26,000 values: one standard error is 0.4 %.
    assert noise.std().item() == pytest.approx(3.0 * opacus_ranks.BOUND / 4, rel=0.03)
    halves = torch.stack(noise[: len(noise) // 2 * 2].chunk(2))
    assert abs(float(torch.corrcoef(halves)[0, 1])) < 0.05


TIED = "Opacus: Parameter tying is not supported with FSDP"


def test_what_opacus_cannot_is_refused() -> None:
    def distribute(method, kind, **fields) -> None:
        parallel = {"kind": kind, "world_size": 2}
        experiment = make_experiment(method=method, parallel=parallel, **fields)
        model = build_model(experiment)
        registry.load("methods", method).distribute(model, experiment, opacus_ranks.CPU)

    assert_sentences("methods/opacus on ranks", refusals_of(distribute))


def test_opacus_still_fails_where_a_parameter_has_fewer_rows_than_ranks(pool) -> None:
    for error in pool.run(opacus_ranks.train_few_rows):
        assert "in-place operations that require placement changes" in str(error)


def test_a_layer_that_is_used_twice_is_refused_under_fsdp_in_opacus_words(pool) -> None:
    for error in pool.run(opacus_ranks.use_a_layer_twice):
        assert isinstance(error, UnsupportedError)
        assert TIED in str(error)


def test_bounds_of_opacus_adaptive_clipping_still_move_apart(pool) -> None:
    # Equal ones are Opacus's repair: then opacus-adaptive has to support ddp.
    first, second = pool.compute(opacus_ranks.adapt_bounds)
    assert first != second


def test_opacus_still_ignores_that_ghost_clipping_is_off_under_fsdp() -> None:
    module = GradSampleModuleFastGradientClippingFSDP(
        torch.nn.Linear(2, 2), use_ghost_clipping=False
    )
    assert module.use_ghost_clipping


@pytest.mark.parametrize(
    ("method", "kind", "fields"),
    [
        ("opacus-ghost", "fsdp", {}),
        *(pytest.param(*one, {}, marks=pytest.mark.slow) for one in SUPPORTED[:-1]),
        pytest.param("opacus-ghost", "fsdp", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("opacus-ghost", "fsdp", {"model": LLAMA}, marks=pytest.mark.slow),
        pytest.param("opacus-hooks", "ddp", {"model": GPT2}, marks=pytest.mark.slow),
    ],
)
def test_estimate_is_the_ledger_of_rank_0(pool, method, kind, fields) -> None:
    usual = {"method": method, "parallel": {"kind": kind, "world_size": 2}, "optimizer": "adamw"}
    experiment = make_experiment(**usual | {"noise_multiplier": 1.0} | fields)
    ledger, other = pool.compute(opacus_ranks.record, experiment.model_dump_json())
    predicted = opacus_ranks.tell(estimate(experiment, lambda _: None))

    assert predicted == ledger
    assert other[0] <= ledger[0]  # it draws no noise with ddp, or has the smaller shards
