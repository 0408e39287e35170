"""Fine-tune adapters of a Llama privately, with transformers' Trainer.

python examples/finetune_llama_lora.py
python examples/finetune_llama_lora.py --model meta-llama/Llama-3.2-1B --bf16
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

from dpprof.private import PrivacyArguments, PrivateTrainer

SAMPLES, TOKENS = 256, 32


def generate() -> list[dict[str, Tensor]]:
    """Generate prompts with answers; only answers have labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, (SAMPLES, TOKENS), generator=generator)
    ids[:, TOKENS // 2 :] = ids[:, : TOKENS // 2].flip(1)
    labels = ids.clone()
    labels[:, : TOKENS // 2] = -100
    return [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]


def build(name: str | None) -> nn.Module:
    """Load a model by its name, or build a small one with random weights; add adapters."""
    if name is None:
        torch.manual_seed(0)
        sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))
    else:
        model = AutoModelForCausalLM.from_pretrained(name)
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))


def main() -> None:
    """Train, and say what was spent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a name on the hub, or a folder")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateTrainer(
            model=build(arguments.model),
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=8,  # 64 samples are expected in a batch
                num_train_epochs=5,
                learning_rate=5e-3,
                bf16=arguments.bf16,
                logging_steps=4,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=generate(),
            privacy=PrivacyArguments(
                max_grad_norm=0.5, epsilon=arguments.epsilon, delta=1e-3, head="chunked"
            ),
        )
        trainer.train()
    print(f"epsilon {trainer.spent.epsilon():.2f} at delta {trainer.privacy.delta}")
    print("without adapters or privacy, what is faster: dpprof advise --model hf:... --lora rank=8")


if __name__ == "__main__":
    main()
