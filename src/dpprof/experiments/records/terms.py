"""The terms of results: outcomes, phases, components, evidence and op kinds."""

from typing import Literal, get_args

Outcome = Literal["ok", "oom", "unsupported", "timeout", "killed", "crashed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

Phase = Literal["setup", "forward", "backward", "second_backward", "clip", "noise", "step"]
PHASES: tuple[Phase, ...] = get_args(Phase)

Component = Literal[
    "parameters",
    "quantization_scales",
    "dequantized_weights",
    "gradients",
    "optimizer_state",
    "saved_activations",
    "dp_activations",
    "output_gradients",
    "per_sample_gradients",
    "norm_samples",
    "gram_matrices",
    "summed_gradients",
    "noise",
    "unsharded_parameters",
    "unsharded_gradients",
    "communication_buffers",
    "inputs",
    "logits_and_loss",
    "workspace",
    "unattributed",
]
COMPONENTS: tuple[Component, ...] = get_args(Component)

Evidence = Literal["identity", "birthplace", "phase"]
EVIDENCE: tuple[Evidence, ...] = get_args(Evidence)

OpKind = Literal[
    "gemm",
    "attention",
    "einsum",
    "norm",
    "clip",
    "optimizer",
    "elementwise",
    "reduce",
    "indexing",
    "random",
    "copy",
    "communication",
    "other",
]
OP_KINDS: tuple[OpKind, ...] = get_args(OpKind)

Basis = Literal["measured at this shape", "interpolated", "extrapolated", "data sheet"]
"""What the predicted time of an operator rests on, the surest first."""

BASES: tuple[Basis, ...] = get_args(Basis)
