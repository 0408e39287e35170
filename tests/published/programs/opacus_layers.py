"""Two linear layers trained with Opacus, with the increase of memory by stage.

Shape legend: B samples.
"""

from itertools import pairwise

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from published.programs.operators import take_handles
from published.recording import Tape
from torch import Tensor, nn
from torch.nn import functional

_WIDTHS = 5120, 2560, 1280
_PRIVATE = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairwise(_WIDTHS)))


def sgd(tape: Tape, *, B: int) -> None:
    take_handles()
    model = _model()
    x, y = torch.empty(B, _WIDTHS[0]), torch.empty(B, dtype=torch.int64)
    tape.mark("begin")
    logits = model(x)
    functional.cross_entropy(logits, y).backward()
    tape.mark("backward done")
    del logits  # a variable holds it until here


def per_sample(tape: Tape, *, B: int) -> None:
    """Keep gradients of single samples."""
    take_handles()
    model = GradSampleModule(_model())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DPOptimizer(sgd, **_PRIVATE, expected_batch_size=B)
    x, y = torch.empty(B, _WIDTHS[0]), torch.empty(B, dtype=torch.int64)
    loss = functional.cross_entropy(model(x), y)
    tape.mark("begin")
    loss.backward()
    tape.mark("backward done")
    optimizer.step()
    tape.mark("stepped")


def ghost(tape: Tape, *, B: int) -> None:
    """Find norms by ghost clipping, and weigh the loss."""
    take_handles()
    model = GradSampleModuleFastGradientClipping(
        _model(), max_grad_norm=1.0, use_ghost_clipping=True
    )
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DPOptimizerFastGradientClipping(sgd, **_PRIVATE, expected_batch_size=B)
    x, y = torch.empty(B, _WIDTHS[0]), torch.empty(B, dtype=torch.int64)
    losses: Tensor = functional.cross_entropy(model(x), y, reduction="none")
    tape.mark("begin")
    losses.mean().backward(retain_graph=True)
    tape.mark("backward done")
    optimizer.zero_grad()
    weights = model.get_clipping_coef()
    model.disable_hooks()
    (weights * losses).sum().backward()
    model.enable_hooks()
    tape.mark("second backward done")
    optimizer.step()
    tape.mark("stepped")
