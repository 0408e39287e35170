"""Hugging Face models by name: from ``hf:llama-3.2-1b`` to the whole config.

A config holds the shape of a model, and may say how its weights are quantised. No weights are read:
they are random. Nothing here imports transformers or bitsandbytes, so planning stays fast.
"""

import functools
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field

from dpprof.experiments.config.quantities import optional
from dpprof.experiments.config.tasks import IMAGE_SIZE, Task, usual_task
from dpprof.experiments.config.validation import one_of
from dpprof.system.files import canonical_json, read_json
from dpprof.system.paths import PACKAGE

PREFIX = "hf:"  # what the name of a Hugging Face model begins with

_ABOUT_FILES = {
    "architectures",
    "attn_implementation",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Keys of a config that say how a checkpoint was saved, and nothing about the model's shape."""

_SAME: Mapping[str, str] = {
    "bert-base-uncased": "bert-base",
    "bert-large-uncased": "bert-large",
    "vit-base-patch16-224": "vit-base",
}
"""The bundled names of models that the hub names otherwise."""

_MAX_NAME = 40

Quantization = Literal["nf4", "nf4-double", "fp4", "fp4-double", "int8"]
"""Formats of bitsandbytes; ``-double`` quantises the scales of blocks too (Dettmers et al. 2023,
"QLoRA")."""

QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
NONE = "none"
"""How weights that are not quantised are spelled."""


class Architecture(BaseModel, frozen=True, extra="allow"):
    """The config of a Hugging Face model, and what it is trained for.

    Every key but ``hf`` and ``task`` is the config's own, as in the model's ``config.json``.
    """

    hf: str = Field(description="the model's name in ids and reports")
    task: Task | None = optional(
        "what it is trained for; null: image-classification for architectures that "
        "read images, seq2seq-lm for those with an encoder and a decoder, else causal-lm"
    )
    model_type: str = Field(description="the architecture, by the name that transformers gives it")

    def __hash__(self) -> int:
        """Hash the whole config, which may hold lists and mappings."""
        return hash(canonical_json(self.model_dump()))

    @property
    def config(self) -> dict[str, Any]:
        """The config, for transformers."""
        return self.model_dump(exclude={"hf", "task"})

    @property
    def trained_for(self) -> Task:
        """``task``, settled."""
        return self.task or usual_task(self.model_type)

    @property
    def quantization(self) -> Quantization | None:
        """The format of its weights that the config states; None where they are not quantised."""
        return read_quantization(self.config.get("quantization_config"))

    @property
    def image_size(self) -> int | None:
        """Height and width of the images, in pixels, that the config states; None for text."""
        if self.trained_for != "image-classification":
            return None
        stated = self.config.get("image_size")
        return stated if isinstance(stated, int) else IMAGE_SIZE

    @property
    def slug(self) -> str:
        """The name, and the task if given, as part of a file's name: ``hf-llama-3-2-1b``."""
        name = self.hf if self.task is None else f"{self.hf}-{self.task}"
        return f"hf-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"[:_MAX_NAME].strip("-")


@functools.cache
def _bundled() -> dict[str, dict[str, Any]]:
    """Return the configs that dpprof has, by name; the file says where each is published."""
    text = (PACKAGE / "experiments" / "config" / "architectures.yaml").read_text(encoding="utf-8")
    return {name: entry["config"] for name, entry in yaml.safe_load(text).items()}


def bundled_names() -> list[str]:
    """Return the names of the configs that dpprof has, sorted."""
    return sorted(_bundled())


def resolve(value: Any) -> Any:
    """Replace a Hugging Face model's name, or a mapping with overrides, by the whole config.

    Any other value is returned as it is. So is a whole config, which has ``model_type``.

    Raises:
        ValueError: There is no such config, or it cannot be used; the message says what can.
    """
    if isinstance(value, str) and value.startswith(PREFIX):
        name = _settle(value)
        return _make(_last_part(name), _find(name))
    if isinstance(value, dict) and isinstance(value.get("model_type"), str):
        value = {"hf": value["model_type"], **value}
    if not (isinstance(value, dict) and "hf" in value):
        return value
    if not isinstance(value["hf"], str):
        raise ValueError("hf must be a model's name")  # noqa: TRY004 (pydantic's way)
    name = _settle(value["hf"])
    overrides = {key: new for key, new in value.items() if key not in ("hf", "task")}
    task = {} if value.get("task") is None else {"task": value["task"]}
    if "model_type" in overrides:
        return _make(name, overrides) | task
    base = _find(name)
    changed = {key for key, new in overrides.items() if key not in base or base[key] != new}
    # The option by which Opacus's users untie weights is spelled.
    untied = overrides.get("tie_word_embeddings") is False and "tie_word_embeddings" in changed
    variant = _last_part(name) + ("-untied" if untied else "")
    variant += "-custom" if changed - {"tie_word_embeddings"} else ""
    return _make(variant, base | overrides) | task


def _settle(name: str) -> str:
    """Return a name without its prefix, and as it is bundled."""
    name = name.removeprefix(PREFIX)
    return _SAME.get(name, name)


def _last_part(name: str) -> str:
    """Return the last part of a path or of a name on the hub that says something."""
    path = Path(name.removeprefix(PREFIX))
    return (
        path.absolute().parent.name
        if path.name == "config.json"
        else path.name.removesuffix(".json")
    )


def _make(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("auto_map"):
        raise ValueError("its config names code of its own, and dpprof runs no code from a config")
    read_quantization(config.get("quantization_config"))
    if not isinstance(config.get("model_type"), str):
        why = "its config has no model_type, which names the architecture"
        raise ValueError(why)  # noqa: TRY004 (pydantic's way)
    # transformers keeps settings of its own under names with an underscore. One of them,
    # _attn_implementation, may name code on the hub.
    kept = {
        key: value
        for key, value in config.items()
        if key not in _ABOUT_FILES and not key.startswith("_")
    }
    return {"hf": name, **kept}


def _find(name: str) -> dict[str, Any]:
    """Return the config of a bundled name, a path, an architecture, or a name on the hub."""
    if name in _bundled():
        return _bundled()[name]
    path = Path(name)
    exists = os.path.exists(path)  # noqa: PTH110 (False, too, where no file can have such a name)
    if name and (exists or name.endswith(".json") or name[0] in "./"):
        return _read(path / "config.json" if exists and path.is_dir() else path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _read(_fetch(name))
    architectures = sorted({str(config["model_type"]) for config in _bundled().values()})
    if name in architectures:
        return {"model_type": name}
    raise ValueError(
        f"after {PREFIX} comes the path of a config.json or of its folder, a name on the hub, as "
        f"owner/name, an architecture ({', '.join(architectures)}), or a bundled name, and "
        "{model_type: mixtral, hidden_size: 1024}, with any keys of its config, is another one; "
        + one_of(bundled_names(), name)
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no mapping")  # noqa: TRY004 (pydantic's way)
    return config


@functools.cache
def _fetch(name: str) -> Path:
    """Fetch a config, and nothing else, from the hub or from its cache."""
    otherwise = f"give the path of its config.json, or a bundled name: {', '.join(bundled_names())}"
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 (an extra)
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415
    except ImportError:
        raise ValueError(f"fetching a config from the hub needs dpprof[hf]; {otherwise}") from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells every attempt
    try:
        return Path(hf_hub_download(name, "config.json"))
    except LocalEntryNotFoundError:
        why = "its config is not in the cache, and the hub cannot be reached"
    except HfHubHTTPError as error:
        why = f"the hub gives no config for it ({type(error).__name__})"
    except (ValueError, OSError) as error:
        why = f"its config cannot be fetched ({json.dumps(str(error)[:100])})"
    raise ValueError(f"{why}; {otherwise}")


def read_quantization(stated: Any) -> Quantization | None:
    """Return the format that a config's ``quantization_config`` states.

    Raises:
        ValueError: It is another method, or an option by which samples would be mixed.
    """
    if not stated:
        return None
    if not isinstance(stated, Mapping):
        raise ValueError("quantization_config must be a mapping")  # noqa: TRY004 (pydantic's way)
    is_8bit, is_4bit = (bool(stated.get(f"load_in_{bits}bit")) for bits in (8, 4))
    method = stated.get("quant_method", "bitsandbytes" if is_8bit or is_4bit else "another method")
    if method != "bitsandbytes" or is_8bit == is_4bit:
        raise ValueError(
            f"its weights are quantised by {method}, and adapters are trained here over nf4, fp4 "
            "and int8 of bitsandbytes alone (load_in_4bit or load_in_8bit in quantization_config)"
        )
    skipped = stated.get("llm_int8_skip_modules") or []
    if not (isinstance(skipped, list | tuple) and all(isinstance(name, str) for name in skipped)):
        raise ValueError("its llm_int8_skip_modules must be a list of modules' names")
    return _read_8bit(stated) if is_8bit else _read_4bit(stated)


def _read_8bit(stated: Mapping[str, Any]) -> Quantization:
    threshold = stated.get("llm_int8_threshold", 6.0)  # which transformers takes
    if threshold != 0:
        raise ValueError(
            f"its llm_int8_threshold is {threshold}: columns of a layer's input are then computed "
            "in 16 bits if one sample of the batch exceeds it, so samples depend on each other; "
            "write llm_int8_threshold: 0 in its quantization_config"
        )
    if stated.get("llm_int8_has_fp16_weight"):
        raise ValueError(
            "its llm_int8_has_fp16_weight keeps weights in 16 bits; write false, or leave "
            "quantization_config out"
        )
    return "int8"


def _read_4bit(stated: Mapping[str, Any]) -> Quantization:
    kind = stated.get("bnb_4bit_quant_type", "fp4")
    double = "-double" if stated.get("bnb_4bit_use_double_quant") else ""
    quantization = next((name for name in QUANTIZATIONS if name == f"{kind}{double}"), None)
    if quantization is None:
        raise ValueError(f"its bnb_4bit_quant_type is {kind!r}, and nf4 and fp4 are known")
    storage = stated.get("bnb_4bit_quant_storage", "uint8")
    if storage not in ("uint8", None):
        raise ValueError(
            f"its bnb_4bit_quant_storage is {storage}, which FullyShardedDataParallel needs alone; "
            "write uint8"
        )
    return quantization
