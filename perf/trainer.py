"""What does ``PrivateTrainer`` cost beside an ordinary loop with ``make_private``?

A small Llama, whole and with adapters, in parts of four samples. Both draw the same batches and
train the same numbers; the trainer logs every ten steps. In one process each step of the trainer is
followed by one of the loop, which runs in a callback, so that what slows the machine for a moment
slows both. Times are CPU times of one thread; a pair is ten steps of each, of which the trainer
logs one. The first row is the loop beside another of itself: what the machine's noise alone makes
of a ratio. The claim: at most 1.03 times.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from dpprof.private import PrivacyArguments, PrivateTrainer, make_private
from dpprof.private.loop.trainer_losses import read_losses
from interleave import MIN_PAIRS, Comparison, Side, conclude, timed
from script import at_least, describe_place, make_parser

SAMPLES, TOKENS, VOCABULARY = 64, 64, 512
PART, PARTS = 4, 2
"""Samples at a time, and how many times that a batch is expected to have."""

WARMUP_STEPS, STEPS_OF_PAIR = 11, 10
"""The first log belongs to the warm-up: it finds epsilon, which later logs do as that is cheap."""
CLAIM = 1.03
PRIVACY: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}


def build(*, adapters: bool) -> nn.Module:
    """Build a Llama, the same each time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))
    if adapters:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    return model


def draw() -> list[dict[str, Tensor]]:
    """Draw sequences."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=generator)
    return [{"input_ids": sample, "labels": sample} for sample in ids]


def generators() -> dict[str, Any]:
    """Make the sources of samples and noise."""
    names = ("sampling_generator", "noise_generator")
    return {name: torch.Generator().manual_seed(seed) for seed, name in enumerate(names, 2)}


def steps_of_loop(*, adapters: bool) -> Iterator[None]:
    """Take a step of an ordinary loop each time."""
    data: Any = draw()
    loader: Any = DataLoader(data, batch_size=PART * PARTS, shuffle=True)
    model = build(adapters=adapters)
    sgd = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    _, optimizer, loader = make_private(
        model, sgd, loader, max_batch_size=PART, check=False, **PRIVACY, **generators()
    )
    model.train()
    while True:
        for batch in loader:
            losses = read_losses(model(batch["input_ids"]).logits, batch["labels"], shifts=True)
            before = optimizer.steps
            optimizer.backward(losses)
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.steps > before:
                yield


def time_loop(*, adapters: bool) -> Side:
    """Return what takes a step of the loop, and returns its CPU seconds."""
    return timed(partial(next, steps_of_loop(adapters=adapters)), clock=time.process_time)


def join(name: str, seconds: Sequence[tuple[float, float]]) -> Comparison:
    """Join the steps of each pair."""
    starts = range(0, len(seconds), STEPS_OF_PAIR)
    pairs = [seconds[at : at + STEPS_OF_PAIR] for at in starts]
    sums = [(sum(ours for ours, _ in pair), sum(loops for _, loops in pair)) for pair in pairs]
    return Comparison(name, sums)


class InTurn(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Takes a step of the loop after each of the trainer's."""

    def __init__(self, take_step: Side) -> None:
        self.take_step = take_step
        self.seconds: list[tuple[float, float]] = []
        self._start = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._start = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock of the trainer's step, which the last step's log belongs to."""
        of_trainer = time.process_time() - self._start
        self.seconds.append((of_trainer, self.take_step()))
        self._start = time.process_time()


def compare(*, adapters: bool, pairs: int) -> Comparison:
    """Train with the trainer, and the loop in turn."""
    in_turn = InTurn(time_loop(adapters=adapters))
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateTrainer(
            model=build(adapters=adapters),
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=PART,
                gradient_accumulation_steps=PARTS,
                max_steps=WARMUP_STEPS + STEPS_OF_PAIR * pairs,
                learning_rate=1e-3,
                optim="adamw_torch",
                logging_steps=STEPS_OF_PAIR,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=draw(),
            privacy=PrivacyArguments(**PRIVACY, **generators()),
            callbacks=[in_turn],
        )
        trainer.train()
    name = "trainer / loop, " + ("adapters" if adapters else "whole")
    return join(name, in_turn.seconds[WARMUP_STEPS:])


def compare_loops(pairs: int) -> Comparison:
    """Compare the loop with another of itself."""
    loop, other = time_loop(adapters=False), time_loop(adapters=False)
    steps = WARMUP_STEPS + STEPS_OF_PAIR * pairs
    seconds = [(loop(), other()) for _ in range(steps)]
    return join("loop / loop", seconds[WARMUP_STEPS:])


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", **at_least(MIN_PAIRS, 14))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [compare_loops(arguments.pairs)]
    rows += [compare(adapters=adapters, pairs=arguments.pairs) for adapters in (False, True)]
    place = describe_place("torch", "transformers", threads=1)
    place += f"; {PART * PARTS} samples expected of {TOKENS} tokens, AdamW"
    conclude(__doc__, place, rows, arguments.output, CLAIM)


if __name__ == "__main__":
    main()
