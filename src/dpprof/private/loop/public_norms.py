"""Suggests a clipping bound from the gradient norms of public data.

A sample's norm is a figure of the sample. A bound that is chosen from norms of the training data
depends on them, and no noise covers that: the guarantee that an accountant tells would be false. So
choose C from public data that are like the private ones, or from nothing but experience, or take
normalised clipping (``factor``), where C need not be tuned.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpprof.private.engine.book_keeping import BookKeeping

_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


class SuggestedBound(NamedTuple):
    """A bound, and the norms that it follows from."""

    max_grad_norm: float
    """Their median, which Abadi et al. 2016, "Deep Learning with Differential Privacy", section 4,
    take."""

    quantiles: dict[float, float]
    """Norms below which the shares of samples lie that are the keys."""


def suggest_max_grad_norm(
    model: nn.Module,
    losses_of: Callable[..., Tensor],
    *batch: Tensor,
    data_is_public: bool = False,
) -> SuggestedBound:
    """Suggest a bound C from the norms of a batch of public samples, on the model as it is.

    Args:
        model: The model, before it is made private.
        losses_of: Computes losses, one for each sample, from tensors like those of the batch.
        batch: The arguments of ``losses_of``, samples first.
        data_is_public: True says that nobody's privacy depends on these samples.

    Raises:
        ValueError: It is not said that the data are public, no sample has a finite norm, or half
            have a norm of zero.
        UnsupportedError: As of ``Clipping``.

    Example:
        >>> import torch
        >>> from dpprof.private import suggest_max_grad_norm
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> x = torch.tensor([[1.0, 0, 0], [0, 2.0, 0], [0, 0, 5.0]])
        >>> losses_of = lambda x: model(x)[:, 0]
        >>> suggest_max_grad_norm(model, losses_of, x, data_is_public=True).max_grad_norm
        2.0
    """
    if not data_is_public:
        raise ValueError(
            "norms of private samples are private, and so is a bound that is chosen from them; "
            "give public samples, and say data_is_public=True"
        )
    clipping = BookKeeping(model, 1.0)
    try:
        clipping.backward(losses_of(*batch))
    finally:
        clipping.remove()
        for parameter in clipping.parameters:
            parameter.grad = None
    assert clipping.sample_norms is not None
    norms = clipping.sample_norms[clipping.sample_norms.isfinite()].double()
    if not len(norms):
        raise ValueError("no sample has a gradient with a finite norm")
    shares = torch.tensor(_QUANTILES, dtype=torch.float64, device=norms.device)
    quantiles = dict(zip(_QUANTILES, torch.quantile(norms, shares).tolist(), strict=True))
    if not quantiles[0.5]:
        raise ValueError("half of the samples have a gradient of zero, which no bound suits")
    return SuggestedBound(quantiles[0.5], quantiles)
