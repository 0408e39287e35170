"""What the parts of a private ``Trainer`` share."""

from typing import TYPE_CHECKING, Any

from dpprof.private.loop.private_optimizer import PrivateOptimizer
from dpprof.private.loop.trainer_arguments import PrivacyArguments
from dpprof.private.loop.trainer_batches import JoinedParts
from dpprof.private.ranks.ranks import Ranks

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # a Trainer follows in the order of classes


class PrivateBase(Trainer):  # type: ignore[misc]  # transformers has no types here
    """The settings and the optimizer of a private ``Trainer``."""

    args: Any
    optimizer: Any
    privacy: PrivacyArguments
    _clipping: Any = None
    _ranks: Ranks
    _steps: JoinedParts | None = None
    _is_sharded: bool
    _draws_anew = False

    @property
    def private_optimizer(self) -> PrivateOptimizer:
        """The optimizer that adds the noise."""
        optimizer: Any = self.optimizer
        while not isinstance(optimizer, PrivateOptimizer):
            optimizer = optimizer.optimizer
        return optimizer
