"""Holds a user's batch as the arguments of the loss, and splits it by samples."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dpprof.private.samples import batches


class TrainingBatch(NamedTuple):
    """The arguments of a loss, of any structure (``batches``), by position or by name."""

    inputs: tuple[Any, ...]
    named: dict[str, Any]
    samples: int

    @property
    def tree(self) -> dict[Any, Any]:
        """All arguments."""
        return {**dict(enumerate(self.inputs)), **self.named}

    @property
    def parts(self) -> list[Tensor]:
        """The tensors, samples first, that have an entry for each sample."""
        leaves = batches.find_split(self.tree, self.samples)
        return [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]

    @property
    def split(self) -> dict[str, Any]:
        """The parts that have an entry for each sample, by their paths."""
        return dict(batches.find_split(self.tree, self.samples))

    @property
    def whole(self) -> list[str]:
        """The paths of tensors that belong to all samples."""
        return list(batches.find_whole(self.tree, self.samples))

    def map(self, function: Callable[[Tensor], Tensor]) -> "TrainingBatch":
        """Return the batch with a function applied to each tensor of ``parts``."""
        mapped = lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf  # noqa: E731
        return self.of_tree(batches.apply(self.tree, self.samples, mapped))

    def take(self, places: Sequence[int], whole: Any = None) -> "TrainingBatch":
        """Return the batch of some of its samples; the part ``whole`` stays as it is."""
        taken = batches.take(self.tree, self.samples, places, whole)
        return self.of_tree(taken)._replace(samples=len(places))

    def of_tree(self, tree: dict[Any, Any]) -> "TrainingBatch":
        """Return the batch with other arguments."""
        inputs = tuple(tree[position] for position in range(len(self.inputs)))
        return self._replace(inputs=inputs, named={name: tree[name] for name in self.named})

    def call(self, function: Callable[..., Any], *first: Any) -> Any:
        """Call a function with the batch."""
        return function(*first, *self.inputs, **self.named)


def read_batch(value: Any, function: Callable[..., Any], *first: Any) -> TrainingBatch:
    """Return a batch as arguments of a function; with 0 samples if only losses tell how many."""
    batch = TrainingBatch(*batches.give(function, value, *first), 0)
    try:
        sizes = set(batches.find_sizes(batch.tree))
    except RecursionError:
        raise ValueError(
            "an object of the batch refers to itself, so the batch cannot be split; give its "
            "tensors, samples first"
        ) from None
    batch = batch._replace(samples=sizes.pop() if len(sizes) == 1 else 0)
    if batch.samples == 1 or not (sizes or batch.samples):
        shapes = ", ".join(str(tuple(part.shape)) for part in batch.parts) or "nothing"
        raise ValueError(
            f"batch must be tensors of at least two samples, samples first, and is {shapes}"
        )
    return batch


def count_samples(value: Any, batch: TrainingBatch) -> int:
    """Return how many samples a batch has whose parts have several lengths: as many as losses."""
    shape: tuple[int, ...] = getattr(getattr(value, "loss_per_sample", value), "shape", ())
    sizes = sorted(set(batches.find_sizes(batch.tree)))
    if len(shape) != 1 or shape[0] not in sizes:
        raise ValueError(
            f"batch must be tensors of samples, samples first, and has parts of {sizes} entries; "
            f"let loss return one loss for each sample, so that their number is known, and not "
            f"{tuple(shape)}"
        )
    if shape[0] < 2:  # noqa: PLR2004 (one sample cannot be mixed)
        raise ValueError("batch must have at least two samples, and has 1")
    return shape[0]
