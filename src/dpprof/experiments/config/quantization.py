"""Quantised frozen weights: the formats, and what a model's own config says of them.

Nothing here imports transformers or bitsandbytes, so planning stays fast.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

Quantization = Literal["nf4", "nf4-double", "fp4", "fp4-double", "int8"]
"""Formats of bitsandbytes; ``-double`` quantises the scales of blocks too (Dettmers et al. 2023,
"QLoRA")."""

QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
NONE = "none"
"""How weights that are not quantised are spelled."""

_USUAL_THRESHOLD = 6.0
"""What transformers takes for ``llm_int8_threshold`` where a config does not say."""


def read_quantization(stated: Any) -> Quantization | None:
    """Return the format that a config's ``quantization_config`` states.

    Raises:
        ValueError: It is another method, or an option by which samples would be mixed.
    """
    if not stated:
        return None
    if not isinstance(stated, Mapping):
        raise ValueError("quantization_config must be a mapping")  # noqa: TRY004 (pydantic's way)
    is_8bit, is_4bit = (bool(stated.get(f"load_in_{bits}bit")) for bits in (8, 4))
    method = stated.get("quant_method", "bitsandbytes" if is_8bit or is_4bit else "another method")
    if method != "bitsandbytes" or is_8bit == is_4bit:
        raise ValueError(
            f"its weights are quantised by {method}, and adapters are trained here over nf4, fp4 "
            "and int8 of bitsandbytes alone (load_in_4bit or load_in_8bit in quantization_config)"
        )
    skipped = stated.get("llm_int8_skip_modules") or []
    if not (isinstance(skipped, list | tuple) and all(isinstance(name, str) for name in skipped)):
        raise ValueError("its llm_int8_skip_modules must be a list of modules' names")
    return _read_8bit(stated) if is_8bit else _read_4bit(stated)


def _read_8bit(stated: Mapping[str, Any]) -> Quantization:
    threshold = stated.get("llm_int8_threshold", _USUAL_THRESHOLD)
    if threshold != 0:
        raise ValueError(
            f"its llm_int8_threshold is {threshold}: columns of a layer's input are then computed "
            "in 16 bits if one sample of the batch exceeds it, so samples depend on each other; "
            "write llm_int8_threshold: 0 in its quantization_config"
        )
    if stated.get("llm_int8_has_fp16_weight"):
        raise ValueError(
            "its llm_int8_has_fp16_weight keeps weights in 16 bits; write false, or leave "
            "quantization_config out"
        )
    return "int8"


def _read_4bit(stated: Mapping[str, Any]) -> Quantization:
    kind = stated.get("bnb_4bit_quant_type", "fp4")
    double = "-double" if stated.get("bnb_4bit_use_double_quant") else ""
    quantization = next((name for name in QUANTIZATIONS if name == f"{kind}{double}"), None)
    if quantization is None:
        raise ValueError(f"its bnb_4bit_quant_type is {kind!r}, and nf4 and fp4 are known")
    storage = stated.get("bnb_4bit_quant_storage", "uint8")
    if storage not in ("uint8", None):
        raise ValueError(
            f"its bnb_4bit_quant_storage is {storage}, which FullyShardedDataParallel needs alone; "
            "write uint8"
        )
    return quantization
