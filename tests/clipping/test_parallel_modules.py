"""Parameters beside layers, and modules that run as one layer, are exact under ``fully_shard``."""

import itertools

import parallel_modules
import pytest
from parallel_training import WAYS

from dpprof.private import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore")

AS_ONE = {"sorted": {"as_one": ["blocks.*"]}}
QUICK = [
    ("added", "flash", True),
    ("beside", "flash-bk", False),
    ("product", "flash-bk", False),
    ("sorted", "flash", False),
]
REFUSED_IN_CHECKPOINTS = (
    *("beside", "product", "T5ForConditionalGeneration", "SwinForImageClassification"),
)
EVERY = [
    (name, way, checkpointed)
    for name in (*parallel_modules.MODULES, *parallel_modules.TRANSFORMERS)
    for way, checkpointed in itertools.product(WAYS, (False, True))
    if not (name in REFUSED_IN_CHECKPOINTS and checkpointed)
]


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in EVERY if one not in QUICK)],
)
def test_sums_are_those_of_a_loop_over_samples(pools, case) -> None:
    name, way, checkpointed = case
    settings = AS_ONE.get(name, {})
    for error in pools[2].compute(parallel_modules.clip, name, way, settings, checkpointed):
        assert error < 1e-10


def test_ranks_verify_a_batch_again_that_looks_otherwise_on_one(pools) -> None:
    (told, verified), (told_other, verified_other) = pools[2].compute(
        parallel_modules.clip_as_many_samples_as_heads
    )
    assert "mixes samples, or another axis comes first" in told
    assert "another rank found that samples are mixed" in told_other
    assert verified
    assert verified_other


def test_a_way_that_comes_too_late_to_be_verified_is_refused_on_all_ranks(pools) -> None:
    one, other = pools[2].run(parallel_modules.clip_in_a_late_way)
    for error in (one, other):
        assert "whether code outside of layers was verified differs" in str(error)


@pytest.mark.parametrize("as_one", [[], ["blocks.*"]])
def test_a_module_whose_parts_are_sharded_by_themselves_does_not_run_as_one(pools, as_one) -> None:
    for error in pools[2].run(parallel_modules.shard_inside, "product", as_one):
        assert isinstance(error, UnsupportedError)
        assert "runs as one layer, and fully_shard shards modules in it" in str(error)
