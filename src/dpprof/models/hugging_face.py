"""Hugging Face's causal language models, from a config, with random weights.

Per-sample gradients need the first axis of every layer's input to be the batch. OPT's blocks give
their MLP and its norm all tokens of all samples in one axis; nothing in that axis says which row
belongs to which sample. And OPT's lookup of positions is called with the mask and a number in
addition to the ids, to which it adds 2. Both are replaced.

Shape legend: B batch, T tokens, D width, V vocabulary.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from dpprof.spec.architecture import Architecture
from dpprof.spec.experiment import Experiment
from dpprof.spec.registry import UnsupportedError
from dpprof.system.substitutes import substitute

try:
    import transformers
    from transformers import masking_utils
    from transformers.models.auto import modeling_auto
    from transformers.models.opt.modeling_opt import (
        OPTDecoderLayer,
        OPTLearnedPositionalEmbedding,
    )
except ImportError as error:
    raise UnsupportedError(f"a Hugging Face model needs dpprof[hf]: {error}") from error


class CausalLM(nn.Module):
    """A Hugging Face model that maps token ids to logits.

    It gets position ids and the attention mask as (B, T), so every layer sees the batch first.

    Args:
        model: The Hugging Face model.
        lengths: From a batch's size to the tokens of each of its samples, as the mask will have
            them. A fake mask has no elements, and transformers decides by them.
    """

    def __init__(self, model: nn.Module, lengths: Callable[[int], list[int]]) -> None:
        super().__init__()
        self.model = model
        self._lengths = lengths

    def forward(self, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the logits of every next token; (B, T) int64 twice to (B, T, V).

        ``mask_BT`` is 1 for tokens and 0 for padding, which follows them.
        """
        B, T = tokens_BT.shape
        positions_BT = torch.arange(T, device=tokens_BT.device).repeat(B, 1)
        with ExitStack() as within:
            if isinstance(mask_BT, FakeTensor):
                within.enter_context(_deciding_as_for(has_padding=self._has_padding(mask_BT)))
            outputs = self.model(
                input_ids=tokens_BT,
                attention_mask=mask_BT,
                position_ids=positions_BT,
                use_cache=False,
            )
        logits_BTV: Tensor = outputs.logits
        return logits_BTV

    def _has_padding(self, mask_BT: Tensor) -> bool:
        """Tell whether a mask of whole rows of a batch has a zero, by where its rows lie."""
        B, T = mask_BT.shape
        whole = mask_BT.untyped_storage().nbytes() // (T * mask_BT.element_size())
        start = mask_BT.storage_offset() // T
        return any(length < T for length in self._lengths(whole)[start : start + B])


@contextmanager
def _deciding_as_for(*, has_padding: bool) -> Iterator[None]:
    """Have transformers choose masks for fake tensors as it does for real ones.

    For a fake mask it takes another path, that of compilers.
    """

    def fast_all(tensor: Tensor) -> bool:
        _ = tensor.sum() == tensor.numel()  # allocates what the original allocates
        return not has_padding or tensor.numel() == 0

    with (
        substitute(masking_utils, "is_tracing", lambda _=None: False),
        substitute(masking_utils, "fast_all", fast_all),
    ):
        yield


def import_architecture(experiment: Experiment) -> None:
    """Import what building an experiment's model needs: the architecture's module, and peft.

    Raises:
        UnsupportedError: One of them is missing, or there is no such architecture.
    """
    assert isinstance(experiment.model, Architecture)
    config = read_config(experiment.model)
    try:
        _ = transformers.AutoModelForCausalLM._model_mapping[type(config)]  # noqa: SLF001
    except ImportError as error:
        raise UnsupportedError(f"{config.model_type} needs what is missing: {error}") from error
    if experiment.lora is not None:
        _import_peft()


