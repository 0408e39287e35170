"""Puts checks of values aside on the device until a CUDA graph was replayed.

A step that is captured as a CUDA graph must not wait for the device, and its Python code does not
run again. So checks set one flag on the device, which is read after the replay. Where it is set,
the batch runs again in the ordinary way, which excludes and counts samples and refuses by name.
"""

import torch
from torch import Tensor


class Deferral:
    """Takes the answers of checks inside of a captured step, which must not look at them.

    ``weights_B`` are 1 for a sample and 0 for padding, (B,), on the device. A graph has batches
    of one size, and a sample that fills it up must contribute nothing.
    """

    def __init__(self, weights_B: Tensor) -> None:
        self.weights_B = weights_B
        self._flags: list[Tensor] = []

    def flag(self, unusual_B: Tensor) -> None:
        """Flag the batch if something is unusual of any sample; (B,) bool."""
        self._flags.append(unusual_B.any().to(self.weights_B.device))

    def is_unusual(self) -> Tensor:
        """Return whether anything was flagged since the last call; a bool tensor without axes."""
        flags, self._flags = self._flags, []
        return torch.stack(flags).any()
