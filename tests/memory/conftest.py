"""What tests of memory share."""

import pytest


@pytest.fixture
def one_thread():
    """Run kernels in one thread, as each rank does: their workspaces depend on it."""
    import torch  # noqa: PLC0415 (pytest loads this file before the settings of threads are made)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
