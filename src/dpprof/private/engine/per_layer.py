"""Per-layer clipping: each layer's part of a sample's gradient has a bound of its own.

ANOTHER MECHANISM than flat clipping: it changes the direction of a sample's gradient, and
equals flat clipping for no bound in general. Each of L layers is clipped to C / sqrt(L), so the
whole sum still has L2 sensitivity C under adding or removing one sample, and noise of standard
deviation sigma C costs as much privacy as with flat clipping. Sources: McMahan et al. 2018,
"Learning Differentially Private Recurrent Language Models", section 2.3; He et al. 2023, "Exploring
the Limits of Differentially Private Deep Learning with Group-wise Clipping".

A layer's norm is known as soon as backward has passed the layer, so one pass is enough and nothing
is kept: 6 B T d p FLOPs and the norm, or 6 B T d p + 2 B d p where a per-sample gradient has fewer
elements than the activations and output gradients.
"""

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpprof.private.contributions.alone import Alone
from dpprof.private.contributions.contributions import Contributions, Kept
from dpprof.private.contributions.sample_norms import SampleNorms
from dpprof.private.engine.engine import Clipping, Enter
from dpprof.private.errors import UnsupportedError


class PerLayerClipping(Clipping):
    """Per-layer clipping in one backward pass: another mechanism than flat clipping.

    Each of the L trained layers has the bound C / sqrt(L). A module that runs as one layer
    (``as_one``) counts as one, and so does each parameter of a module beside the layers in it.
    ``sample_norms`` are (B, L) where all of them run, in the order in which backward reaches them.
    A layer's gradient that is not finite is excluded; so is every layer's gradient of a sample
    whose loss is not finite. Arguments and other errors: ``Clipping``.

    Raises:
        UnsupportedError: A parameter belongs to two layers.

    Formal guarantees: the sum over all layers has L2 sensitivity C = ``max_grad_norm`` under adding
    or removing one sample. The clipped gradient has another direction than that of flat clipping.

    Example:
        >>> import torch
        >>> from dpprof.private import PerLayerClipping
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        >>> clipping = PerLayerClipping(model, max_grad_norm=1.0)
        >>> clipping.backward(model(torch.ones(4, 3)).squeeze(1))
        >>> clipping.sample_norms.shape  # 4 samples, 2 layers
        torch.Size([4, 2])
    """

    keeps = True
    why_once = "and per-layer clipping clips each use by itself"

    def __init__(self, model: nn.Module, max_grad_norm: float, **options: Any) -> None:
        if options.get("stability") is not None:
            raise UnsupportedError(
                "per-layer clipping is not normalised (stability) yet; use BookKeeping or "
                "FlashClipping"
            )
        super().__init__(model, max_grad_norm, **options)
        if self._shared:
            name = self.name_of(next(iter(self._shared)))
            self.remove()
            raise UnsupportedError(f"{name} belongs to two layers; per-layer clipping needs one")
        if self.ranks.size > 1 or self.ranks.is_sharded:
            self.remove()
            raise UnsupportedError("per-layer clipping does not work with several ranks yet")
        self._kept: dict[nn.Parameter, Kept] = {}
        self._norms: list[Tensor] = []

    @property
    def bound(self) -> float:
        """C / sqrt(L), the bound of each layer."""
        return self.max_grad_norm / math.sqrt(len(self._list_layers()))

    @property
    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Each layer's trained parameters, and its bound."""
        bound = self.bound
        trained = ([p for p in own if p.requires_grad] for own in self._list_layers())
        return [(own, bound) for own in trained if own]

    @property
    def _why_no_gradients(self) -> str:
        return (
            "per-layer clipping clips each use of a weight by itself, and a gradient is another; "
            "use BookKeeping or FlashClipping"
        )

    def _list_layers(self) -> list[list[nn.Parameter]]:
        """List the parameters that are clipped together, with those that were frozen since.

        A module whose first forward has not shown how it runs counts as its layers and parameters,
        which are at least as many.
        """
        ones = {module: one for module, one in self._choices.items() if one.is_one}
        inside = {module for one in ones.values() for module in one.inside}
        found: list[list[nn.Parameter]] = []
        for module in self.model.modules():
            if module in inside:
                continue
            if module in ones:
                found.append([p for p in module.parameters() if self.clips(p)])
                continue
            own = [p for p in module.parameters(recurse=False) if self.clips(p)]
            found += [[one] for one in own if one in self._loose]
            found.append([one for one in own if one not in self._loose])
        return [parameters for parameters in found if parameters]

    def _clip(self, losses: Tensor, norms: SampleNorms, enter: Enter) -> None:
        enter("backward")
        count = len(self._list_layers())
        try:
            with self.handling(partial(self._clip_layer, norms, count)):
                torch.autograd.backward(losses, self._make_weights(losses))
            if not self._norms:
                raise RuntimeError("the losses depend on no trained parameter")
            self.sample_norms = torch.stack(self._norms, dim=1)
        finally:
            self._norms.clear()
            self._kept.clear()

    def _keep(self, parameter: nn.Parameter, contribution: Kept) -> None:
        self._kept[parameter] = contribution

    def _measure_alone(self, samples: Sequence[int]) -> Alone | None:
        alone = Alone(samples)
        for kept in self._kept.values():
            alone.measure(alone.take([kept]))
        return alone

    def _find_reused(self, _nodes: Sequence[Any]) -> Collection[nn.Parameter]:
        return ()  # a second use is refused

    def _clip_layer(
        self, norms: SampleNorms, count: int, layer: nn.Module, contributions: Contributions
    ) -> None:
        norms.add(layer, contributions)
        if len(self._norms) == count:
            raise RuntimeError(
                f"more than {count} layers contributed, so a sample could exceed the bound; "
                "make a new clipping"
            )
        bound = self.max_grad_norm / math.sqrt(count)
        norms_B, unsure_B = self._compute_norms(norms, bound)
        self._norms.append(norms_B)
        factors_B = self._compute_factors(norms_B, unsure_B, bound)
        for parameter, _ in contributions:
            kept = [self._kept.pop(parameter)]
            self._add_up(parameter, kept, factors_B, self._take_alone(kept))
