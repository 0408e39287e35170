"""A tokenizer, a tiny Llama and data as TRL's trainers take them; nothing comes from a network."""

import copy
import os
import tempfile

import pytest
import torch
from small_models import TINY
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # TRL counts its users otherwise
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
tokenizers = pytest.importorskip("tokenizers")

from one_call import seeded  # noqa: E402

from dpprof.private import PrivacyArguments  # noqa: E402
from dpprof.private.noise.noise_keys import make_generator  # noqa: E402
from dpprof.private.trl import PrivateSFTTrainer  # noqa: E402

datasets.disable_progress_bars()

SAMPLES, BOUND = 12, 0.3
SPECIAL = ["[PAD]", "</s>", "[UNK]", "user", "assistant"]
WORDS = [*SPECIAL, *(f"w{at}" for at in range(20))]
OF_TRAINERS = ("data_collator", "eval_dataset", "ref_model")
"""Arguments of trainers, and not of their settings."""

CHOSEN = torch.rand(SAMPLES, generator=make_generator(seeded(1))) < 0.5
"""The samples of the first step."""

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}assistant "
    "{% generation %}{{ m.content }} </s> {% endgeneration %}"
    "{% else %}user {{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def build_tokenizer(side: str = "right"):
    """Make a tokenizer of whole words, with a chat template."""
    words = {word: at for at, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=SPECIAL[2]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=False))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    tokenizer.chat_template, tokenizer.padding_side = TEMPLATE, side
    return tokenizer


def build(kind: str = "whole") -> nn.Module:
    """Make a Llama, or load it in 4 bits; TRL adds adapters to both."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY, vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1)
    model = transformers.LlamaForCausalLM(config)
    if kind != "nf4":
        return model
    pytest.importorskip("bitsandbytes")
    in_4_bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=in_4_bits, device_map="cpu"
        )


def adapters(kind: str):
    """Return the settings of adapters that change something from the start; None for ``whole``."""
    if kind == "whole":
        return None
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(
        r=2,
        init_lora_weights=False,
        target_modules=["q_proj", "v_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )


def words(*numbers: int) -> str:
    return " ".join(WORDS[len(SPECIAL) + number % 20] for number in numbers)


def prompt_of(at: int) -> str:
    return words(*range(at, at + 1 + at % 3))


def answer_of(at: int) -> str:
    return words(*range(3 * at, 3 * at + 2 + at % 4))


def completions() -> list[dict]:
    return [{"prompt": prompt_of(at), "completion": f" {answer_of(at)}"} for at in range(SAMPLES)]


def pairs() -> list[dict]:
    return [
        row | {"chosen": row.pop("completion"), "rejected": f" {answer_of(at + 5)}"}
        for at, row in enumerate(completions())
    ]


def make(trainer: type, folder, *, kind: str = "whole", data=None, **options):
    """Return a private trainer of TRL's."""
    is_sft = issubclass(trainer, PrivateSFTTrainer)
    privacy = {"max_grad_norm": BOUND, "noise_multiplier": 0.0, "sampling_generator": seeded(1)}
    privacy |= {"noise_generator": seeded(2)} | options.pop("privacy", {})
    own = {"model": options.pop("model", None) or build(kind)}
    own |= {name: options.pop(name) for name in OF_TRAINERS if name in options}
    if not is_sft and kind == "whole":
        own.setdefault("ref_model", copy.deepcopy(own["model"]))
    if "eval_dataset" in own:
        own["eval_dataset"] = datasets.Dataset.from_list(own["eval_dataset"])
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 1}
    settings |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    settings |= {"save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "bf16": False}
    settings |= {"output_dir": str(folder), "use_cpu": True, "report_to": []}
    rows = (completions() if is_sft else pairs()) if data is None else data
    return trainer(
        args=(trl.SFTConfig if is_sft else trl.DPOConfig)(**settings | options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=build_tokenizer(),
        peft_config=adapters(kind),
        privacy=PrivacyArguments(**privacy),
        **own,
    )


def trained(model: nn.Module) -> Tensor:
    """Join all trained parameters in float64."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters() if p.requires_grad])


def clipped_sum(model: nn.Module, losses) -> Tensor:
    """Clip the gradient of each loss, and add them up; by autograd, in float64."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros_like(trained(model))
    for loss in losses:
        gradients = torch.autograd.grad(loss, parameters)
        gradient = torch.cat([gradient.double().flatten() for gradient in gradients])
        total += gradient * (BOUND / (gradient.norm() + 1e-6)).clamp(max=1)
    return total
