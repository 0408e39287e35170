"""Opacus's own cases of single layers: clipped as a loop over samples clips them."""

import importlib
from collections import Counter
from pathlib import Path

import opacus
import pytest
import torch
from hypothesis import settings
from small_models import FLAT, gradients
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

pytestmark = pytest.mark.slow
EXAMPLES = 60
"""Of each test of Opacus's."""

BOUND = 1.0


@pytest.fixture(scope="module")
def cases():
    """Opacus's test classes, which draw the same examples every time."""
    settings.register_profile(
        "same", settings.get_profile("ci"), max_examples=EXAMPLES, database=None
    )
    before = settings.get_current_profile_name()
    settings.load_profile("same")  # a test has the settings that hold when it is defined
    folder = Path(opacus.__file__).parent / "tests" / "grad_samples"
    names = [f"opacus.tests.grad_samples.{one.stem}" for one in sorted(folder.glob("*_test.py"))]
    modules = [importlib.import_module(name) for name in names]
    settings.load_profile(before)
    common = importlib.import_module("opacus.tests.grad_samples.common").GradSampleHooks_test
    return [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, common) and kind is not common
    ]


def samples_of(x, batch_first: bool, chunk_method) -> list:
    """Split a batch into batches of one sample each."""
    if isinstance(x, PackedSequence):
        rows, lengths = pad_packed_sequence(x, batch_first=True)
        return [pack_sequence([row[:n]]) for row, n in zip(rows, lengths, strict=True)]
    if isinstance(x, torch.Tensor):
        return list(x.split(1, 0 if batch_first else 1))
    return list(chunk_method(x))


def losses_of(module, x, batch_first: bool) -> torch.Tensor:
    """Project the outputs of each sample onto a vector that is always the same."""
    y = module(*x) if type(x) is tuple else module(x)
    if isinstance(y, PackedSequence):
        y, batch_first = pad_packed_sequence(y, batch_first=True)[0], True
    y = (y if batch_first else y.transpose(0, 1)).flatten(1)
    return y @ torch.arange(1.0, y.shape[1] + 1, dtype=y.dtype).sin()


def assert_exact(module, x, batch_first: bool, chunk_method) -> None:
    """Clip a batch in each way as its samples are clipped one at a time."""
    samples = []
    for one in samples_of(x, batch_first, chunk_method):
        losses_of(module, one, batch_first).sum().backward()
        samples.append(gradients(module))
        module.zero_grad()
    norms = torch.tensor([one.norm() for one in samples], dtype=torch.float64)
    total = sum(one * min(1, BOUND / (one.norm() + 1e-6)) for one in samples)
    for way in FLAT:
        clipping = way(module, BOUND, batch_second=() if batch_first else [""])
        clipping.backward(losses_of(module, x, batch_first))
        assert torch.allclose(clipping.sample_norms, norms, rtol=1e-9, atol=1e-12)
        assert (gradients(module) - total).norm() <= 1e-9
        clipping.remove()
        module.zero_grad()


def in_float64(x):
    if type(x) is tuple:
        return tuple(map(in_float64, x))
    return x.double() if not isinstance(x, torch.Tensor) or x.is_floating_point() else x


def test_opacus_own_cases_are_exact(cases, monkeypatch) -> None:
    exact: Counter[str] = Counter()

    def run_test(self, x, module, batch_first=True, chunk_method=iter, **_) -> None:
        assert_exact(module.double(), in_float64(x), batch_first, chunk_method)
        exact[type(self).__name__] += 1

    for kind in cases:
        monkeypatch.setattr(kind, "run_test", run_test)
        for name in dir(kind):
            if name.startswith("test_"):
                torch.manual_seed(0)
                getattr(kind(name), name)()
    assert set(exact) == {kind.__name__ for kind in cases}
    assert exact.total() > 500
