"""Fine-tuning of Hugging Face models, in a loop of PyTorch's or as transformers' Trainer does."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from published.recording import Tape
from torch import Tensor
from torch.nn import functional
from transformers import masking_utils
from transformers.integrations import sdpa_attention

from dpprof.experiments.config.experiment import Experiment
from dpprof.private.substitutes import substitute
from dpprof.subjects.models.build import build_model
from dpprof.subjects.models.quantized import count_elements, scales_of


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
    model.get_input_embeddings().register_forward_hook(lambda *a: a[2].requires_grad_())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.empty(batch_size, seq_len, dtype=torch.int64)
    with substitute(sdpa_attention, "use_gqa_in_sdpa", lambda *_, **__: False), _real_masks():
        for step in range(steps):
            if step == steps - 1:
                tape.mark("last step")
            _step(tape, model, optimizer, ids)


def _load(
    tape: Tape,
    fields: dict[str, Any],
    batch_size: int,
    seq_len: int,
    build: Callable[..., Any] = build_model,
) -> Any:
    fixed = {"method": "standard", "device": "cuda", "batch_size": batch_size, "seq_len": seq_len}
    experiment = Experiment.model_validate({**fixed, **fields})
    load = tape.load if experiment.base_format is None else partial(_load_quantized, tape)
    return load(build, experiment).model.train()


def _load_quantized(tape: Tape, build: Callable[..., Any], experiment: Experiment) -> Any:
    """Load a model as transformers 5 quantises one on its way, and peft prepares it.

    First the bytes that will stay are allocated and freed, so that one segment holds them
    (``caching_allocator_warmup``). Then each weight is copied in 16 bits, in the order of its name;
    where it is quantised the scales and it follow, and the copy is freed. Last, what is not
    quantised is converted to float32, and adapters are made.
    """
    model = tape.build(build, experiment)
    layers = {name: layer for name, layer in model.named_modules() if [*scales_of(layer)]}
    frozen = {
        name.replace(".base_layer", ""): (p, layers.get(name.removesuffix(".weight")))
        for name, p in model.named_parameters()
        if not p.requires_grad
    }
    sizes = (count_elements(p) // 2 if layer else 2 * p.numel() for p, layer in frozen.values())
    torch.empty(sum(sizes), dtype=torch.uint8)
    copies = {}
    for name in sorted(frozen, key=_in_natural_order):
        weight, layer = frozen[name]
        copies[name] = torch.empty(count_elements(weight), dtype=torch.float16)
        if layer is not None:
            tape.hold(*scales_of(layer), weight)
            del copies[name]
    for name, (weight, layer) in frozen.items():
        if layer is None:
            tape.hold(weight)
            del copies[name]
    tape.hold(*(p for p in model.parameters() if p.requires_grad), *model.buffers())
    return model


def _in_natural_order(name: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


@contextmanager
def _real_masks() -> Iterator[None]:
    """Let transformers decide on masks as for real tensors."""
    with (
        substitute(masking_utils, "find_packed_sequence_indices", lambda _: None),
        substitute(masking_utils, "is_tracing", lambda _=None: False),
    ):
        yield


def _step(tape: Tape, model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    optimizer.zero_grad()
    tape.mark("forward")
    out = model(input_ids=ids, labels=ids)
    tape.mark("backward")
    with tape.phase("backward"):
        out.loss.backward()
    tape.mark("optimizer")
    with tape.phase("step"):
        optimizer.step()
    tape.mark("stepped")
    del out


def trainer(tape: Tape, *, loss: str, batch_size: int, seq_len: int, **fields: Any) -> None:
    """Train two steps as the Trainer of early 2025, which frees a model's outputs in forward.

    Of a quantised model trl converts the embedding and the head to bfloat16, and leaves norms in
    float32 (``peft_module_casting_to_bf16``), so the residual stream is in float32 under autocast.

    Args:
        tape: Marks the last step.
        loss: How the model of that time made its loss: ``in 16 bits``, ``float32``, or ``float32
            beside 16 bits`` where it kept both logits meanwhile. All copy what they shift.
        batch_size: Samples.
        seq_len: Tokens of each.
        fields: Of the experiment that says what is built.
    """
    is_quantized = fields.get("quantization") is not None
    build = _build_with_short_head if is_quantized else build_model
    model = _load(tape, {"checkpointing": "reentrant", **fields}, batch_size, seq_len, build)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = torch.empty(batch_size, seq_len, dtype=torch.int64)
    with _real_masks():
        for step in range(2):
            if step:
                tape.mark("last step")
            with torch.autocast("cpu", torch.bfloat16, enabled=is_quantized):
                value = _old_loss(model, ids, loss)
            with tape.phase("backward"):
                value.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            with tape.phase("step"):
                optimizer.step()
            optimizer.zero_grad()
            del value


def _build_with_short_head(experiment: Experiment) -> Any:
    model = build_model(experiment)
    inner = model.model
    for layer in (inner.get_input_embeddings(), inner.get_output_embeddings()):
        layer.weight.data = layer.weight.data.bfloat16()
    return model


def _old_loss(model: Any, ids: Tensor, how: str) -> Tensor:
    logits = returned = model(input_ids=ids, use_cache=False).logits
    if how != "in 16 bits":
        logits = logits.float()
    if how != "float32 beside 16 bits":
        del returned
    shifted = logits[..., :-1, :].contiguous()
    return functional.cross_entropy(shifted.flatten(0, 1), ids[..., 1:].contiguous().flatten())
