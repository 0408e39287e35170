"""Fine-tuning of Hugging Face models, in a loop of PyTorch's or as transformers' Trainer does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from published.recording import Tape
from torch import Tensor
from torch.nn import functional
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
    model = _load(tape, {"checkpointing": "non-reentrant", **fields}, batch_size, seq_len)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.empty(batch_size, seq_len, dtype=torch.int64)
    with substitute(sdpa_attention, "use_gqa_in_sdpa", lambda *_, **__: False), _real_masks():
        for _ in range(steps):
            _step(tape, model, optimizer, ids)


def _load(tape: Tape, fields: dict[str, Any], batch_size: int, seq_len: int) -> Any:
    fixed = {"method": "standard", "device": "cuda", "batch_size": batch_size, "seq_len": seq_len}
    return tape.load(build_model, Experiment.model_validate({**fixed, **fields})).model.train()


@contextmanager
def _real_masks() -> Iterator[None]:
    """Let transformers decide on masks as for real tensors."""
    with (
        substitute(masking_utils, "find_packed_sequence_indices", lambda _: None),
        substitute(masking_utils, "is_tracing", lambda _=None: False),
    ):
        yield


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


def trainer(tape: Tape, *, loss: str, batch_size: int, seq_len: int, **fields: Any) -> None:
    """Train two steps as the Trainer of early 2025, which frees a model's outputs in forward.

    Args:
        tape: Marks the last step.
        loss: How the model of that time made its loss: ``in 16 bits``, ``float32``, or ``float32
            beside 16 bits`` where it kept both logits meanwhile. All copy what they shift.
        batch_size: Samples.
        seq_len: Tokens of each.
        fields: Of the experiment that says what is built.
    """
    model = _load(tape, {"checkpointing": "reentrant", **fields}, batch_size, seq_len)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = torch.empty(batch_size, seq_len, dtype=torch.int64)
    with _real_masks():
        for step in range(2):
            if step:
                tape.mark("last step")
            value = _old_loss(model, ids, loss)
            with tape.phase("backward"):
                value.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            with tape.phase("step"):
                optimizer.step()
            optimizer.zero_grad()
            del value


def _old_loss(model: Any, ids: Tensor, how: str) -> Tensor:
    logits = given = model(input_ids=ids, use_cache=False).logits
    if how != "in 16 bits":
        logits = logits.float()
    if how != "float32 beside 16 bits":
        del given
    shifted = logits[..., :-1, :].contiguous()
    return functional.cross_entropy(shifted.flatten(0, 1), ids[..., 1:].contiguous().flatten())
