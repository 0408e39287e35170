"""Refuses steps that write samples into other released tensors than trained parameters.

``state_dict()`` also holds buffers and frozen parameters. One that forward changes, such as a
running mean, a codebook, an expert's bias or a cache, carries samples out of the run without noise.
Versions show changes in place, but not those through ``.data``, so the values of buffers are
compared too. A frozen parameter that is written through ``.data``, as adapters are merged, is not
seen.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dpprof.clipping.tensor_kinds import find_no_bytes
from dpprof.spec.registry import UnsupportedError

_Place = tuple[nn.Module, str]


class ReleasedState:
    """The tensors of ``state_dict()`` that are not trained with noise.

    Args:
        model: The model.
        own: Returns the parameter that stays, of one that a layer has at present.
        is_clipped: Tells whether a parameter is trained with noise.
        public: Names of buffers and frozen parameters that hold nothing of the samples.

    Raises:
        ValueError: ``public`` names something that the model does not have.
        UnsupportedError: A module puts something else than tensors into ``state_dict()``, or
            tensors whose numbers cannot be compared.
    """

    def __init__(
        self,
        model: nn.Module,
        own: Callable[[nn.Parameter], nn.Parameter],
        is_clipped: Callable[[nn.Parameter], bool],
        public: Collection[str],
    ) -> None:
        self._model, self._own, self._is_clipped = model, own, is_clipped
        self._public = {
            (module, name): _join(path, name)
            for path, module in model.named_modules()
            for name in ("_extra_state", *module._buffers, *module._parameters)  # noqa: SLF001
            if _join(path, name) in public
        }
        unknown = set(public).difference(self._public.values())
        if unknown:
            raise ValueError(f"public_buffers: the model has no buffer {min(unknown)!r}")
        for path, module in model.named_modules():
            is_plain = type(module).get_extra_state is nn.Module.get_extra_state
            if not is_plain and (module, "_extra_state") not in self._public:
                raise UnsupportedError(
                    f"state_dict() holds {_join(path, '_extra_state')}, which may carry samples; "
                    "if it holds none, name it in public_buffers"
                )
        self._tensors = self._find_tensors()
        self._versions = [one._version for one in self._tensors.values()]  # noqa: SLF001
        buffers = [p for p, one in self._tensors.items() if not isinstance(one, nn.Parameter)]
        for place in buffers:
            what = find_no_bytes(self._tensors[place])
            if what is not None:
                raise UnsupportedError(
                    f"{self._name(place)} is in state_dict(), must not change, and is {what}, or "
                    "make it a buffer that is not persistent, or name it in public_buffers if it "
                    "holds nothing of the samples"
                )
        self._values = {place: self._tensors[place].detach().clone() for place in buffers}

    def verify(self) -> None:
        """Refuse a step after a change.

        Raises:
            RuntimeError: Something that is not public changed, came or went.
        """
        before, present = self._tensors, self._find_tensors()
        for place in before.keys() ^ present.keys():
            self._refuse(place, "came" if place in present else "went")
        for (place, tensor), version in zip(before.items(), self._versions, strict=True):
            if present[place] is not tensor:
                self._refuse(place, "was replaced")
            if tensor._version != version:  # noqa: SLF001
                self._refuse(place, "was changed in place")
            if place in self._values and not is_same(tensor, self._values[place]):
                self._refuse(place, "was changed through .data")

    def _refuse(self, place: _Place, how: str) -> None:
        raise RuntimeError(
            f"{self._name(place)} {how} since this clipping was made, and is in state_dict() "
            "without noise; keep it as it is, make it a buffer that is not persistent, or name it "
            "in public_buffers if it holds nothing of the samples (after you load or move a model, "
            "make a new clipping)"
        )

    def _name(self, place: _Place) -> str:
        module, name = place
        paths = {one: path for path, one in self._model.named_modules()}
        return _join(paths.get(module, type(module).__name__), name)

    def _find_tensors(self) -> dict[_Place, Tensor]:
        found: dict[_Place, Tensor] = {}
        for module in self._model.modules():
            temporary = module._non_persistent_buffers_set  # noqa: SLF001 (it has no public name)
            for name, buffer in module._buffers.items():  # noqa: SLF001 (without making paths)
                if buffer is not None and name not in temporary:
                    found[module, name] = buffer
            for name, present in module._parameters.items():  # noqa: SLF001
                if present is not None and not present.requires_grad:
                    parameter = self._own(present)
                    if not self._is_clipped(parameter):
                        found[module, name] = parameter
        for place in self._public:
            found.pop(place, None)
        return found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def is_same(tensor: Tensor, other: Tensor) -> bool:
    """Tell whether tensors have the same bytes, if they have any. This waits for the device."""
    if isinstance(tensor, FakeTensor) or find_no_bytes(tensor) is not None:
        return True
    plain = (each.detach().resolve_conj().resolve_neg().contiguous() for each in (tensor, other))
    one, two = (each.view(-1).view(torch.uint8) for each in plain)
    return torch.equal(one, two)
