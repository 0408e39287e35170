"""One point of a sweep: frozen, validated, and named by a digest of its content."""

import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dpprof.experiments.config.architecture import NONE, Architecture, Quantization, resolve
from dpprof.experiments.config.fine_tuning import AsLora, AsPadding, Trainable
from dpprof.experiments.config.loops import AsKeepLogits, AsLoss, AsLossDtype, AsUseCache, LoopName
from dpprof.experiments.config.naming import (
    Dimensions,
    For,
    Model,
    ModelInput,
    Name,
    RecurrentSizes,
    is_code,
    refuse_code,
)
from dpprof.experiments.config.optimizers import Optimizer
from dpprof.experiments.config.parallel import AsParallel
from dpprof.experiments.config.quantities import (
    Count,
    NotNegative,
    Positive,
    PositiveShare,
    Seed,
    Size,
    optional,
)
from dpprof.experiments.config.refusals import INDEPENDENT, refuse_combinations, refuse_strategy
from dpprof.experiments.config.spec import Spec
from dpprof.experiments.config.target import Dtype
from dpprof.experiments.config.tasks import OWN_IMAGE_SIZES, OWN_TASKS, Task
from dpprof.experiments.config.validation import InputError, read_model
from dpprof.experiments.config.varying import AsLengths, settle_length
from dpprof.private.number_formats import SHORT

ID_PATTERN = r"[a-z0-9][a-z0-9-]*-[0-9a-f]{8}"


