"""The small models that stand for Hugging Face models in verification.

A stand-in has the layers of the real model and none of its sizes: the same architecture, flags,
adapters' targets and ratio of heads to key-value heads. So one verdict covers every size. Nothing
here imports transformers.
"""

import re
from pathlib import Path
from typing import Self

from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment, Spec
from dpprof.experiments.config.fine_tuning import Lora, Padding, Trainable
from dpprof.experiments.config.validation import InputError, read_model
from dpprof.experiments.planning.shrinking import can_shrink, shrink
from dpprof.experiments.records.verdict import STAND_IN_PREFIX

_RANK = 2
_PADDING = Padding(fraction=0.4)
_LONGEST_KIND = 40


class StandIn(Spec):
    """What of a Hugging Face experiment a verdict is about, besides the method.

    Where the spec's config states every size, these are reduced here. Otherwise the config is
    whole, and is reduced where transformers can complete it.
    """

    model: Architecture
    lora: Lora | None = None
    trainable: Trainable | None = None
    padding: Padding | None = None

    @classmethod
    def of(cls, experiment: Experiment) -> Self | None:
        """Return the stand-in of an experiment's model; None if it is no Hugging Face model."""
        if not isinstance(experiment.model, Architecture):
            return None
        config, lora = experiment.model.config, experiment.lora
        config.pop("quantization_config", None)  # a verdict is about float64
        kind = experiment.model.model_type
        usual = "all" if lora is None else "lora"
        small = shrink(config) if can_shrink(config) else config
        return cls(
            model=Architecture(hf=kind, task=experiment.model.task, **small),
            lora=lora and Lora(rank=_RANK, target_modules=lora.target_modules),
            trainable=None if experiment.trained == usual else experiment.trained,
            padding=experiment.padding and _PADDING,
        )

    @property
    def label(self) -> str:
        """The name in files: ``hf-llama-tied-lora-padded-3f9a1c02``.

        It says how weights are tied only if the config states it. The digits are the digest's.
        """
        tied = self.model.config.get("tie_word_embeddings")
        parts = [
            self.model.slug.removeprefix(STAND_IN_PREFIX)[:_LONGEST_KIND],
            "" if tied is None else "tied" if tied else "untied",
            "" if self.lora is None else "lora",
            "" if self.trainable is None else "part",
            "" if self.padding is None else "padded",
            self.digest[:8],
        ]
        return STAND_IN_PREFIX + "-".join(filter(None, parts))


def libraries_of(label: str) -> tuple[str, ...]:
    """Return the distributions that build a stand-in, by its name."""
    adapted = re.search(r"-lora(-part)?(-padded)?-[0-9a-f]{8}$", label)
    return ("transformers", "peft") if adapted else ("transformers",)


def read_stand_in(path: Path) -> StandIn:
    """Read the file of a stand-in.

    Raises:
        InputError: The file is not valid, or its content does not match its name.
        OSError: It cannot be read.
    """
    stand_in = read_model(path, StandIn, "the model of a verification")
    if path.stem != stand_in.label:
        raise InputError(f"{path}: was edited: its content belongs to {stand_in.label}")
    return stand_in
