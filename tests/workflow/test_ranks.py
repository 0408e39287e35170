"""A sweep may have experiments of several ranks beside those of one process."""

from pathlib import Path

import pytest
from checkout import copy_checkout

CONFIG = """
defaults: {model: tiny, batch_size: 2, seq_len: 16, device: cpu, warmup_steps: 2, timed_steps: 2}
sweeps:
  ranks:
    method: [standard, flash-bk]
    parallel: [null, {kind: fsdp, world_size: 2, reshard_after_forward: true}]
    instruments: [clean, memory, estimate]
"""


@pytest.mark.slow
@pytest.mark.workflow
def test_ranks_are_measured_predicted_and_reported(tmp_path: Path) -> None:
    training = copy_checkout(tmp_path / "checkout")
    (training.path / "config" / "config.yaml").write_text(CONFIG)
    training.snakemake("--cores", "2")

    runs = training.table("runs")
    assert (len(runs), set(runs["outcome"])) == (12, {"ok"})
    peaks = runs[runs["instrument"] != "clean"].groupby("experiment_id")["peak_allocated_bytes"]
    assert len(peaks) == 4
    assert (peaks.nunique() == 1).all()  # what was predicted is what was recorded
    ranks = training.table("ranks")
    assert sorted(ranks["rank"]) == [0, 0, 0, 0, 1, 1, 1, 1]  # clean and memory, two methods
    experiments = training.table("experiments").set_index(["method", "parallel"])
    sent = experiments.xs("fsdp (resharding) x2", level="parallel")["sent_beyond_bytes"]
    assert dict(sent) == {"standard": 0, "flash-bk": 112}  # 14 numbers that ranks compare
    assert "## Communication" in training.report()
