"""Counts the model FLOPs of an experiment: what a step of it needs without privacy.

Of a causal language model they follow from a formula (``flops.counter``). Of other models a
plain step of one sample is counted under fake tensors, with attention that computes nothing again
and without checkpointing. Of a transformer with a label for each token both ways agree.
"""

from collections import Counter
from functools import lru_cache

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.predict.flops.counter import FlopCounter, model_flops_per_token
from dpprof.predict.memory.fake_tensors import fake_tensors
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.sample_losses import sample_losses
from dpprof.subjects.batches import make_batch
from dpprof.subjects.models.build import build_model, find_attention_size


def count_model_flops(experiment: Experiment, module: nn.Module) -> int | None:
    """Return the FLOPs that the non-private step needs for samples without padding.

    None for another package's language model, for a causal one with experts or convolutions, and
    for padded samples of any other, or where a model cannot be traced.
    """
    if experiment.task != "causal-lm":
        if experiment.padding is not None:
            return None
        plain = {"method": "standard", "batch_size": 1, "parallel": None, "target": None}
        plain |= {"accumulation": 1}
        plain |= {"quantization": None, "optimizer": "adamw"}
        plain |= {"checkpointing": "none", "dtype": "float32", "autocast": True}
        plain |= {"parameters_dtype": "float32", "trained_dtype": "float32"}
        plain |= {"loss": "cross-entropy", "keep_logits": False, "use_cache": False}
        is_lent = registry.is_lent(experiment.model)  # what it builds may change
        count = _count_sample.__wrapped__ if is_lent else _count_sample
        flops = count(experiment.model_copy(update=plain))
        samples = experiment.accumulation * experiment.batch_size
        return None if flops is None else samples * flops
    attention = find_attention_size(experiment, module)
    if attention is None:
        return None
    layers, width = attention
    counts = Counter(experiment.sample_lengths(experiment.batch_size))
    return experiment.accumulation * sum(
        count * length * model_flops_per_token(module, seq_len=length, layers=layers, d_model=width)
        for length, count in counts.items()
    )


@lru_cache(maxsize=32)
def _count_sample(experiment: Experiment) -> int | None:
    """Count a plain step of one sample; None where an operator has no formula."""
    try:
        with fake_tensors(), sdpa_kernel(SDPBackend.MATH), FlopCounter() as counter:
            model = build_model(experiment).train()
            batch = make_batch(model, torch.device("cpu"), experiment)
            loss = sample_losses(model(*batch.inputs), batch.labels).sum()
            loss.backward()  # type: ignore[no-untyped-call]
    except UnsupportedError:  # it needs the elements of a tensor
        return None
    return None if counter.unpriced else counter.flops
