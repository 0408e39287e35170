"""Completes the config of a stand-in with transformers' defaults, and shrinks it."""

from typing import Any

import transformers

from dpprof.models.hugging_face import read_config
from dpprof.planning.shrinking import shrink
from dpprof.spec.architecture import Architecture


def complete(architecture: Architecture) -> Architecture:
    """Return an architecture whose sizes are all small, also those that its config leaves out.

    Raises:
        UnsupportedError: It is not that of a causal language model, or transformers refuses it.
    """
    transformers.logging.set_verbosity_error()
    whole: dict[str, Any] = read_config(architecture).to_dict()
    small = shrink(whole)
    if any("experts" in name for name in whole):
        # The other implementations of experts know no float64, or none of torch.func's transforms.
        small["experts_implementation"] = "eager"
    changed = {name: value for name, value in small.items() if value != whole.get(name)}
    return Architecture(**(architecture.model_dump() | changed))