def _import_peft() -> Any:
    """Import peft, which only adapters need."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise UnsupportedError(f"adapters need dpprof[hf]: {error}") from error


def build_causal_lm(experiment: Experiment) -> CausalLM:
    """Build an experiment's Hugging Face model, with its adapters, on the CPU, in float32.

    Raises:
        UnsupportedError: The config is not that of a causal language model, or the model cannot be
            built in this way; the message says why.
    """
    assert isinstance(experiment.model, Architecture)
    config = read_config(experiment.model)
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and experiment.seq_len > most:
        raise UnsupportedError(
            f"the model has {most:,} positions, and seq_len is {experiment.seq_len:,}; raise "
            "max_position_embeddings in its config, or shorten the samples"
        )
    if experiment.attention == "opacus":
        raise UnsupportedError("a Hugging Face model has its own attention; use sdpa or eager")
    # None is the library's own choice: sdpa, or eager where the architecture has no sdpa.
    attention = "eager" if experiment.attention == "eager" else None
    transformers.logging.set_verbosity_error()
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except (ValueError, TypeError, ImportError, KeyError, AttributeError) as error:
        raise UnsupportedError(
            f"transformers cannot build {config.model_type}: {_one_line(error)}"
        ) from error
    _keep_batch_first(model)
    if experiment.lora is not None:
        _add_adapters(model, experiment)
    if experiment.checkpointing != "none":
        _checkpoint(model, reentrant=experiment.checkpointing == "reentrant")
    return CausalLM(model, experiment.lengths)


def read_config(architecture: Architecture) -> Any:
    """Return a config as transformers has it.

    Raises:
        UnsupportedError: It is not that of a causal language model, or transformers refuses it.
    """
    kind = architecture.model_type
    given = architecture.config
    del given["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise UnsupportedError(
            f"transformers {transformers.__version__} knows no architecture {kind}"
        )
    if kind not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedError(f"{kind} is no causal language model")
    try:
        config = transformers.AutoConfig.for_model(kind, **given)
    except Exception as error:
        raise UnsupportedError(
            f"transformers refuses the config of {kind}: {_one_line(error)}"
        ) from error
    is_masked = kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    is_encoder = is_masked and not getattr(config, "is_decoder", False)
    if getattr(config, "is_encoder_decoder", False) or is_encoder:
        raise UnsupportedError(f"{kind} is an encoder, and here only causal decoders are trained")
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        raise UnsupportedError(f"{kind} reads more than text; give the config of its text model")
    return config


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _add_adapters(model: Any, experiment: Experiment) -> None:
    """Put low-rank adapters into a model, and freeze everything else."""
    peft = _import_peft()
    lora = experiment.lora
    assert lora is not None
    modules = lora.target_modules
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.scale,
        lora_dropout=lora.dropout,
        target_modules=list(modules) if isinstance(modules, tuple) else modules,
        task_type=peft.TaskType.CAUSAL_LM,
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out")
            peft.inject_adapter_in_model(config, model)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UnsupportedError(f"lora: peft cannot add the adapters: {_one_line(error)}") from error


def _checkpoint(model: Any, *, reentrant: bool) -> None:
    """Let each block store its input alone, and compute the rest again in backward."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UnsupportedError(f"{type(model).__name__} does not support checkpointing")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # before 5.20 it has no other name
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        # Below the first trained parameter nothing requires a gradient, and reentrant
        # checkpointing then computes none above it either.
        model.enable_input_require_grads()


class _BatchFirstOPTBlock(OPTDecoderLayer):  # type: ignore[misc]
    """OPT's block, with samples and tokens in axes of their own throughout."""

    def forward(self, hidden_states: Tensor, use_cache: bool = False, **others: Any) -> Tensor:
        """Apply the block; (B, T, D) to (B, T, D)."""
        del use_cache  # of generation
        x_BTD = self._add(hidden_states, self.self_attn_layer_norm, self._attend, others)
        return self._add(x_BTD, self.final_layer_norm, self._run_mlp, {})

    def _add(self, x_BTD: Tensor, norm: nn.Module, part: Any, others: dict[str, Any]) -> Tensor:
        """Add a part to the residual stream; the norm is before the part, or after the sum."""
        y_BTD = part(norm(x_BTD) if self.do_layer_norm_before else x_BTD, **others)
        x_BTD = x_BTD + functional.dropout(y_BTD, p=self.dropout, training=self.training)
        return x_BTD if self.do_layer_norm_before else norm(x_BTD)

    def _attend(self, x_BTD: Tensor, **others: Any) -> Tensor:
        y_BTD: Tensor = self.self_attn(hidden_states=x_BTD, **others)[0]
        return y_BTD

    def _run_mlp(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.fc2(self.activation_fn(self.fc1(x_BTD)))
        return y_BTD


def _keep_batch_first(model: nn.Module) -> None:
    """Let the blocks of a model that join samples and tokens keep them apart; values are equal."""
    for layer in model.modules():
        if type(layer) is OPTDecoderLayer:
            layer.__class__ = _BatchFirstOPTBlock
        elif type(layer) is OPTLearnedPositionalEmbedding:
            layer.__class__ = nn.Embedding
            layer.register_forward_pre_hook(_look_up_positions, with_kwargs=True)


def _look_up_positions(
    layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the lookup of positions its ids alone; a copy that Opacus runs gets them at once."""
    if "position_ids" not in named:
        return args, named
    return (named["position_ids"] + layer.offset,), {}
