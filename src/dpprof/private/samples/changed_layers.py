"""Changes the outputs of layers for a while: by rounding errors, or in size."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_MOST_GAIN = 1e4
_LOUD = 2.0**7


@contextmanager
def _changed(
    model: nn.Module,
    change: Callable[[nn.Module, Tensor], Tensor],
    *,
    of: Callable[[Any], bool] = lambda _: True,
) -> Iterator[None]:
    """Change the outputs of layers with parameters inside the context, by what they got.

    This takes a hook of all modules: a head that is computed with its loss refuses its own hooks.
    """
    own = {
        module for module in model.modules() if any(True for _ in module.parameters(recurse=False))
    }

    def change_output(layer: nn.Module, inputs: Any, output: Any) -> Any:
        is_number = isinstance(output, Tensor) and output.is_floating_point()
        return change(layer, output) if is_number and layer in own and of(inputs) else output

    hook = nn.modules.module.register_module_forward_hook(change_output)
    try:
        yield
    finally:
        hook.remove()


def rounding_otherwise(model: nn.Module, seed: int) -> AbstractContextManager[None]:
    """Change the outputs of layers by two units in their last place."""
    generators: dict[torch.device, torch.Generator] = {}

    def change(layer: nn.Module, output: Tensor) -> Tensor:
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(seed)
        drawn = torch.empty_like(output, requires_grad=False)
        sign = drawn.bernoulli_(0.5, generator=generators[output.device]).mul_(2).sub_(1)
        return output * (1 + 2 * _unit_of(layer, output) * sign)

    return _changed(model, change)


def amplified(model: nn.Module) -> AbstractContextManager[None]:
    """Multiply the outputs of each layer so that its first ones have a mean square of one.

    In a model that begins its training, attention is nearly even and positions hardly matter.
    """
    gains: dict[nn.Module, float] = {}

    def change(layer: nn.Module, output: Tensor) -> Tensor:
        if layer not in gains:
            size = float(output.detach().float().square().mean().sqrt()) if output.numel() else 0.0
            gains[layer] = min(1 / size, _MOST_GAIN) if 0 < size < 1 else 1.0
        return output * gains[layer]

    return _changed(model, change)


def louder(model: nn.Module, count: int, places: Sequence[int]) -> AbstractContextManager[None]:
    """Multiply what the first layers return for some of ``count`` samples by a large number."""

    def change(_: nn.Module, output: Tensor) -> Tensor:
        if len(output) != count or count in output.shape[1:]:  # which axis is that of samples?
            return output
        gains = output.new_ones(count, *(1,) * (output.dim() - 1), requires_grad=False)
        gains[list(places)] = _LOUD
        return output * gains

    def reads_data(inputs: Any) -> bool:
        return not any(isinstance(x, Tensor) and x.requires_grad for x in inputs)

    return _changed(model, change, of=reads_data)


def _unit_of(layer: nn.Module, output: Tensor) -> float:
    """Return the relative unit in which a layer computes."""
    unit = float(torch.finfo(output.dtype).eps)
    if output.dtype != torch.float32:
        return unit
    precision = torch.get_float32_matmul_precision()
    is_tf32 = output.is_cuda and isinstance(layer, nn.modules.conv._ConvNd | nn.RNNBase)  # noqa: SLF001
    of_products = {"highest": unit, "high": 2.0**-11, "medium": 2.0**-8}[precision]
    return max(of_products, 2.0**-11 if is_tf32 else unit)
