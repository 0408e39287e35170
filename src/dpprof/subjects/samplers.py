"""Records the code path of each type of layer."""

from collections.abc import Callable
from typing import Any

from torch import nn

from dpprof.private.norms.code_paths import CodePath


class SamplerPaths:
    """Collects code paths; give it to ``TrainingStep.watch_samplers``."""

    def __init__(self) -> None:
        self._seen: dict[str, set[str]] = {}

    def __call__(
        self, layer: nn.Module, path: CodePath, sampler: Callable[..., Any], inputs: tuple[Any, ...]
    ) -> Any:
        """Record the layer's path and call the sampler."""
        self._seen.setdefault(type(layer).__name__, set()).add(path)
        return sampler(*inputs)

    @property
    def by_layer(self) -> dict[str, str] | None:
        """The path of each type of layer; several, with commas, where layers of a type differ."""
        return {kind: ", ".join(sorted(paths)) for kind, paths in self._seen.items()} or None

    @property
    def reasons(self) -> dict[str, str]:
        """Why ``samplers`` is null, if it is."""
        why = "the method asks no layer for per-sample gradients or their norms"
        return {} if self._seen else {"samplers": why}
