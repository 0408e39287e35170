"""The optimizers that an experiment can name."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from dpprof.experiments.config.experiment import Experiment
from dpprof.subjects.models.quantized import import_bitsandbytes


def make_optimizer(experiment: Experiment, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """Make an experiment's optimizer."""
    rate = experiment.learning_rate
    is_graph = experiment.execution == "graph"  # which counts steps on the device
    makers: dict[str, Callable[[], Optimizer]] = {
        "sgd": lambda: SGD(parameters, lr=rate),
        "sgd-momentum": lambda: SGD(parameters, lr=rate, momentum=0.9),
        "adafactor": lambda: Adafactor(parameters, lr=rate),
        "adamw": lambda: AdamW(parameters, lr=rate, capturable=is_graph),
        "adamw-fused": lambda: AdamW(parameters, lr=rate, capturable=is_graph, fused=True),
        "adamw-8bit": lambda: import_bitsandbytes().optim.AdamW8bit(parameters, lr=rate),
        "lion-8bit": lambda: import_bitsandbytes().optim.Lion8bit(parameters, lr=rate),
        "paged-adamw-8bit": lambda: _page(parameters, rate, bits=8),
        "paged-adamw-32bit": lambda: _page(parameters, rate, bits=32),
        "adamw-in-backward": lambda: step_in_backward(AdamW(parameters, lr=rate)),
        "paged-adamw-8bit-in-backward": lambda: step_in_backward(_page(parameters, rate, bits=8)),
        "lamb": lambda: Lamb(parameters, lr=rate),
    }
    return makers[experiment.optimizer]()


def _page(parameters: Sequence[nn.Parameter], rate: float, *, bits: int) -> Optimizer:
    """Make bitsandbytes' paged AdamW; on a CPU, which has no pages, the same with usual states."""
    paged = "" if parameters[0].device.type == "cpu" else "Paged"
    kind = getattr(import_bitsandbytes().optim, f"{paged}AdamW{bits}bit")
    optimizer: Optimizer = kind(parameters, lr=rate)
    return optimizer


def step_in_backward(optimizer: Optimizer) -> Optimizer:
    """Have an optimizer step each parameter once its gradient is whole, and free the gradient.

    So gradients of few parameters live at a time. PyTorch's tutorial on fusing the optimizer step
    into the backward pass, and torchtune's ``optimizer_in_bwd``, have an optimizer for each
    parameter; one that finds a single gradient computes and allocates the same.
    """

    def step_one(parameter: Tensor) -> None:
        optimizer.step()
        parameter.grad = None

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(step_one)
    return optimizer


class Lamb(Optimizer):
    """LAMB (You et al. 2020, algorithm 2), parameter by parameter: Adam's update, as long as it.

    Weights decay by 0.01 times the learning rate. Costs two states and three temporaries of a
    parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Change every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._change(parameter, group)

    def _change(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = 0
            state["mean"], state["square"] = map(torch.zeros_like, (parameter, parameter))
        state["step"] += 1
        state["mean"].lerp_(parameter.grad, 1 - first)
        state["square"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
        scale = (state["square"] / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        update = (state["mean"] / (1 - first ** state["step"])).div_(scale)
        update.add_(parameter, alpha=group["decay"])
        length, of_update = parameter.norm(), update.norm()
        ratio = torch.where((length > 0) & (of_update > 0), length / of_update, 1.0)
        parameter.add_(update.mul_(ratio), alpha=-group["lr"])
