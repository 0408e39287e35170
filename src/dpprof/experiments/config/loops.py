"""The loops that people train with: what their loss computes, and what of forward lives on.

Read in the code of each, as `source` says; the optimizer, precision and checkpointing of a loop are
keys of their own.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, ValidationInfo

from dpprof.experiments.config.architecture import Architecture

LoopName = Literal["dpprof", "hf-trainer", "hf-manual", "opacus-tutorial", "torchtune", "timm"]
Loss = Literal["cross-entropy", "chunked-cross-entropy", "labels", "sum-of-logits"]
LossDtype = Literal["float32", "logits"]
KeepLogits = Literal[False, True, "next-forward"]
CHUNKS = 8
"""The pieces of ``chunked-cross-entropy``: torchtune's ``num_output_chunks``."""


class Loop(NamedTuple):
    """What a loop's name stands for: where it is written, and values of the keys of these names."""

    source: str
    loss: Loss = "cross-entropy"
    loss_dtype: LossDtype = "float32"
    keep_logits: KeepLogits = False
    use_cache: bool = False

    @property
    def texts(self) -> Mapping[str, str]:
        """Its values as texts, by key."""
        return {key: str(value).lower() for key, value in self._asdict().items()}


LOOPS: Mapping[LoopName, Loop] = {
    "dpprof": Loop("loss = losses_of(model(x), y).mean()"),
    "hf-trainer": Loop(
        "transformers 5.23, trainer.py: compute_loss gets loss and logits by labels=, and returns "
        "the loss; use_cache is false",
        loss="labels",
    ),
    "hf-manual": Loop(
        "transformers, examples/pytorch/language-modeling/run_clm_no_trainer.py: "
        "outputs = model(**batch); loss = outputs.loss",
        loss="labels",
        keep_logits="next-forward",
        use_cache=True,
    ),
    "opacus-tutorial": Loop(
        "Opacus, tutorials/building_image_classifier.ipynb: output = model(images); "
        "loss = criterion(output, target)",
        loss_dtype="logits",
        keep_logits="next-forward",
    ),
    "torchtune": Loop(
        "torchtune, modules/loss/ce_chunked_output_loss.py and "
        "recipes/full_finetune_single_device.py: del logits",
        loss="chunked-cross-entropy",
    ),
    "timm": Loop(
        "timm, benchmark.py: output = self.model(x), in a function that ends with optimizer.step()",
        keep_logits=True,
    ),
}


def _settle(value: Any, info: ValidationInfo) -> Any:
    """Return a value of an experiment's key, of its loop where it has none."""
    if value is None:
        loop = LOOPS[info.data.get("loop", "dpprof")]  # of a wrong name another error is told
        return getattr(loop, str(info.field_name))
    return {"false": False, "true": True}.get(str(value).lower(), value)


def _settle_cache(value: Any, info: ValidationInfo) -> Any:
    """Return a value of ``use_cache``; where it has none, models of this package keep nothing."""
    is_known = isinstance(info.data.get("model"), Architecture)
    return _settle(value if is_known or value is not None else False, info)


AsLoss = Annotated[Loss, BeforeValidator(_settle)]
AsLossDtype = Annotated[LossDtype, BeforeValidator(_settle)]
AsKeepLogits = Annotated[KeepLogits, BeforeValidator(_settle)]
AsUseCache = Annotated[bool, BeforeValidator(_settle_cache)]
