"""One point of a sweep: frozen, validated, and named by a digest of its content."""

import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dpprof.experiments.config.architecture import PREFIX, Architecture, resolve
from dpprof.experiments.config.fine_tuning import AsLora, AsPadding, Trainable
from dpprof.experiments.config.parallel import AsParallel
from dpprof.experiments.config.quantities import (
    Count,
    NotNegative,
    Positive,
    Seed,
    Size,
    refuse_bool,
)
from dpprof.experiments.config.quantization import NONE, Quantization
from dpprof.experiments.config.target import Dtype, Target
from dpprof.experiments.config.tasks import OWN_IMAGE_SIZES, Task
from dpprof.experiments.config.validation import (
    ARCHITECTURE_TAG,
    DIMENSIONS_TAG,
    NAME_TAG,
    TARGET_TAG,
    InputError,
    read_model,
    refuse,
)
from dpprof.private.number_formats import SHORT, refuse_loss_scale
from dpprof.system.files import canonical_json, sha256_hex

NAME_PATTERN = r"^[a-z0-9][a-z0-9-]{0,39}$"
"""Allowed names of models, methods and instruments: safe in a path, a shell and a report."""

CODE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.]{0,99}:[A-Za-z_][A-Za-z0-9_]{0,99}$"
"""A function that builds a model, as ``package.module:function``; no file names one."""

ID_PATTERN = r"[a-z0-9][a-z0-9-]*-[0-9a-f]{8}"


class Dimensions(BaseModel, frozen=True, extra="forbid"):
    """The size of a decoder-only transformer; its MLP is four times ``d_model`` wide."""

    vocab_size: Annotated[int, Field(ge=2, le=10**9), BeforeValidator(refuse_bool)] = Field(
        description="tokens in the vocabulary"
    )
    d_model: Count = Field(description="width of the residual stream")
    layers: Count = Field(description="transformer blocks")
    heads: Count = Field(description="attention heads; must divide d_model")

    @model_validator(mode="after")
    def _refuse_uneven_heads(self) -> Self:
        if self.d_model % self.heads:
            raise ValueError(
                f"heads must divide d_model, and {self.heads} does not divide {self.d_model}"
            )
        return self


def _tell_apart(mapping: type[BaseModel], tag: str) -> Callable[[Any], str | None]:
    """Return a function that tags a value as a name or a mapping; tags are not part of a key."""

    def kind(value: Any) -> str | None:
        if isinstance(value, str):
            return NAME_TAG
        return tag if isinstance(value, dict | mapping) else None

    return kind


def _kind_of_model(value: Any) -> str | None:
    if isinstance(value, Architecture) or (isinstance(value, dict) and "hf" in value):
        return ARCHITECTURE_TAG
    return _tell_apart(Dimensions, DIMENSIONS_TAG)(value)


class _Overrides(BaseModel, extra="allow"):
    """A Hugging Face model by name, and the keys of its config that differ."""

    hf: str


Name = Annotated[str, Field(pattern=NAME_PATTERN)]
_ModelInput = Name | Annotated[str, Field(pattern=f"^{PREFIX}.")] | Dimensions | _Overrides
"""How a model may be written."""

_NameOrCode = Annotated[str, Field(pattern=f"{NAME_PATTERN}|{CODE_PATTERN}")]
Model = Annotated[
    Annotated[_NameOrCode, Tag(NAME_TAG)]
    | Annotated[Dimensions, Tag(DIMENSIONS_TAG)]
    | Annotated[Architecture, Tag(ARCHITECTURE_TAG)],
    Discriminator(
        _kind_of_model,
        custom_error_type="model_kind",
        custom_error_message=f"it must be a model's name, {PREFIX}NAME, or a mapping of dimensions",
    ),
]
For = Annotated[
    Annotated[Name, Tag(NAME_TAG)] | Annotated[Target, Tag(TARGET_TAG)],
    Discriminator(
        _tell_apart(Target, TARGET_TAG),
        custom_error_type="target_kind",
        custom_error_message="it must be a target's name, or a mapping of memory_bytes, "
        "flops_per_s and bandwidth_bytes_per_s",
    ),
]
_None = Literal["none"]
_LATER = (
    *("wait_for_idle_gpu_s", "busy_gpu", "lora", "trainable", "padding", "parameters_dtype"),
    *("parallel", "execution", "head", "image_size", "quantization"),
    *("trained_dtype", "autocast", "loss_scale", "keep_logits"),
)
"""Keys that came after the first results."""

