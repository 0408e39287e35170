"""What private loops do eagerly, they do as CUDA graphs: the same tests, captured."""

import sys
from pathlib import Path

import pytest
from fresh_process import run_captured

HERE = Path(__file__).parent
FILES = ("private_training", "private_trainer", "private_misuse", "schedules", "quiet", "company")
BEYOND = (
    "test_the_loop_in_the_documents_trains",  # a real GPU says how much memory it has
    "test_parts_have_the_size_that_is_given_or_found",
    "test_evaluation_and_bfloat16_run_as_usual",  # products in 16 bits with float32 results
)
"""What a CPU that stands for a GPU cannot run."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_tests_passes_with_graphs(name) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(HERE / f"test_{name}.py")]
    command += ["-k", " and ".join(f"not {test}" for test in BEYOND)]
    done = run_captured(command, DPPROF_TEST_GRAPHS="1")
    assert done.returncode == 0, done.stdout[-3000:]
