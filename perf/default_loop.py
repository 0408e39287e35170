"""A private loop as shipped and without CUDA graphs, each beside a plain step, on a GPU.

Models of Hugging Face by their configs, with random weights, in bfloat16 by autocast, with fused
AdamW: as whoever runs the README's loop. Private batches have a fixed size here, so that a step is
one part, and the first steps, which verify and capture, are not timed. All three step in turn in
one process; a ratio is the median over rounds. The claims: as shipped at most 1.25 times plain for
llama-3.2-1b and its adapters, 1.35 for the others. Where there is no GPU, it runs tiny models, and
no graphs, to show that it runs.

    python perf/default_loop.py --output perf/default_loop.md
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, LlamaConfig, ViTConfig
from transformers.models.auto.modeling_auto import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
)

from dpprof.private import make_private
from interleave import MIN_PAIRS, Comparison, Side, compare, tabulate, take_turns, timed
from script import at_least, describe_place, end, make_parser, publish

CLASSES = 4
WARMUP = 4
TINY: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LLAMA: dict[str, Any] = dict(zip(SIZES, (2048, 8192, 16, 32), strict=True))
LLAMA |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256}
SMOLLM2: dict[str, Any] = dict(zip(SIZES, (576, 1536, 30, 9), strict=True))
SMOLLM2 |= {"num_key_value_heads": 3, "vocab_size": 49152}


class Case(NamedTuple):
    """A training."""

    name: str
    auto: Any
    config: Any
    batch_size: int
    tokens: int  # of a sample; 0 for an image
    claim: float
    adapters: bool = False


LLAMA_1B = partial(LlamaConfig, **LLAMA, tie_word_embeddings=True)
CASES = [
    Case("llama-3.2-1b", AutoModelForCausalLM, LLAMA_1B, 4, 1024, 1.25),
    Case("llama-3.2-1b, LoRA", AutoModelForCausalLM, LLAMA_1B, 4, 1024, 1.25, adapters=True),
    Case("SmolLM2-135M", AutoModelForCausalLM, partial(LlamaConfig, **SMOLLM2), 8, 512, 1.35),
    Case("BERT", AutoModelForSequenceClassification, BertConfig, 32, 128, 1.35),
    Case("ViT-B/16", AutoModelForImageClassification, ViTConfig, 32, 0, 1.35),
]


def build(case: Case, device: torch.device) -> nn.Module:
    """Build a model, the same each time."""
    torch.manual_seed(0)
    is_tiny = device.type == "cpu"
    config = case.config(**(TINY if is_tiny else {}), num_labels=CLASSES)
    model: nn.Module = case.auto.from_config(config).to(device)
    if case.adapters:
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def draw(case: Case, device: torch.device) -> TensorDataset:
    """Draw samples: tokens that are their own labels, tokens with a class, or images with one."""
    count = 2 * case.batch_size
    classes = torch.randint(CLASSES, (count,), device=device)
    if not case.tokens:
        return TensorDataset(torch.randn(count, 3, 224, 224, device=device), classes)
    tokens = case.tokens if device.type == "cuda" else 16
    ids = torch.randint(1000, (count, tokens), device=device)
    return TensorDataset(ids, ids if case.auto is AutoModelForCausalLM else classes)


def losses_with(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of the losses, (B,)."""

    def losses_of(inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            logits = model(inputs).logits
        if logits.dim() == 2:  # noqa: PLR2004
            return functional.cross_entropy(logits.float(), labels, reduction="none")
        losses = functional.cross_entropy(
            logits[:, :-1].transpose(1, 2).float(), labels[:, 1:], reduction="none"
        )
        return losses.mean(1)

    return losses_of


def steps_of(case: Case, execution: str | None, device: torch.device) -> Iterator[None]:
    """Take a private step each time, or a plain one where no execution is given."""
    model, data = build(case, device), draw(case, device)
    losses_of = losses_with(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    batch = [tensor[: case.batch_size] for tensor in data.tensors]
    model.train()
    if execution is None:
        while True:
            losses_of(*batch).mean().backward()  # type: ignore[no-untyped-call]
            adamw.step()
            adamw.zero_grad()
            yield
    loader: Any = DataLoader(data, batch_size=case.batch_size)
    options: dict[str, Any] = {"noise_multiplier": 1.0, "check": False, "execution": execution}
    options["max_batch_size"] = case.batch_size
    private = make_private(model, adamw, loader, max_grad_norm=1.0, **options)
    while True:
        for _, part in private.data_loader.parts():  # drawn, and replaced by a fixed batch
            private.optimizer.take_part(
                part._replace(size=case.batch_size, is_last=True, is_empty=False)
            )
            private.optimizer.backward(losses_of, *batch)
            private.optimizer.step()
            private.optimizer.zero_grad()
            yield


def make_side(case: Case, execution: str | None, device: torch.device) -> Side:
    """Return what takes a step, waits for the device, and returns the seconds."""
    steps = steps_of(case, execution, device)

    def run() -> None:
        next(steps)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return timed(run)


def measure(case: Case, rounds: int, device: torch.device) -> list[Comparison]:
    """Let a plain step, one as shipped and one without graphs take turns."""
    sides = {name or "plain": make_side(case, name, device) for name in (None, "auto", "eager")}
    return compare(take_turns(sides, rounds, WARMUP), "plain", f"{case.name}, ")


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", **at_least(MIN_PAIRS, 20))
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, missed = [], []
    for case in CASES:
        own = measure(case, arguments.rounds, device)
        rows += own
        missed += [case.name] if device.type == "cuda" and own[0].ratio > case.claim else []
    table = tabulate(rows, "ms", 1e3)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU, tiny models"
    place = f"{describe_place('torch', 'transformers')}; {where}"
    publish(__doc__, f"{place}.\n\n{table}", arguments.output, printed=table)
    end("slower than claimed", missed)


if __name__ == "__main__":
    main()
