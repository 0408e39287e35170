"""How float32 products are rounded."""

import pytest
import torch


@pytest.fixture
def tf32():
    """What ``dtype: tf32`` sets."""
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(usual)
