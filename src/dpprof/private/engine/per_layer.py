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
from typing import Any

import torch
from torch import Tensor, nn

from dpprof.private.contributions.alone import Alone
from dpprof.private.contributions.contributions import Contributions, Kept
from dpprof.private.engine.batch import Batch, Enter
from dpprof.private.engine.engine import Clipping
from dpprof.private.errors import UnsupportedError


class _LayerByLayer(Batch):
    """A batch whose layers are clipped as backward passes them."""

    clipping: "PerLayerClipping"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._kept: dict[nn.Parameter, Kept] = {}
        self._norms_of_layers: list[Tensor] = []
        self._count = len(self.clipping.list_layers())

    def clip(self, enter: Enter) -> None:
        enter("backward")
        with self.handling(self._clip_layer):
            self.ranks.differentiate(self.losses, self.make_weights())
        if not self._norms_of_layers:
            raise RuntimeError("the losses depend on no trained parameter")
        self.sample_norms = torch.stack(self._norms_of_layers, dim=1)

    def keep(self, parameter: nn.Parameter, contribution: Kept) -> None:
        self._kept[parameter] = contribution

    def measure_alone(self, samples: Sequence[int]) -> Alone | None:
        alone = Alone(samples)
        for kept in self._kept.values():
            alone.measure(alone.take([kept]))
        return alone

    def _clip_layer(self, layer: nn.Module, contributions: Contributions) -> None:
        self.norms.add(layer, contributions)
        if len(self._norms_of_layers) == self._count:
            raise RuntimeError(
                f"more than {self._count} layers contributed, so a sample could exceed the bound; "
                "make a new clipping"
            )
        bound = self.clipping.max_grad_norm / math.sqrt(self._count)
        norms_B, unsure_B = self.compute_norms(bound)
        self._norms_of_layers.append(norms_B)
        factors_B = self.compute_factors(norms_B, unsure_B, bound)
        for parameter, _ in contributions:
            kept = [self._kept.pop(parameter)]
            taken = self.alone.take(kept) if self.alone else {}
            self.add_up(parameter, kept, factors_B, taken)


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
    _batch_type = _LayerByLayer

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

    @property
    def bound(self) -> float:
        """C / sqrt(L), the bound of each layer."""
        return self.max_grad_norm / math.sqrt(len(self.list_layers()))

    @property
    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Each layer's trained parameters, and its bound."""
        bound = self.bound
        trained = ([p for p in own if p.requires_grad] for own in self.list_layers())
        return [(own, bound) for own in trained if own]

    @property
    def _why_no_gradients(self) -> str:
        return (
            "per-layer clipping clips each use of a weight by itself, and a gradient is another; "
            "use BookKeeping or FlashClipping"
        )

    def list_layers(self) -> list[list[nn.Parameter]]:
        """List the parameters that are clipped together, with those that were frozen since.

        A module whose first forward has not shown how it runs counts as its layers and parameters,
        which are at least as many.
        """
        choices = {module: choice for module, choice in self._choices.items() if choice.is_one}
        inside = {module for choice in choices.values() for module in choice.inside}
        layers: list[list[nn.Parameter]] = []
        for module in self.model.modules():
            if module in inside:
                continue
            if module in choices:
                layers.append([p for p in module.parameters() if self.clips(p)])
                continue
            own = [p for p in module.parameters(recurse=False) if self.clips(p)]
            layers += [[parameter] for parameter in own if parameter in self._loose]
            layers.append([parameter for parameter in own if parameter not in self._loose])
        return [parameters for parameters in layers if parameters]

    def _find_reused(self, *_: Any) -> Collection[nn.Parameter]:
        return ()  # a second use is refused
