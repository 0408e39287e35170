"""The optimizers that an experiment may have."""

from typing import Literal

Optimizer = Literal[
    "adamw",
    "adamw-fused",
    "adamw-8bit",
    "paged-adamw-8bit",
    "paged-adamw-32bit",
    "adamw-in-backward",
    "paged-adamw-8bit-in-backward",
    "lion-8bit",
    "adafactor",
    "lamb",
    "sgd",
    "sgd-momentum",
]

BITSANDBYTES = (
    *("adamw-8bit", "lion-8bit"),
    *("paged-adamw-8bit", "paged-adamw-32bit", "paged-adamw-8bit-in-backward"),
)
"""Optimizers of bitsandbytes."""

IN_BACKWARD = ("adamw-in-backward", "paged-adamw-8bit-in-backward")
"""Optimizers that step each parameter in backward."""

COUNTS_ON_HOST = (*BITSANDBYTES, *IN_BACKWARD, "adafactor", "lamb")
"""Optimizers that count their steps on the host, and keep states of whole parameters."""
