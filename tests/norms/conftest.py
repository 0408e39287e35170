"""How float32 products are rounded, and a process in which Triton interprets its programs."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch


@pytest.fixture
def tf32():
    """What ``dtype: tf32`` sets."""
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(usual)


def interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read as triton is imported


@pytest.fixture(scope="module")
def interpreting():
    """Run a function in a process that interprets Triton, which decides that as it is imported."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=interpret) as process:
        yield lambda function, *arguments, **named: process.submit(
            function, *arguments, **named
        ).result()
