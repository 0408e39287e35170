"""Quantised frozen weights of linear layers, by bitsandbytes.

As transformers and peft prepare them: the layers that transformers would quantise are replaced by
bitsandbytes', and their weights, which are random here, are quantised in the dtype that the
experiment computes in. Embeddings, norms and the head stay in float32, as peft's
``prepare_model_for_kbit_training`` casts them.
"""

import functools
import importlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.private.allocation_marks import allocates
from dpprof.private.errors import UnsupportedError
from dpprof.private.substitutes import substitute

# As it is imported, by peft too, it tells of kernels that it looks for.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


@functools.cache
def import_bitsandbytes() -> Any:
    """Import bitsandbytes, whose functions that dequantise are then known as such.

    Raises:
        UnsupportedError: It is missing.
    """
    try:
        bitsandbytes = importlib.import_module("bitsandbytes")
        products = importlib.import_module("bitsandbytes.autograd._functions")
    except ImportError as error:
        raise UnsupportedError(
            f"quantization, and optimizer adamw-8bit, need dpprof[quantization]: {error}"
        ) from error
    dequantizing = (
        *(bitsandbytes.functional.dequantize_4bit, bitsandbytes.functional.dequantize_blockwise),
        *(products.matmul_4bit, products.MatMul4Bit.forward, products.MatMul4Bit.backward),
        products.MatMul8bitLt.backward,
        *(products.MatMul8bitFp.forward, products.MatMul8bitFp.backward),
    )
    for function in dequantizing:
        allocates("dequantized_weights")(function)
    for signed in (True, False):  # before predictions replace what computes it
        _find_dynamic_map(signed=signed)
    return bitsandbytes


def quantize(model: Any, experiment: Experiment) -> None:
    """Quantise the linear layers of a Hugging Face model but its head, and freeze everything.

    The model has float weights, real, fake or on the meta device.

    Raises:
        UnsupportedError: bitsandbytes is missing, or the model has no such layer.
    """
    bitsandbytes = import_bitsandbytes()
    from peft import prepare_model_for_kbit_training  # noqa: PLC0415 (an extra)
    from transformers.quantizers.auto import AutoHfQuantizer  # noqa: PLC0415 (the same)

    settings = _settings(experiment)
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    floats = dict(model.named_modules())
    with _disable_current_modes():  # it makes parameters of a class that no fake tensor can have
        quantizer.preprocess_model(model=model, device_map=None)
    kinds = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)
    replaced = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}
    if not replaced:
        raise UnsupportedError(
            f"quantization {experiment.base_format} finds no linear layer beside the head"
        )
    maps = {"dynamic": make_dynamic_map()}
    with substitute(bitsandbytes.functional, "name2qmap", maps):
        for name, layer in replaced.items():
            float_layer = floats.pop(name)
            weight = float_layer.weight.detach()
            is_transposed = type(float_layer).__name__ == "Conv1D"
            _fill(layer, weight.T.contiguous() if is_transposed else weight, experiment)
            layer.bias = float_layer.bias
    quantizer.postprocess_model(model)
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def _settings(experiment: Experiment) -> Any:
    """Return the ``BitsAndBytesConfig`` of an experiment."""
    from transformers import BitsAndBytesConfig  # noqa: PLC0415 (an extra)

    assert isinstance(experiment.model, Architecture)
    stated = experiment.model.config.get("quantization_config") or {}
    skipped = {"llm_int8_skip_modules": stated.get("llm_int8_skip_modules")}
    if experiment.base_format == "int8":
        # Any other threshold has a sample's outliers change how the others are computed.
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0, **skipped)
    kind, _, double = str(experiment.base_format).partition("-")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=bool(double),
        bnb_4bit_compute_dtype=_computes_in(experiment),
        **skipped,
    )


def _computes_in(experiment: Experiment) -> torch.dtype:
    """Return the dtype of weights before they are quantised, and of their products."""
    dtype: torch.dtype = getattr(torch, experiment.dtype, torch.float32)  # tf32 is float32
    return dtype


def _fill(layer: Any, weight: Tensor, experiment: Experiment) -> None:
    """Give a layer of bitsandbytes a weight, quantised."""
    functional = import_bitsandbytes().functional
    own = {name: value for name, value in vars(layer.weight).items() if name != "data"}
    if experiment.base_format == "int8":
        packed, scales, _ = functional.int8_vectorwise_quant(weight.half())
        own |= {"CB": packed, "SCB": scales}
    else:
        packed, layer.quant_state = functional.quantize_4bit(
            weight.to(_computes_in(experiment)),
            compress_statistics=own["compress_statistics"],
            quant_type=own["quant_type"],
        )
        own |= {"quant_state": layer.quant_state, "module": layer, "bnb_quantized": True}
    if not isinstance(packed, FakeTensor):
        layer.weight = type(layer.weight)(packed, requires_grad=False, **own)
        return
    layer.weight = nn.Parameter(packed, requires_grad=False)
    vars(layer.weight).update(own)


def make_dynamic_map(signed: bool = True, *_: Any, **__: Any) -> Tensor:
    """Return the 256 values of bitsandbytes' 8-bit numbers; (256,) float32, fake under a mode."""
    return torch.tensor(_find_dynamic_map(signed=signed), dtype=torch.float32)


@functools.cache
def _find_dynamic_map(*, signed: bool) -> list[float]:
    """Compute them apart from any mode, because it needs elements."""
    functional = importlib.import_module("bitsandbytes.functional")
    with _disable_current_modes(), torch.device("cpu"):
        values: list[float] = functional.create_dynamic_map(signed=signed).tolist()
    return values


def is_quantized(parameter: Tensor) -> bool:
    """Tell whether a parameter is a quantised weight of bitsandbytes."""
    return hasattr(parameter, "quant_state") or hasattr(parameter, "SCB")


def follow_weights(model: nn.Module) -> None:
    """Put what bitsandbytes keeps beside its int8 weights where these are.

    ``Module.to`` moves a weight alone: its scales, and the tensor that products read, stay behind.
    """
    for parameter in model.parameters():
        if hasattr(parameter, "SCB"):
            vars(parameter).update(CB=parameter.data, SCB=parameter.SCB.to(parameter.device))


def count_elements(parameter: Tensor) -> int:
    """Return the elements of a parameter, or of the weight that it stands for.

    Two elements of 4 bits share a byte.
    """
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(state.shape.numel())


def count_unquantized_experts(model: nn.Module, experiment: Experiment) -> int:
    """Return the bytes of frozen experts that a quantised model holds as they were; 0 for another.

    Weights of experts that are one parameter, (experts, d, p), are no linear layer, and
    transformers 5 leaves them alone.
    """
    if experiment.base_format is None:
        return 0
    layers = (layer for layer in model.modules() if not isinstance(layer, nn.Conv1d))
    own = (parameter for layer in layers for parameter in layer.parameters(recurse=False))
    fused = {p for p in own if p.dim() == 3 and p.is_floating_point()}  # noqa: PLR2004
    return sum(p.nbytes for p in fused)


def scales_of(layer: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors by which a layer's quantised weight is scaled; no parameter holds them."""
    weight = layer._parameters.get("weight")  # noqa: SLF001 (adapters have a property of this name)
    state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
    if state is None and not hasattr(weight, "SCB"):
        return
    for holder in (state, getattr(state, "state2", None), getattr(layer, "state", None), weight):
        for name in ("absmax", "code", "offset", "SCB"):
            scale = vars(holder).get(name) if holder is not None else None
            if isinstance(scale, Tensor):
                yield scale
