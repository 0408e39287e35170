"""Turns the refusals of Opacus, and of PyTorch's expanded weights, into ``UnsupportedError``.

A refusal is an exception with which the library itself says that it does not know a model: a
``NotImplementedError`` that Opacus raises, or a ``RuntimeError`` on expanded weights that their
code raises. Two more get a message of dpprof: Opacus's hooks detach every argument of a trained
layer, and fail on one that is no tensor; and its optimizer stacks the samples' norms of all layers,
and fails where a table is looked up once for all samples. Any other exception passes: it may be a
defect, here or there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from dpprof.private.errors import UnsupportedError

_EXPANDED_WEIGHTS = "torch.nn.utils._expanded_weights"
_UNEQUAL = "stack expects each tensor to be equal size"
_HOOKS = "opacus.grad_sample.grad_sample_module"  # and those whose names begin so
UNTIE = (
    "; Opacus's users untie the weights: {hf: NAME, tie_word_embeddings: false}, which is another "
    "model"
)


@contextmanager
def tell_refusals() -> Iterator[None]:
    """Raise ``UnsupportedError`` with the library's own words where the library refuses."""
    try:
        yield
    except AttributeError as error:
        if not (_raising_module(error).startswith(_HOOKS) and error.name == "detach"):
            raise
        kind = type(error.obj).__name__
        raise UnsupportedError(
            f"Opacus: a trained layer takes an argument of type {kind}"
        ) from error
    except (NotImplementedError, RuntimeError) as error:
        (content,) = error.args if len(error.args) == 1 else (error,)
        errors = content if isinstance(content, list) else [content]  # of Opacus's validation
        words = " ".join(str(reason).strip() for reason in errors)
        if _UNEQUAL in words:
            raise UnsupportedError(
                "Opacus: not every layer's input begins with the batch, so not all of its "
                "per-sample gradients are of samples"
            ) from error
        if not _is_refusal(error, words):
            raise
        tied = UNTIE if "tying" in words else ""
        raise UnsupportedError(f"Opacus: {words}{tied}") from error


def _is_refusal(error: Exception, words: str) -> bool:
    module = _raising_module(error)
    if isinstance(error, NotImplementedError):
        return module.partition(".")[0] == "opacus"
    names_them = "Expanded Weights" in words or "ExpandedWeights" in words
    return module.startswith(_EXPANDED_WEIGHTS) and names_them


def _raising_module(error: Exception) -> str:
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return str(traceback.tb_frame.f_globals.get("__name__", ""))
