"""Hugging Face's models, for a task, from a config, with random weights.

Shape legend: B batch, T tokens, V vocabulary, C classes.
"""

import importlib
import inspect
import warnings
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.tasks import TASKS, Task
from dpprof.private.allocation_marks import allocates
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.sample_losses import sample_losses, shift_labels
from dpprof.private.substitutes import substitute
from dpprof.subjects.models.quantized import import_bitsandbytes, quantize
from dpprof.subjects.models.transformer import choose_evenly

try:
    import transformers
    from transformers import masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.loss import loss_utils
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.models.auto import modeling_auto

    from dpprof.subjects.models.opt_blocks import keep_batch_first
except ImportError as error:
    raise UnsupportedError(f"a Hugging Face model needs dpprof[hf]: {error}") from error


_CLASSES: Mapping[Task, tuple[str, str, str | None]] = {
    "causal-lm": ("CausalLM", "CAUSAL_LM", "CAUSAL_LM"),
    "masked-lm": ("MaskedLM", "MASKED_LM", None),
    "seq2seq-lm": ("Seq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQ_2_SEQ_LM"),
    "sequence-classification": ("SequenceClassification", "SEQUENCE_CLASSIFICATION", "SEQ_CLS"),
    "token-classification": ("TokenClassification", "TOKEN_CLASSIFICATION", "TOKEN_CLS"),
    "question-answering": ("QuestionAnswering", "QUESTION_ANSWERING", "QUESTION_ANS"),
    "image-classification": ("ImageClassification", "IMAGE_CLASSIFICATION", None),
}
"""The end of the name of what transformers builds a task's models with, how it names the task's
architectures, and how peft names the task."""


_CAUSAL = "causal_sdpa"
"""The name of sdpa without masks among transformers' attentions."""


def _architectures_of(task: Task) -> Container[str]:
    """Return the architectures for which transformers has a class of a task."""
    names: Container[str] = getattr(modeling_auto, f"MODEL_FOR_{_CLASSES[task][1]}_MAPPING_NAMES")
    return names