class Experiment(Spec):
    """A complete description of what is measured.

    The canonical JSON of these fields is the spec. Its sha256 is the spec digest. The id is a
    readable stem with the digest's first eight hex digits.
    """

    model: Annotated[Model, BeforeValidator(resolve, json_schema_input_type=ModelInput)] = Field(
        description="a preset's name; a mapping of vocab_size, d_model, layers and heads; "
        "one of kind (LSTM, GRU or RNN), vocab_size, embedding, hidden, layers and classes; "
        "hf:NAME or hf:PATH, a Hugging Face model by name or config.json; or a mapping of hf, "
        "task and the keys of its config that differ"
    )
    method: Name = Field(description="how the clipped, noised gradient is computed")
    batch_size: Count = Field(
        description="samples (sequences) in a batch; where parallel is given, in each rank's; "
        "where accumulation is given, in each of its batches"
    )
    accumulation: Count = Field(
        1,
        description="batches whose gradients are accumulated in a step, as "
        "gradient_accumulation_steps, or a batch in parts of max_batch_size; the same samples "
        "stand for each",
    )
    image_size: Count | None = optional(
        "height and width of an image, in pixels, for a model that reads images; null: "
        "its usual size",
        validate_default=True,
    )
    lengths: AsLengths | None = optional(
        "batches of different lengths, as a loader makes that groups samples by length: how many "
        "batches are padded to each, as a mapping or 128=40,512=25; the instrument estimate plays "
        "them in random order; null: every batch has seq_len"
    )
    seq_len: Count = optional(
        "tokens in a sample; required for text, and left out for images, of which "
        "each counts as one token; with lengths, the longest",
        validate_default=True,
    )
    poisson: bool = Field(
        False,
        description="whether a step takes all of a Poisson-sampled batch at once, of batch_size "
        "samples in the mean; the instrument estimate plays batches of different sizes",
    )
    empty_cache_every: Count | None = optional(
        "steps after which the loop calls torch.cuda.empty_cache(), where batches differ; null: "
        "never"
    )
    decoder_len: Count | None = optional(
        "tokens of a sample that the decoder reads, where the encoder reads seq_len (task "
        "seq2seq-lm); null: as many"
    )
    dtype: Dtype = Field(
        "float32",
        description="float32; tf32 (float32 with TF32 matrix products, CUDA only); bfloat16 or "
        "float16 (autocast, parameters stay float32 unless other keys say so); float64",
    )
    optimizer: Optimizer = Field(
        "adamw",
        description="the optimizer that applies the gradient; adamw-fused is PyTorch's AdamW with "
        "fused=True, which reads and writes each number once; adamw-8bit is bitsandbytes' "
        "AdamW8bit, paged-adamw-8bit and paged-adamw-32bit its paged ones, lion-8bit its "
        "Lion8bit; adamw-in-backward and paged-adamw-8bit-in-backward step each parameter in "
        "backward and free its gradient (method standard); adafactor is PyTorch's "
        "Adafactor; lamb is You et al.'s; sgd-momentum is SGD with momentum 0.9",
    )
    attention: Literal["sdpa", "eager", "opacus"] = Field(
        "sdpa",
        description="sdpa (PyTorch's scaled_dot_product_attention); eager (spelled out); opacus "
        "(DPMultiheadAttention; of recurrent models DPLSTM, DPGRU or DPRNN)",
    )
    checkpointing: Literal["none", "non-reentrant", "reentrant"] = Field(
        "none",
        description="none; non-reentrant or reentrant (each block stores only its input and is "
        "computed again in backward, with PyTorch's newer or older implementation)",
    )
    checkpointed_share: PositiveShare = Field(
        1.0,
        description="the share of blocks that are checkpointed, spread evenly: 0.5 is every second",
    )
    device: Literal["cpu", "cuda"] = Field(description="where the experiment runs")
    target: For | None = optional(
        "the device that the instrument estimate predicts for: a target's name, cpu "
        "(this machine), or a mapping of memory_bytes, flops_per_s and bandwidth_bytes_per_s; "
        "null: the device of this experiment"
    )
    max_grad_norm: Positive = Field(1.0, description="clipping bound C of a sample's gradient")
    noise_multiplier: NotNegative = Field(
        1.0, description="noise standard deviation as a multiple of max_grad_norm"
    )
    learning_rate: Positive = Field(1e-3, description="the optimizer's learning rate")
    seed: Seed = Field(0, description="seed of weights, tokens and noise")
    warmup_steps: Count = Field(3, description="steps before the timed ones; reported separately")
    timed_steps: Count = Field(10, description="steps whose times are reported")
    cpu_threads: Count | None = optional("number of PyTorch's threads; null: every core it may use")
    timeout_s: Positive = Field(
        900.0, description="seconds after which an attempt ends with outcome timeout"
    )
    memory_limit_bytes: Size | None = optional(
        "memory the experiment may use, such as 4GiB; more ends with outcome oom. On "
        "cpu: private writable memory of the process; on cuda: the allocator's share of the device"
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
    lora: AsLora | None = optional(
        "adapters for a Hugging Face model: a mapping of rank, alpha, target_modules "
        "and dropout, or rank=16,alpha=32,target_modules=q_proj+v_proj; or ia3; null: none"
    )
    trainable: Trainable | None = optional(
        "the parameters that are trained: all, lora, bias, head, or a regular "
        "expression that is searched in their names; null: lora where there are adapters, else all"
    )
    padding: AsPadding | None = optional(
        "samples of different lengths, for a Hugging Face model: the mean share of "
        "padding in a batch, or a mapping with the key fraction; or packed, rows of several "
        "documents without padding (method standard); null: every sample has seq_len tokens"
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
    loop: LoopName = Field(
        "dpprof",
        description="the training loop, a name for values of loss, loss_dtype, keep_logits and "
        "use_cache: dpprof; hf-trainer (transformers' Trainer); hf-manual (a loop over outputs = "
        "model(**batch)); opacus-tutorial; torchtune; timm",
    )
    loss: AsLoss = optional(
        "what a sample's loss is: cross-entropy (of its logits); chunked-cross-entropy (of 8 "
        "pieces of its tokens, with logits of each); labels (Hugging Face's own, by labels=); "
        "sum-of-logits (of benchmarks without labels); null: as the loop computes it",
        validate_default=True,
    )
    loss_dtype: AsLossDtype = optional(
        "what the loss computes in where logits have 16 bits: float32, of which there is a copy; "
        "or logits, in their dtype; null: as the loop does. The loss labels decides itself",
        validate_default=True,
    )
    keep_logits: AsKeepLogits = optional(
        "whether logits, as the model computed them, live on: true: until the next step, as in a "
        "function with out = model(...); next-forward: until the next forward pass has returned, "
        "as in a loop with out = model(...); false: they are freed in forward, as in "
        "loss = model(...).loss; null: as the loop keeps them",
        validate_default=True,
    )
    use_cache: AsUseCache = optional(
        "whether a Hugging Face model returns its keys and values, as it does where neither the "
        "call nor its config says use_cache=False; they live as long as the logits; null: as the "
        "loop asks",
        validate_default=True,
    )
    parallel: AsParallel | None = optional(
        "several ranks that train one model: a mapping of kind (ddp, fsdp or hsdp) and "
        "world_size, or kind=fsdp,world_size=8; null: one process"
    )
    execution: Literal["eager", "graph", "compiled"] = Field(
        "eager",
        description="how the kernels of a step are started: eager (by Python, one by one); graph "
        "(all at once, as a CUDA graph, CUDA only); compiled (by what torch.compile makes of the "
        "model, which is measured and not predicted)",
    )

    quantization: Annotated[
        Quantization | None,
        BeforeValidator(
            lambda name: None if name == NONE else name, Quantization | Literal["none"] | None
        ),
    ] = optional(
        "format of a Hugging Face model's frozen linear layers, by bitsandbytes: nf4, "
        "nf4-double (the scales are quantised too), fp4, fp4-double or int8; none, or null: as the "
        "config's quantization_config says, else not quantised"
    )

    @field_validator("image_size", mode="before")
    @classmethod
    def _settle_image_size(cls, value: Any, info: ValidationInfo) -> Any:
        """Take the model's usual size where none is given.

        Whether another package's model reads images is for the user to say.
        """
        model = info.data.get("model")
        is_described = isinstance(model, Architecture | Dimensions | RecurrentSizes)
        if not is_described and model not in OWN_IMAGE_SIZES:
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
        if not {"model", "image_size", "lengths"} <= info.data.keys():
            return value or 1  # other errors are told
        value = settle_length(value, info.data["lengths"])
        if info.data["image_size"] is None:
            if value is None:
                raise PydanticCustomError("missing", "Field required")
            return value
        if value not in (None, 1, "1"):
            raise ValueError("the model reads images, so leave seq_len out; image_size is its size")
        return 1

    head: Literal["logits", "chunked", "kept"] = Field(
        "logits",
        description="how the loss is computed: from the logits of all tokens, or chunked: from "
        "those of some tokens at a time, by dpprof.private.linear_cross_entropy; or kept: so too, "
        "and the gradients of logits are kept for backward, not computed again",
    )
    noise_strategy: Annotated[str, AfterValidator(refuse_strategy)] = Field(
        INDEPENDENT,
        description="how the noise of steps is correlated: independent; or banded-8 or bisr-8, "
        "with so many bands, of which all but one keep past noise",
    )

    @model_validator(mode="after")
    def _refuse_combinations(self) -> Self:
        refuse_combinations(self)
        return self

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
        if self.lora is not None and self.lora.ia3:
            adapters = "-ia3"
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
        if self.image_size is not None:
            return "image-classification"
        if isinstance(self.model, RecurrentSizes) and self.model.classes is not None:
            return "sequence-classification"
        return OWN_TASKS.get(str(self.model), "causal-lm")

    def sample_lengths(self, batch_size: int) -> list[int]:
        """Return the lengths of a batch's samples, in tokens, without padding."""
        if self.padding is None:
            return [self.seq_len] * batch_size
        return self.padding.lengths(batch_size, self.seq_len, self.seed)

    def tokens_in(self, batch_size: int) -> int:
        """Return the number of tokens in a batch, without padding."""
        return sum(self.sample_lengths(batch_size))

    @property
    def tokens_in_step(self) -> int:
        """The tokens in the accumulated batches of all ranks, without padding."""
        return self.world_size * self.accumulation * self.tokens_in(self.batch_size)

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
