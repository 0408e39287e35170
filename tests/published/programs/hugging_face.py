"""Fine-tuning of a Hugging Face model in a loop of PyTorch's, with the model's own loss."""

from typing import Any

import torch
from published.recording import Tape
from transformers import masking_utils
from transformers.integrations import sdpa_attention

from dpprof.models.build import build_model
from dpprof.spec.experiment import Experiment
from dpprof.system.substitutes import substitute


def training(tape: Tape, *, steps: int, batch_size: int, seq_len: int, **fields: Any) -> None:
    """Train some steps; each frees the model's outputs at its end.

    Keys and values are repeated for all heads of queries, where the model's share them. No mask is
    made but by eager attention, as transformers decides for real tensors.

    Args:
        tape: Marks the phases of the last step, and its end.
        steps: How many.
        batch_size: Samples.
        seq_len: Tokens of each.
        fields: Of the experiment that says what is built.
    """
    sizes = {"batch_size": batch_size, "seq_len": seq_len}
    fixed = {"method": "standard", "device": "cuda", "checkpointing": "non-reentrant"}
    experiment = Experiment.model_validate({**fixed, **sizes, **fields})
    model = tape.load(build_model, experiment).model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.empty(batch_size, seq_len, dtype=torch.int64)
    with (
        substitute(sdpa_attention, "use_gqa_in_sdpa", lambda *_, **__: False),
        substitute(masking_utils, "find_packed_sequence_indices", lambda _: None),
        substitute(masking_utils, "is_tracing", lambda _=None: False),
    ):
        for _ in range(steps):
            _step(tape, model, optimizer, ids)


def _step(tape: Tape, model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    tape.mark("forward")
    out = model(input_ids=ids, labels=ids)
    tape.mark("backward")
    with tape.phase("backward"):
        out.loss.backward()
    tape.mark("optimizer")
    with tape.phase("step"):
        optimizer.step()
    tape.mark("stepped")
    optimizer.zero_grad()
