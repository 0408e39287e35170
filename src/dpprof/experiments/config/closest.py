"""What people train with that cannot be asked for, and the closest question to each."""

import re
from collections.abc import Mapping
from typing import Any

_CLOSEST: Mapping[tuple[str, str], str] = {
    ("quantization", "gptq|awq|hqq"): "nf4, whose weights have 4 bits too, and a scale for 64",
    ("dtype", "fp8|float8"): "bfloat16: float8 spares time, and keeps activations in 16 bits",
    ("head", "liger|unsloth|fused|cut"): "chunked, which has no logits of all tokens either",
    ("loss", "liger|unsloth|fused|cut"): "head chunked, which has no logits of all tokens either",
    ("attention", "flash|xformers|flex"): "sdpa, by which PyTorch takes its own flash attention",
    ("parallel", "fsdp1|zero|deepspeed"): "fsdp, PyTorch's FSDP2, without buffers of whole groups",
    ("padding", "pack"): "packed",
    ("task", "qa|span|squad"): "question-answering",
    ("task", "dpo|grpo|kto|orpo|ppo|reward|preference"): "causal-lm, where a pair is two samples",
    ("lora", "dora"): "use_dora=true, beside rank",
    ("optimizer", "paged"): "paged-adamw-8bit or paged-adamw-32bit",
    ("optimizer", "lion"): "sgd-momentum, with one state for each element too",
    ("optimizer", "galore"): "adafactor or adamw-8bit, whose states are small too",
    ("optimizer", "backward|bwd"): "adamw-in-backward, which frees each gradient as soon",
    ("optimizer", "adam"): "adamw, with two states for each element",
    (
        "checkpointing",
        "offload",
    ): "non-reentrant, which frees activations too, and computes them again",
    ("model", "lstm|gru|rnn"): "char-lstm or ptb-lstm-small, or a mapping of kind and sizes",
    ("checkpointing", "selective|partial|every"): "none and non-reentrant, which bound it",
}
"""The closest question by the key, and by a pattern of what is asked for."""


def find_closest(key: str, asked: Any) -> str:
    """Return the closest question to what is not allowed, to end its sentence; else nothing.

    Example:
        >>> find_closest("quantization", "gptq")
        '; closest: nf4, whose weights have 4 bits too, and a scale for 64'
    """
    if not isinstance(asked, str):
        return ""
    texts = [
        text
        for (name, pattern), text in _CLOSEST.items()
        if name in key.split(".") and re.search(pattern, asked.lower())
    ]
    return f"; closest: {texts[0]}" if texts else ""
