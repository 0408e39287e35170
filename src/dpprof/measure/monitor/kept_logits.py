"""Notices a training loop that holds logits as a step ends, and says what that costs."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dpprof.predict.flops.counter import FlopCounter
from dpprof.private.number_formats import KEPT_LOGITS

_NOTABLE = 2**20
"""Logits of fewer bytes are not worth a warning."""


class LogitsWatch(FlopCounter):  # type: ignore[no-untyped-call]
    """Counts FLOPs, and follows what the head of a model computed: the logits of a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self._products: dict[int, tuple[StorageWeakRef, int]] = {}
        self._logits: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; logits are the last product as wide as what a softmax gets."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = getattr(func, "_opname", "")
        if name in ("mm", "addmm", "bmm") and isinstance(out, Tensor):
            storage = out.untyped_storage()
            ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._products[out.shape[-1]] = ref, storage.nbytes()
        elif name == "_log_softmax" and args[0].shape[-1] in self._products:
            ref, nbytes = self._products[args[0].shape[-1]]
            self._logits[ref] = nbytes
        return out

    def tell_held(self) -> str | None:
        """Return a sentence where logits are held still; None where they are free, or small."""
        held = 0
        for ref, nbytes in self._logits.items():
            held += 0 if ref.expired() else nbytes  # type: ignore[no-untyped-call]
        return f"{held / 2**20:,.0f} MiB of {KEPT_LOGITS}" if held >= _NOTABLE else None