CPU_TARGET = "cpu"
"""The target for this machine: an estimate for it models no CUDA libraries."""


def device_of(target: "str | Target") -> Literal["cpu", "cuda"]:
    """Return the kind of device that a target's experiments run on."""
    return "cpu" if target == CPU_TARGET else "cuda"


class Experiment(BaseModel, frozen=True, extra="forbid"):
    """A complete description of what is measured.

    The canonical JSON of these fields is the spec. Its sha256 is the spec digest. The id is a
    readable stem with the digest's first eight hex digits.
    """

    model: Annotated[Model, BeforeValidator(resolve, json_schema_input_type=_ModelInput)] = Field(
        description="a preset's name; a mapping of vocab_size, d_model, layers and heads; "
        "hf:NAME or hf:PATH, a Hugging Face model by name or config.json; or a mapping of hf, "
        "task and the keys of its config that differ"
    )
    method: Name = Field(description="how the clipped, noised gradient is computed")
    batch_size: Count = Field(
        description="samples (sequences) in a batch; where parallel is given, in each rank's"
    )
    image_size: Count | None = Field(
        None,
        validate_default=True,
        description="height and width of an image, in pixels, for a model that reads images; null: "
        "its usual size",
    )
    seq_len: Count = Field(
        None,
        validate_default=True,
        description="tokens in a sample; required for text, and left out for images, of which "
        "each counts as one token",
    )
    dtype: Dtype = Field(
        "float32",
        description="float32; tf32 (float32 with TF32 matrix products, CUDA only); bfloat16 or "
        "float16 (autocast, parameters stay float32 unless other keys say so); float64",
    )
    optimizer: Literal["adamw", "adamw-fused", "adamw-8bit", "adafactor", "sgd"] = Field(
        "adamw",
        description="the optimizer that applies the gradient; adamw-fused is PyTorch's AdamW with "
        "fused=True, which reads and writes each number once; adamw-8bit is bitsandbytes' "
        "AdamW8bit; adafactor is PyTorch's Adafactor",
    )
    attention: Literal["sdpa", "eager", "opacus"] = Field(
        "sdpa",
        description="sdpa (PyTorch's scaled_dot_product_attention); eager (spelled out); opacus "
        "(DPMultiheadAttention)",
    )
    checkpointing: Literal["none", "non-reentrant", "reentrant"] = Field(
        "none",
        description="none; non-reentrant or reentrant (each block stores only its input and is "
        "computed again in backward, with PyTorch's newer or older implementation)",
    )
    device: Literal["cpu", "cuda"] = Field(description="where the experiment runs")
    target: For | None = Field(
        None,
        description="the device that the instrument estimate predicts for: a target's name, cpu "
        "(this machine), or a mapping of memory_bytes, flops_per_s and bandwidth_bytes_per_s; "
        "null: the device of this experiment",
    )
    max_grad_norm: Positive = Field(1.0, description="clipping bound C of a sample's gradient")
    noise_multiplier: NotNegative = Field(
        1.0, description="noise standard deviation as a multiple of max_grad_norm"
    )
    learning_rate: Positive = Field(1e-3, description="the optimizer's learning rate")
    seed: Seed = Field(0, description="seed of weights, tokens and noise")
    warmup_steps: Count = Field(3, description="steps before the timed ones; reported separately")
    timed_steps: Count = Field(10, description="steps whose times are reported")
    cpu_threads: Count | None = Field(
        None, description="number of PyTorch's threads; null: every core it may use"
    )
    timeout_s: Positive = Field(
        900.0, description="seconds after which an attempt ends with outcome timeout"
    )
    memory_limit_bytes: Size | None = Field(
        None,
        description="memory the experiment may use, such as 4GiB; more ends with outcome oom. On "
        "cpu: private writable memory of the process; on cuda: the allocator's share of the device",
    )

    wait_for_idle_gpu_s: NotNegative = Field(
        0.0,
        description="longest wait, in seconds, for other processes to leave the GPU before the "
        "experiment starts; 0: do not wait",
    )
    busy_gpu: Literal["run", "refuse"] = Field(
        "run",
        description="if other processes still use the GPU after that time, run beside them, or "
        "refuse: the outcome is then unsupported",
    )
    lora: AsLora | None = Field(
        None,
        description="adapters for a Hugging Face model: a mapping of rank, alpha, target_modules "
        "and dropout, or rank=16,alpha=32,target_modules=q_proj+v_proj; null: none",
    )
    trainable: Trainable | None = Field(
        None,
        description="the parameters that are trained: all, lora, bias, head, or a regular "
        "expression that is searched in their names; null: lora where there are adapters, else all",
    )
    padding: AsPadding | None = Field(
        None,
        description="samples of different lengths, for a Hugging Face model: the mean share of "
        "padding in a batch, or a mapping with the key fraction; null: every sample has seq_len "
        "tokens",
    )
    parameters_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="dtype of parameters that are not trained: float32, or that of dtype"
    )
    trained_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="dtype of trained parameters, their gradients and the optimizer's state, "
        "without a copy in float32: float32, or that of dtype",
    )
    autocast: bool = Field(
        True,
        description="whether a dtype of 16 bits is autocast's; false: the parameters have it, and "
        "everything is computed in the dtype of its operands",
    )
    loss_scale: Positive = Field(
        1.0,
        description="what losses are multiplied with for backward in float16, a power of two; the "
        "gradients are divided by it",
    )
    keep_logits: bool = Field(
        False,
        description="whether logits, as the model computed them, live until the next step, as in "
        "out = model(...); false: they are freed in forward, as in loss = model(...).loss",
    )
    parallel: AsParallel | None = Field(
        None,
        description="several ranks that train one model: a mapping of kind (ddp, fsdp or hsdp) and "
        "world_size, or kind=fsdp,world_size=8; null: one process",
    )
    execution: Literal["eager", "graph", "compiled"] = Field(
        "eager",
        description="how the kernels of a step are started: eager (by Python, one by one); graph "
        "(all at once, as a CUDA graph, CUDA only); compiled (by what torch.compile makes of the "
        "model, which is measured and not predicted)",
    )

    quantization: Annotated[
        Quantization | None,
        BeforeValidator(lambda name: None if name == NONE else name, Quantization | _None | None),
    ] = Field(
        None,
        description="format of a Hugging Face model's frozen linear layers, by bitsandbytes: nf4, "
        "nf4-double (the scales are quantised too), fp4, fp4-double or int8; none, or null: as the "
        "config's quantization_config says, else not quantised",
    )

    @field_validator("image_size", mode="before")
    @classmethod
    def _settle_image_size(cls, value: Any, info: ValidationInfo) -> Any:
        """Take the model's usual size where none is given.

        Whether another package's model reads images is for the user to say.
        """
        model = info.data.get("model")
        if not isinstance(model, Architecture | Dimensions) and model not in OWN_IMAGE_SIZES:
            return value
        usual = OWN_IMAGE_SIZES.get(model) if isinstance(model, str) else None
        if isinstance(model, Architecture):
            usual = model.image_size
        if value is not None and usual is None:
            raise ValueError("the model reads text, so leave image_size out")
        return usual if value is None else value

    @field_validator("seq_len", mode="before")
    @classmethod
    def _settle_seq_len(cls, value: Any, info: ValidationInfo) -> Any:
        """Require it for text; an image counts as one token."""
        if not {"model", "image_size"} <= info.data.keys():
            return value or 1  # other errors are told
        if info.data["image_size"] is None:
            if value is None:
                raise PydanticCustomError("missing", "Field required")
            return value
        if value not in (None, 1, "1"):
            raise ValueError("the model reads images, so leave seq_len out; image_size is its size")
        return 1

    @model_validator(mode="after")
    def _refuse_other_device(self) -> Self:
        if self.target is not None and self.device != device_of(self.target):
            raise ValueError(
                f"target {_spell(self.target)} requires device {device_of(self.target)}, "
                f"but device is {self.device}"
            )
        return self

    head: Literal["logits", "chunked", "kept"] = Field(
        "logits",
        description="how the loss is computed: from the logits of all tokens, or chunked: from "
        "those of some tokens at a time, by dpprof.private.linear_cross_entropy; or kept: so too, "
        "and the gradients of logits are kept for backward, not computed again",
    )

    @model_validator(mode="after")
    def _refuse_execution(self) -> Self:
        if self.execution == "graph" and self.device != "cuda":
            raise ValueError(f"execution graph requires device cuda, but device is {self.device}")
        for name, usual in (("execution", "eager"), ("head", "logits")):
            if getattr(self, name) != usual and self.parallel is not None:
                given = getattr(self, name)
                raise ValueError(f"{name} {given} requires one process, without parallel")
        if self.head == "chunked" and self.task != "causal-lm":
            raise ValueError(f"head chunked requires task causal-lm, but the task is {self.task}")
        return self

    @model_validator(mode="after")
    def _refuse_fine_tuning(self) -> Self:
        if not isinstance(self.model, Architecture):
            for name in ("lora", "padding"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} requires a Hugging Face model, as {PREFIX}NAME")
        if self.padding is not None and self.image_size is not None:
            raise ValueError("padding requires a model that reads text, and this one reads images")
        if self.trainable == "lora" and self.lora is None:
            raise ValueError("trainable lora requires lora, such as lora: {rank: 16}")
        return self

    @model_validator(mode="after")
    def _refuse_quantization(self) -> Self:
        stated = self.model.quantization if isinstance(self.model, Architecture) else None
        if None not in (stated, self.quantization) and stated != self.quantization:
            raise ValueError(
                f"the model's quantization_config says {stated} already; leave quantization out"
            )
        if self.base_format is None:
            return self
        if not isinstance(self.model, Architecture):
            raise ValueError(  # noqa: TRY004 (pydantic's way)
                f"quantization requires a Hugging Face model, as {PREFIX}NAME"
            )
        if self.lora is None:
            raise ValueError(
                f"quantization {self.base_format} requires lora, such as lora: {{rank: 16}}: a "
                "quantised weight cannot be trained"
            )
        if self.dtype == "float64":
            raise ValueError(
                "quantization requires a dtype of at most 32 bits, and dtype is float64"
            )
        if self.parallel is not None and self.parallel.is_sharded:
            raise ValueError(
                "quantization works with parallel ddp, and not with fsdp: shards of a quantised "
                "weight lose its scales"
            )
        return self

    @model_validator(mode="after")
    def _refuse_optimizer(self) -> Self:
        if self.optimizer not in ("adamw-8bit", "adafactor"):
            return self
        if self.execution == "graph":
            raise ValueError(
                f"optimizer {self.optimizer} counts its steps on the host, which a CUDA graph "
                "would not repeat; use adamw or sgd with execution graph"
            )
        if self.parallel is not None and self.parallel.is_sharded:
            raise ValueError(
                f"optimizer {self.optimizer} keeps states of whole parameters, and fsdp shards "
                "them; use adamw or sgd with fsdp"
            )
        return self

    @model_validator(mode="after")
    def _refuse_number_formats(self) -> Self:
        for name in ("parameters_dtype", "trained_dtype"):
            stored = getattr(self, name)
            if stored not in ("float32", self.dtype):
                raise ValueError(
                    f"{name} {stored} requires dtype {stored}, but dtype is {self.dtype}"
                )
        if self.trained_dtype not in ("float32", self.parameters_dtype):
            raise ValueError(
                f"trained_dtype {self.trained_dtype} requires parameters_dtype {self.trained_dtype}"
            )
        if self.trained_dtype == "float16" and self.optimizer != "sgd":
            raise ValueError(
                "trained_dtype float16 requires optimizer sgd: the second moments of AdamW and its "
                "epsilon vanish in float16, and parameters become NaN"
            )
        if not self.autocast:
            self._refuse_without_autocast()
        if self.loss_scale != 1 and self.dtype != "float16":
            raise ValueError(f"loss_scale requires dtype float16, but dtype is {self.dtype}")
        refuse_loss_scale(self.loss_scale)
        if self.keep_logits and (self.head != "logits" or self.parallel is not None):
            raise ValueError("keep_logits requires head logits, and one process")
        return self

    def _refuse_without_autocast(self) -> None:
        if self.parallel is not None and self.parallel.is_sharded:
            raise ValueError("autocast false does not work with fsdp, which casts by its policy")
        if self.dtype not in SHORT:
            raise ValueError(f"autocast false requires dtype {' or '.join(SHORT)}")
        if self.parameters_dtype != self.dtype:
            raise ValueError(f"autocast false requires parameters_dtype {self.dtype}")
        if self.trained_dtype != self.dtype and self.trained != "lora":
            raise ValueError(
                f"autocast false requires trained_dtype {self.dtype}, or adapters that alone are "
                "trained: an operator takes operands of one dtype"
            )

    @cached_property
    def canonical(self) -> str:
        """The spec: these fields as canonical JSON.

        It includes those of ``_LATER`` only if they are given, so that older ids stay the same.
        """
        fields = type(self).model_fields
        left_out = {name for name in _LATER if getattr(self, name) == fields[name].default}
        return canonical_json(self.model_dump(mode="json", exclude=left_out))

    @cached_property
    def digest(self) -> str:
        """The spec digest: sha256 of the canonical JSON, 64 hex digits."""
        return sha256_hex(self.canonical)

    @cached_property
    def id(self) -> str:
        """The name in files: ``small-opacus-ghost-b4-t256-3f9a1c02``."""
        ranks = "" if self.parallel is None else f"-{self.parallel.slug}"
        size = f"t{self.seq_len}" if self.image_size is None else f"i{self.image_size}"
        return f"{self.model_name}-{self.method}-b{self.batch_size}-{size}{ranks}-{self.digest[:8]}"

    @property
    def model_name(self) -> str:
        """A name for files: a preset, ``custom``, ``hf-gpt2-lora16-nf4`` or ``module-function``."""
        if is_code(self.model):
            return re.sub(r"[^a-z0-9]+", "-", str(self.model).lower())[-60:].strip("-") or "code"
        if not isinstance(self.model, Architecture):
            return self.model if isinstance(self.model, str) else "custom"
        adapters = "" if self.lora is None else f"-lora{self.lora.rank}"
        return self.model.slug + adapters + (f"-{self.base_format}" if self.base_format else "")

    @property
    def autocast_dtype(self) -> Dtype | None:
        """The dtype of autocast, of 16 bits; None without it."""
        return self.dtype if self.autocast and self.dtype in SHORT else None

    @property
    def task(self) -> Task:
        """What the model is trained for."""
        if isinstance(self.model, Architecture):
            return self.model.trained_for
        return "causal-lm" if self.image_size is None else "image-classification"

    def lengths(self, batch_size: int) -> list[int]:
        """Return the lengths of a batch's samples, in tokens, without padding."""
        if self.padding is None:
            return [self.seq_len] * batch_size
        return self.padding.lengths(batch_size, self.seq_len, self.seed)

    def tokens_in(self, batch_size: int) -> int:
        """Return the number of tokens in a batch, without padding."""
        return sum(self.lengths(batch_size))

    @property
    def tokens_in_step(self) -> int:
        """The tokens in the batches of all ranks, without padding."""
        return self.world_size * self.tokens_in(self.batch_size)

    @property
    def tokens_per_sample(self) -> float:
        """The tokens of a sample, without padding, on average."""
        return self.seq_len * (1.0 if self.padding is None else 1 - self.padding.fraction)

    @property
    def world_size(self) -> int:
        """The number of ranks that train the model."""
        return 1 if self.parallel is None else self.parallel.world_size

    @property
    def shards(self) -> int:
        """The number of ranks that have a part of each parameter; 1 where each has the whole."""
        return 1 if self.parallel is None else self.parallel.shards

    @property
    def base_format(self) -> Quantization | None:
        """``quantization``, settled; None where nothing is quantised."""
        stated = self.model.quantization if isinstance(self.model, Architecture) else None
        return self.quantization or stated

    @property
    def trained(self) -> str:
        """``trainable``, settled."""
        return self.trainable or ("all" if self.lora is None else "lora")