class HuggingFaceModel(nn.Module):
    """A Hugging Face model that maps the tensors of a batch to logits.

    Where it takes position ids, it gets them as (B, T), so every layer sees the batch first. With
    the loss ``labels`` it gets labels last, and returns its loss and logits.

    Args:
        model: The Hugging Face model.
        experiment: Gives the task, the loss, and how many tokens samples have: a fake mask has no
            elements, and transformers decides by them.
    """

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        super().__init__()
        self.model = model
        self._lengths = experiment.sample_lengths
        self._task = experiment.task
        self._takes_labels = experiment.loss == "labels"
        self._loses_by_sample = False
        taken = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in taken and not _position_offset(model)
        self._options = {"use_cache": experiment.use_cache} if "use_cache" in taken else {}
        self._keeps_cache, self.cache = experiment.use_cache, None
        """Keys and values of the latest forward, until ``apply_dtype`` takes them."""

    def lose_by_sample(self) -> None:
        """Replace the mean over a batch that the model computes of labels; later losses are (B,).

        transformers calls ``loss_function`` with logits, labels and what else a task needs.
        """

        @allocates("logits_and_loss")
        def losses_of(*arguments: Any, **named: Any) -> Tensor:
            tensors = [*filter(torch.is_tensor, (*arguments, *named.values()))]
            of_floats = sorted(tensors, key=torch.is_floating_point, reverse=True)
            if len(of_floats) > 2:  # noqa: PLR2004 (those of answers' starts and ends)
                starts_BT, ends_BT, *positions = of_floats
                logits, labels = torch.stack((starts_BT, ends_BT), 1), torch.stack(positions, 1)
            else:
                logits, labels = of_floats
            shifted = shift_labels(labels) if self._task == "causal-lm" else labels
            return sample_losses(logits.float(), shifted)

        inner: Any = self.model
        inner.loss_function = losses_of
        self._loses_by_sample = True

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        """Return logits: (B, T, V) of tokens, (B, T, C) or (B, C) of classes; or loss and logits.

        Of answers to questions they are (B, 2, T): of the token where each starts, and ends.

        Args:
            x: Token ids, (B, T) int64; or images, (B, channels, height, width).
            others: Of text, the mask, (B, T): 1 for tokens and 0 for padding, which follows them.
                Then the ids that a decoder is given, where the model has an encoder too; they have
                the same mask where they are as many. Then labels, where the model takes them.

        Raises:
            UnsupportedError: Losses of samples are needed, and the model computes their mean.
        """
        labels = others[-1] if self._takes_labels else None
        others = others[: len(others) - self._takes_labels]
        named: dict[str, Any] = {} if labels is None else {"labels": labels}
        if labels is not None and self._task == "question-answering":
            named = {"start_positions": labels[:, 0], "end_positions": labels[:, 1]}
        with ExitStack() as within:
            if self._task == "image-classification":
                named["pixel_values"] = x
            else:
                named |= self._name_text(x, *others)
                if isinstance(others[0], FakeTensor):
                    padded = self._has_padding(others[0])
                    within.enter_context(_deciding_as_for(has_padding=padded))
            outputs = self.model(**named)
        self.cache = outputs.get("past_key_values") if self._keeps_cache else None
        if self._task == "question-answering":
            logits = torch.stack((outputs.start_logits, outputs.end_logits), 1)
        else:
            logits = outputs.logits
        if labels is None:
            return logits
        if self._loses_by_sample and outputs.loss.dim() == 0:
            raise UnsupportedError(
                f"loss labels: {type(self.model).__name__} computes the mean over a batch itself, "
                "and clipping needs a loss for each sample; use loss cross-entropy"
            )
        return outputs.loss, logits

    def _name_text(
        self, x: Tensor, mask_BT: Tensor, decoder_BT: Tensor | None = None
    ) -> dict[str, Any]:
        named: dict[str, Any] = {"input_ids": x, "attention_mask": mask_BT, **self._options}
        if self._takes_positions:
            B, T = x.shape
            named["position_ids"] = torch.arange(T, device=x.device).repeat(B, 1)
        if decoder_BT is not None:
            named["decoder_input_ids"] = decoder_BT
            if decoder_BT.shape == mask_BT.shape:
                named["decoder_attention_mask"] = mask_BT
        return named

    def _has_padding(self, mask_BT: Tensor) -> bool:
        """Tell whether a mask of whole rows of a batch has a zero, by where its rows lie."""
        B, T = mask_BT.shape
        whole = mask_BT.untyped_storage().nbytes() // (T * mask_BT.element_size())
        start = mask_BT.storage_offset() // T
        return any(length < T for length in self._lengths(whole)[start : start + B])


def _position_offset(model: nn.Module) -> int:
    """Return the first position of a model that makes positions of its ids, as RoBERTa does."""
    for name, layer in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(layer, nn.Embedding):
            return 0 if layer.padding_idx is None else layer.padding_idx + 1
    return 0


