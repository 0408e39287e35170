"""Snakemake starts as many experiments at once as there are GPUs, and each has one alone."""

import pytest
from fake_gpus import environment

from dpprof.experiments.records.result import read_result

CONFIG = """
sweeps:
  several:
    model: tiny
    method: standard
    batch_size: [1, 2, 3, 4, 5, 6, 7, 8]
    seq_len: 4
    device: cuda
    instruments: test-meets
"""


@pytest.mark.slow
@pytest.mark.workflow
def test_four_gpus_have_four_experiments_at_once(checkout, tmp_path) -> None:
    """The experiments go on only when four of them are at work, each on a GPU of its own."""
    (met := tmp_path / "met").mkdir()
    checkout.environment = environment(tmp_path, 4, source=checkout.path / "src") | {
        "DPPROF_TEST_MARKER": str(met),
        "DPPROF_TEST_TOGETHER": "4",
    }
    (checkout.path / "config" / "config.yaml").write_text(CONFIG)
    checkout.snakemake("--cores", "8", "--resources", "gpu=4", "--until", "profile")

    written = (checkout.path / "results" / "test-meets").glob("*.json")
    results = [read_result(path) for path in written]
    assert [result.outcome for result in results] == ["ok"] * 8
    assert {result.provenance["settings"]["OMP_NUM_THREADS"] for result in results} == {"2"}
    used = [result.device["uuid"] for result in results]
    assert sorted(set(used)) == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
