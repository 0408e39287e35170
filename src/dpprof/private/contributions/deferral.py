"""What only values show of a batch, put aside on the device until a graph was replayed.

A step that is captured as a CUDA graph must not wait for the device, and its Python code does not
run again. So what needs Python is asked after the replay, by one flag; where it is set, the batch
is run again in the ordinary way, which excludes and counts samples and refuses by name.
"""

import torch
from torch import Tensor


class Deferral:
    """Takes what the captured part of a batch would have to look at.

    Args:
        weights_B: 1 for a sample and 0 for padding, (B,), on the device. A graph has batches of one
            size, and a sample that fills it up must contribute nothing.
    """

    def __init__(self, weights_B: Tensor) -> None:
        self.weights_B = weights_B
        self._flags: list[Tensor] = []

    def flag(self, unusual_B: Tensor) -> None:
        """Put aside for which samples something is not as usual; (B,) bool."""
        self._flags.append(unusual_B.any().to(self.weights_B.device))

    def is_unusual(self) -> Tensor:
        """Return whether anything was flagged since the last call; a bool tensor without axes."""
        flags, self._flags = self._flags, []
        return torch.stack(flags).any()