@contextmanager
def _deciding_as_for(*, has_padding: bool) -> Iterator[None]:
    """Have transformers choose masks for fake tensors as it does for real ones.

    For a fake mask it takes another path, that of compilers.
    """

    def fast_all(tensor: Tensor) -> bool:
        _ = tensor.sum() == tensor.numel()  # allocates what the original allocates
        return not has_padding or tensor.numel() == 0

    def ignores(mask_BT: Tensor | None, keys: int, local_attention_size: int | None = None) -> bool:
        if mask_BT is not None:
            mask_BT.all()  # allocates, too
        return not has_padding and (local_attention_size is None or keys < local_attention_size)

    with (
        substitute(masking_utils, "is_tracing", lambda _=None: False),
        substitute(masking_utils, "fast_all", fast_all),
        substitute(masking_utils, "_ignore_bidirectional_mask_sdpa", ignores),
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
        builder = getattr(transformers, f"AutoModelFor{_CLASSES[experiment.task][0]}")
        _ = builder._model_mapping[type(config)]  # noqa: SLF001
    except ImportError as error:
        raise UnsupportedError(f"{config.model_type} needs what is missing: {error}") from error
    if experiment.loss == "labels":
        for name, function in vars(loss_utils).items():
            if name.startswith("For") or name == "fixed_cross_entropy":
                allocates("logits_and_loss")(function)
    if experiment.lora is not None:
        _import_peft()
    if experiment.base_format is not None:
        import_bitsandbytes()


def _import_peft() -> Any:
    """Import peft, which only adapters need."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise UnsupportedError(f"adapters need dpprof[hf]: {error}") from error


def build_hugging_face(experiment: Experiment) -> HuggingFaceModel:
    """Build an experiment's Hugging Face model, with its adapters, on the CPU, in float32.

    Weights of linear layers that the experiment quantises are quantised.

    Raises:
        UnsupportedError: The architecture has no class for the task, or the model cannot be built
            in this way; the message says why.
    """
    assert isinstance(experiment.model, Architecture)
    config = read_config(experiment.model)
    if experiment.image_size is not None:
        config.image_size = experiment.image_size
    if experiment.attention == "opacus":
        raise UnsupportedError("a Hugging Face model has its own attention; use sdpa or eager")
    # None is the library's own choice: sdpa, or eager where the architecture has no sdpa.
    attention = "eager" if experiment.attention == "eager" else None
    transformers.logging.set_verbosity_error()
    builder = getattr(transformers, f"AutoModelFor{_CLASSES[experiment.task][0]}")
    try:
        model = builder.from_config(config, attn_implementation=attention)
    except (ValueError, TypeError, ImportError, KeyError, AttributeError) as error:
        raise UnsupportedError(
            f"transformers cannot build {config.model_type}: {_one_line(error)}"
        ) from error
    _refuse_many_tokens(experiment, model)
    keep_batch_first(model)
    if experiment.execution == "graph" and experiment.task == "causal-lm":
        _attend_without_mask(model, experiment.seq_len)
    if experiment.base_format is not None:
        quantize(model, experiment)
    if experiment.lora is not None:
        _add_adapters(model, experiment)
    if experiment.checkpointing != "none":
        _checkpoint(model, experiment)
    return HuggingFaceModel(model, experiment)


def _attend_without_mask(model: Any, seq_len: int) -> None:
    """Have a causal model's sdpa compute without a mask, as a CUDA graph needs it.

    transformers reads the mask, or the positions, to tell whether sdpa needs one, which waits for
    the device. It makes none for an attention that has no kind of masks, and sdpa is then causal.
    Padding follows the tokens, so no token meets it. A model with a window keeps its masks.
    """
    config = model.config
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    is_windowed = any(window is not None and window <= seq_len for window in windows)
    takes_others = getattr(model, "_supports_attention_backend", False)
    if config._attn_implementation == "sdpa" and takes_others and not is_windowed:  # noqa: SLF001
        transformers.AttentionInterface.register(_CAUSAL, sdpa_attention_forward)
        model.set_attn_implementation(_CAUSAL)


def _refuse_many_tokens(experiment: Experiment, model: Any) -> None:
    """Refuse samples that are longer than the model has positions."""
    most = getattr(model.config, "max_position_embeddings", None)
    if most is None or experiment.image_size is not None:
        return
    most -= _position_offset(model)
    if experiment.seq_len > most:
        raise UnsupportedError(
            f"the model has {most:,} positions, and seq_len is {experiment.seq_len:,}; raise "
            "max_position_embeddings in its config, or shorten the samples"
        )


def read_config(architecture: Architecture) -> Any:
    """Return a config as transformers has it.

    Raises:
        UnsupportedError: The architecture has no class for the task, or transformers refuses the
            config.
    """
    kind, task = architecture.model_type, architecture.trained_for
    settings = architecture.config
    del settings["model_type"]
    # Weights are quantised here, and not as they are read.
    settings.pop("quantization_config", None)
    if kind not in transformers.CONFIG_MAPPING:
        raise UnsupportedError(
            f"transformers {transformers.__version__} knows no architecture {kind}"
        )
    if kind in modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        raise UnsupportedError(
            f"{kind} reads or tells speech, which cannot be asked; closest: seq2seq-lm, of a model "
            "of text with the same sizes"
        )
    if kind not in _architectures_of(task):
        raise UnsupportedError(f"{kind} has no class for {task}; {_tell_tasks(kind, task)}")
    try:
        config = transformers.AutoConfig.for_model(kind, **settings)
    except Exception as error:
        raise UnsupportedError(
            f"transformers refuses the config of {kind}: {_one_line(error)}"
        ) from error
    is_masked = kind in _architectures_of("masked-lm")
    is_encoder = is_masked and not getattr(config, "is_decoder", False)
    if task == "causal-lm" and (is_encoder or getattr(config, "is_encoder_decoder", False)):
        raise UnsupportedError(f"{kind} is an encoder, and no causal-lm; {_tell_tasks(kind, task)}")
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        raise UnsupportedError(f"{kind} reads more than text; give the config of its text model")
    if task == "question-answering":
        config.num_labels = 2  # an answer's start and its end
    if task == "sequence-classification" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # a decoder's class is that of the last token that is no padding
    return config


def _tell_tasks(kind: str, refused: Task) -> str:
    """Say what else an architecture can be trained for."""
    others = (task for task in _CLASSES if task != refused)
    possible = [task for task in others if kind in _architectures_of(task)]
    if not possible:
        return f"known tasks: {', '.join(TASKS)}"
    return f"give another task of it, as {{hf: NAME, task: TASK}}: {', '.join(possible)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _add_adapters(model: Any, experiment: Experiment) -> None:
    """Put low-rank adapters into a model, and freeze everything else."""
    peft = _import_peft()
    lora = experiment.lora
    assert lora is not None
    modules, task_type = lora.target_modules, _CLASSES[experiment.task][2]
    of_vectors = peft.IA3Config(task_type=task_type)
    config = (
        of_vectors
        if lora.ia3
        else peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.scale,
            lora_dropout=lora.dropout,
            use_dora=lora.use_dora,
            target_modules=list(modules) if isinstance(modules, tuple) else modules,
            task_type=task_type,
        )
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out")
            peft.inject_adapter_in_model(config, model)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UnsupportedError(f"lora: peft cannot add the adapters: {_one_line(error)}") from error
    for parameter in model.parameters():  # those of quantised layers have the dtype of products
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _checkpoint(model: Any, experiment: Experiment) -> None:
    """Let blocks store their inputs alone, and compute the rest again in backward."""
    reentrant = experiment.checkpointing == "reentrant"
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UnsupportedError(f"{type(model).__name__} does not support checkpointing")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # before 5.20 it has no other name
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if experiment.checkpointed_share < 1:
        _spare_blocks(model, experiment.checkpointed_share)
    if reentrant:
        # Below the first trained parameter nothing requires a gradient, and reentrant
        # checkpointing then computes none above it either.
        model.enable_input_require_grads()


def _spare_blocks(model: nn.Module, share: float) -> None:
    """Checkpoint no more than a share of the blocks of each stack."""
    stacks = [
        [child for child in module.children() if isinstance(child, GradientCheckpointingLayer)]
        for module in model.modules()
    ]
    if not any(stacks):
        name = type(model).__name__
        raise UnsupportedError(f"{name} checkpoints all blocks; give checkpointed_share 1")
    for stack in stacks:
        for block, is_chosen in zip(stack, choose_evenly(len(stack), share), strict=True):
            block.gradient_checkpointing = is_chosen
