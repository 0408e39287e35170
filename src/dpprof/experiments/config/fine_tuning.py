"""Fine-tuning: adapters, which parameters are trained, and padded batches."""

import random
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from dpprof.experiments.config.quantities import Count, Fraction, Positive, optional, read_pairs

PARTS = ("all", "lora", "bias", "head")
"""The parts of a model that ``trainable`` knows by name; any other text is a regular expression."""


def _read_pairs(value: Any) -> Any:
    """Return a mapping for a text of pairs, and for ``ia3``."""
    return {"rank": 1, "ia3": True} if value == "ia3" else read_pairs(value, "rank=16,alpha=32")


def _read_modules(value: Any) -> Any:
    """Return the names of modules in a text, which ``+`` separates."""
    if isinstance(value, str) and value != "all-linear":
        value = value.split("+")
    if isinstance(value, list | tuple) and not (value and all(value)):
        raise ValueError("it must be all-linear, or at least one module's name")
    return value


class Lora(BaseModel, frozen=True, extra="forbid"):
    """Low-rank adapters (Hu et al. 2022), as peft builds them."""

    rank: Count = Field(description="width of the adapters")
    alpha: Positive | None = optional(
        "scale of the adapters, times their rank; null: twice the rank"
    )
    target_modules: Annotated[
        Literal["all-linear"] | tuple[str, ...] | None, BeforeValidator(_read_modules)
    ] = optional(
        "names of the modules that get an adapter, or all-linear; null: peft's choice "
        "for the architecture"
    )
    dropout: Fraction = Field(0.0, description="dropout of the adapters' inputs")
    use_dora: bool = Field(
        False,
        description="DoRA (Liu et al. 2024): beside adapters, which give a direction, a trained "
        "length of each output",
    )
    ia3: bool = Field(
        False,
        description="IA3 (Liu et al. 2022), in place of low-rank adapters: vectors that scale "
        "keys, values and feed-forward, in peft's choice of modules; written ia3, of rank 1",
    )

    @model_validator(mode="after")
    def _refuse_others_with_ia3(self) -> Self:
        others = (self.alpha, self.target_modules, self.dropout, self.use_dora)
        if self.ia3 and (self.rank != 1 or any(others)):
            raise ValueError("ia3 has rank 1 and no other key: its modules are peft's choice")
        return self

    @property
    def text(self) -> str:
        """The adapters in a cell of a table: ``rank 16, alpha 32, q_proj+v_proj``."""
        if self.ia3:
            return "IA3"
        modules = self.target_modules
        named = "+".join(modules) if isinstance(modules, tuple) else modules
        dropout = f"dropout {self.dropout:g}" if self.dropout else None
        dora = "DoRA" if self.use_dora else None
        parts = [f"rank {self.rank}", f"alpha {self.scale:g}", named, dropout, dora]
        return ", ".join(part for part in parts if part)

    @property
    def scale(self) -> float:
        """``alpha``, settled."""
        return 2 * self.rank if self.alpha is None else self.alpha


class Padding(BaseModel, frozen=True, extra="forbid"):
    """Samples of different lengths, padded on the right to ``seq_len``."""

    fraction: Fraction = Field(0.0, description="mean share of padding in a batch")
    packed: bool = Field(False, description="rows are full, of several documents each")

    def lengths(self, batch_size: int, seq_len: int, seed: int) -> list[int]:
        """Return the lengths of a batch's samples, spread evenly and in random order.

        Their mean is ``(1 - fraction) seq_len`` up to rounding; each sample has a token.
        """
        least = max(0.0, 2 * self.fraction - 1)
        spread = 2 * min(self.fraction, 1 - self.fraction)
        shares = [least + spread * (index + 0.5) / batch_size for index in range(batch_size)]
        random.Random(seed).shuffle(shares)  # noqa: S311 (no secret)
        return [max(1, seq_len - round(share * seq_len)) for share in shares]


def _read_fraction(value: Any) -> Any:
    """Return a mapping for a bare number, the fraction, and for ``packed``."""
    if value == "packed":
        return {"packed": True}
    if isinstance(value, str) and "=" in value:
        return _read_pairs(value)
    return {"fraction": value} if isinstance(value, int | float | str) else value


def _check_pattern(value: str) -> str:
    try:
        re.compile(value)  # so do the parts' names
    except re.error as error:
        raise ValueError(
            f"it must be one of {', '.join(PARTS)}, or a regular expression, and {error}"
        ) from None
    return value


AsLora = Annotated[Lora, BeforeValidator(_read_pairs, json_schema_input_type=Lora | str)]
AsPadding = Annotated[
    Padding, BeforeValidator(_read_fraction, json_schema_input_type=Padding | float | str)
]
Trainable = Annotated[str, Field(min_length=1), AfterValidator(_check_pattern)]
