"""What models are trained for: the tasks, and which models read images.

Nothing here imports torch or transformers, so planning stays fast.
"""

from collections.abc import Mapping
from typing import Literal, get_args

Task = Literal[
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "sequence-classification",
    "token-classification",
    "question-answering",
    "image-classification",
]
TASKS: tuple[str, ...] = get_args(Task)

OWN_IMAGE_SIZES: Mapping[str, int | None] = {
    **dict.fromkeys(("tiny", "small", "medium", "1b", "ptb-lstm-small", "ptb-lstm-medium")),
    **dict.fromkeys(("char-lstm", "char-gru", "char-rnn")),
    "opacus-cnn": 28,
    "resnet20-gn": 32,
    "wrn-16-4": 32,
    "wrn-40-4": 32,
    "resnet50-gn": 224,
    "vit-b16": 224,
}
"""The usual height and width, in pixels, of the images of dpprof's own models; None for those that
read text."""

OWN_TASKS: Mapping[str, Task] = dict.fromkeys(
    ("char-lstm", "char-gru", "char-rnn"), "sequence-classification"
)
"""What dpprof's own models of text are trained for, where it is not to tell the next token."""

IMAGE_SIZE = 224
"""The usual height and width of transformers' image models whose config does not state it."""

_OBVIOUS: Mapping[Task, str] = {
    "image-classification": "beit bit convnext convnextv2 cvt deit dinov2 efficientnet focalnet "
    "hiera levit mobilenet_v2 mobilevit poolformer pvt pvt_v2 regnet resnet segformer swiftformer "
    "swin swinv2 vit vit_msn",
    "seq2seq-lm": "bart bigbird_pegasus led longt5 m2m_100 marian mbart mt5 mvp pegasus t5 umt5",
}
"""The architectures that are trained for a task where nothing else is stated."""


def name_size(seq_len: int, image_size: int | None) -> str:
    """Return the size of a sample: ``1,024 tokens``, or ``224 x 224 pixels``."""
    return f"{seq_len:,} tokens" if image_size is None else f"{image_size} x {image_size} pixels"


def name_units(image_size: int | None) -> str:
    """Return what the tokens are called that a throughput counts: an image counts as one."""
    return "tokens" if image_size is None else "samples"


def usual_task(model_type: str) -> Task:
    """Return the task of an architecture for which none is given.

    Example:
        >>> usual_task("vit"), usual_task("llama")
        ('image-classification', 'causal-lm')
    """
    for task, architectures in _OBVIOUS.items():
        if model_type in architectures.split():
            return task
    return "causal-lm"