def settle_device(fields: dict[str, Any], auto: Callable[[], str], key: str) -> dict[str, Any]:
    """Return fields with a missing or ``auto`` device set to the target's kind or this machine's.

    ``auto`` returns this machine's device; ``key`` is the user's name for the device.

    Raises:
        InputError: The given device is not the target's kind.
    """
    target, device = fields.get("target"), fields.get("device", "auto")
    if device == "auto":
        device = auto() if target is None else device_of(target)
    elif target is not None and device != device_of(target):
        raise refuse(
            key, device, f"target {_spell(target)} requires {device_of(target)}; leave it out"
        )
    return fields | {"device": device}


def _spell(target: str | Target) -> str:
    return target if isinstance(target, str) else "as a mapping"


def is_code(model: Any) -> bool:
    """Return whether a model is a function of the user's own, as ``package.module:function``."""
    return isinstance(model, str) and ":" in model


def refuse_code(model: Any, key: str) -> None:
    """Refuse the user's own code as a model where a file names it.

    Raises:
        InputError: It is such code; the message names the key.
    """
    if is_code(model):
        raise refuse(
            key,
            model,
            "a file runs no code; give it on the command line or from Python, or declare an entry "
            "point (docs/how-to/profile-my-model.md)",
        )


def read_spec(path: Path) -> Experiment:
    """Read a spec file.

    Raises:
        InputError: The file is not a valid spec, or its content does not match its name.
    """
    experiment = read_model(path, Experiment, "the spec of an experiment")
    if path.stem != experiment.id:
        raise InputError(f"{path}: was edited: its content belongs to {experiment.id}")
    refuse_code(experiment.model, f"{path}: model")
    return experiment
