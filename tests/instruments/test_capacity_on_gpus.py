"""What ``capacity`` names runs within a GPU's memory as the allocator places it."""

import pytest
from factory import make_experiment

from dpprof.instruments import capacity, memory
from dpprof.records.step_costs import Allocator

GPT2 = {"vocab_size": 50257, "d_model": 768, "layers": 12, "heads": 12}
LONG = {"model": "1b", "seq_len": 2048, "dtype": "bfloat16"}
CASES = [
    pytest.param(
        {"model": GPT2, "method": "opacus-hooks", "seq_len": 512, "target": "l4"}, id="l4"
    ),
    *(
        pytest.param(LONG | {"method": method, "target": target}, id=f"{target}-{method}")
        for target in ("h200", "h100")
        for method in ("standard", "opacus-ghost", "flash-bk")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("fields", CASES)
def test_the_largest_batch_runs_and_one_sample_more_does_not(fields: dict[str, object]) -> None:
    told = capacity.measure(make_experiment(device="cuda", **fields), lambda _: None).capacity

    def place(batch_size: int) -> Allocator:
        experiment = make_experiment(device="cuda", batch_size=batch_size, **fields)
        allocator = memory.estimate(experiment, lambda _: None).memory.allocator
        assert allocator is not None
        return allocator

    assert told is not None
    assert place(told.batch_size).fits
    assert not place(told.batch_size + 1).fits
    assert told.safe_batch_size is not None
    assert place(told.safe_batch_size).retries == 0


@pytest.mark.slow
def test_gpt2_small_with_hooks_strands_gigabytes_on_an_l4() -> None:
    """By size alone 24 samples fit; the allocator runs out of memory from 17 on."""
    fields = {"model": GPT2, "method": "opacus-hooks", "seq_len": 512, "target": "l4"}
    found = {
        batch_size: memory.estimate(
            make_experiment(device="cuda", batch_size=batch_size, **fields), lambda _: None
        ).memory.allocator
        for batch_size in (16, 17)
    }
    assert found[16].fits
    assert found[16].retries == 0
    assert not found[17].fits
    assert found[17].allocated_bytes < found[17].limit_bytes - 5 * 2**30
    assert found[17].expandable_reserved_bytes < found[17].limit_bytes
