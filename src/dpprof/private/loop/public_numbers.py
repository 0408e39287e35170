"""The numbers of a private training that everybody may know, and the guarantee that they belong to.

Who sees a step sees what its sum was divided by, and how many steps there were. So these numbers
must not follow from the samples: one sample less would change them, and the noise with them.
"""

import math
import sys
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from dpprof.private.accounting.schedule import Sampling
from dpprof.private.errors import refuse_no_number
from dpprof.private.noise.strategies import Strategy
from dpprof.private.samples.users import Users

_LEAST_RATE = 2.0**-53  # samples are drawn by multiples of it

_MOST = sys.float_info.max

_OPACUS = "opacus.utils.uniform_sampler.UniformWithReplacementSampler"


class PublicNumbers(NamedTuple):
    """How a training samples and averages."""

    sample_rate: float
    """The probability with which a step draws each sample, or user, as of all that follows."""

    expected_batch_size: float  # what the sum of a step is divided by, over all ranks
    steps_of_epoch: int

    samples: int  # in the data, as the public knows it
    follows_from_data: bool  # whether that was counted in the data
    folds: int = 1  # step t draws from samples t, t + folds, ... of the data alone
    truncated_batch_size: int | None = None
    """The most samples of a step, over all ranks; None for any number."""

    ranks: int = 1

    samples_of_user: int | None = None
    """The most samples of a user, whom a step draws as a whole; None: it draws samples."""

    @property
    def unit(self) -> str:
        """Of which a step draws each with the same probability, and one is added or removed."""
        return "sample" if self.samples_of_user is None else "user"

    @property
    def largest_of_rank(self) -> int | None:
        """The most samples of a step on one rank; None for any number."""
        return self.truncated_batch_size and self.truncated_batch_size // self.ranks

    @property
    def sampling(self) -> Sampling:
        """What epsilon depends on."""
        if self.truncated_batch_size is None:
            return Sampling(self.sample_rate, self.folds, unit=self.unit)
        drawn_from = math.ceil(math.ceil(self.samples / self.folds) / self.ranks)
        return Sampling(
            *(self.sample_rate, self.folds, self.largest_of_rank, drawn_from), self.unit
        )

    def plan_steps(self, epochs: int | None, steps: int | None) -> int:
        """Return how many steps a training has (``ValueError`` if that is not one number)."""
        for name, value in (("epochs", epochs), ("steps", steps)):
            refuse_no_number(name, 0 if value is None else value)
        if steps is not None and steps != int(steps):
            raise ValueError(f"steps must be a whole number, and is {steps}")
        if (epochs is None) == (steps is None):
            raise ValueError(
                "epsilon and correlated noise need a length: give either epochs or steps"
            )
        planned = steps if epochs is None else epochs * self.steps_of_epoch
        assert planned is not None
        if planned < 1:
            raise ValueError(f"a training has at least one step, and {planned} are planned")
        return int(planned)

    def describe(self, optimizer: Any) -> str:
        """State the guarantee of the steps that a ``NoisyOptimizer`` takes with these numbers."""
        bound, noise = optimizer.max_grad_norm, optimizer.noise_multiplier
        unit, each_of = self.unit, self.samples_of_user
        fold = f" of its fold, which is every {self.folds}th {unit} of the data," * (self.folds > 1)
        each = " on each rank" * (self.ranks > 1)
        most = self.largest_of_rank
        cut = f" Of more than {most:,}{each} so many are kept, at random." if most else ""
        cut += f" Of each at most {each_of:,} samples take part, at random." if each_of else ""
        public = (
            f"The number of {unit}s, {self.samples:,}, is public, for the probability and the "
            f"number of steps follow from it: a {unit} is removed by one in its place that "
            "adds to no sum and no count. Give samples=... to keep it private."
            if self.follows_from_data
            else "Probability, divisor and number of steps were given: this holds if none was "
            "computed from the data, as numbers_of_opacus computes them."
        )
        return (
            f"A step draws each {unit}{fold} with probability {self.sample_rate:.6g}, whatever "
            f"else it draws.{cut} A {unit} adds at most {bound:g} (L2) to the sum of a step, which "
            f"gets {_describe_noise(optimizer.strategy, noise * bound, unit)} and is divided by "
            f"{self.expected_batch_size:g}. Neighbouring data differ by one {unit} that is added "
            f"or removed{', with all samples' if each_of else ''}. {public}"
            + ("" if optimizer.quantile is None else f" {optimizer.quantile.describe()}")
        )


def _describe_noise(strategy: Strategy | None, std: float, unit: str) -> str:
    if strategy is None:
        return f"Gaussian noise of standard deviation {std:g}"
    mechanism = (
        f"each step in which a {unit} takes part is one Gaussian mechanism"
        if strategy.is_sampled
        else "all steps together are one Gaussian mechanism, without sampling,"
    )
    return (
        f"correlated Gaussian noise ({strategy.describe()}: {mechanism} of standard deviation "
        f"{std:g}, if no {unit} takes part twice in {strategy.folds} steps)"
    )


def find_public_numbers(
    data_loader: DataLoader[Any],
    *,
    samples: int | None = None,
    sample_rate: float | None = None,
    expected_batch_size: float | None = None,
    folds: int = 1,
    truncated_batch_size: int | None = None,
    ranks: int = 1,
    users: Users | None = None,
) -> PublicNumbers:
    """Find how a training samples and averages, from what is public (as of ``make_private``).

    ``ValueError``: the loader's batches are not those of a uniform sampler, or a number is out
    of its range; ``TypeError``: its dataset has no length.
    """
    sampler = _verify_sampler(data_loader, draws_users=users is not None)
    _refuse_outside(samples, sample_rate, expected_batch_size, folds, truncated_batch_size)
    if samples is not None and sample_rate is not None:
        raise ValueError("give samples or sample_rate: one follows from the other")
    size = None if expected_batch_size is None else float(expected_batch_size)
    follows = samples is None and sample_rate is None
    if sampler is None and size is None and not follows:
        raise ValueError(
            "Opacus's data loader has no batch size of its own, so samples and sample_rate need "
            "expected_batch_size"
        )
    counted = len(cast("Any", data_loader.dataset) if users is None else users)
    public = counted if samples is None else int(samples)
    if not public:
        raise ValueError("the dataset has no samples")
    if sampler is not None:
        size = size or sampler.batch_size
    elif follows:  # Opacus's loader knows its rate alone
        drawn = numbers_of_opacus(data_loader)
        size, sample_rate = size or drawn["expected_batch_size"], drawn["sample_rate"]
    assert size is not None
    rate = min(1.0, size / public) if sample_rate is None else float(sample_rate)
    if rate < _LEAST_RATE:
        raise ValueError(f"a step would draw each sample with probability {rate:g}, so none at all")
    steps = math.ceil(public / size if sample_rate is None else (1 - 1e-9) / rate)
    if sample_rate is not None and not follows:
        public = max(1, round(size / rate))
    most = None if truncated_batch_size is None else int(truncated_batch_size)
    numbers = PublicNumbers(
        *(rate, size, steps, public, follows, int(folds), most, ranks),
        None if users is None else users.most,
    )
    return _draw_otherwise(numbers) if folds > 1 or truncated_batch_size else numbers


def _refuse_outside(
    samples: Any, sample_rate: Any, size: Any, folds: Any, truncated_batch_size: Any
) -> None:
    """Refuse a number that is out of its range (``ValueError``)."""
    whole = "a whole number, at least 1"
    for name, value, kind, most, allowed in (
        ("samples", samples, Integral, math.inf, whole),
        ("sample_rate", sample_rate, Real, 1.0, "above 0 and at most 1"),
        ("expected_batch_size", size, Real, _MOST, "positive and finite"),
        ("folds", folds, Integral, math.inf, whole),
        ("truncated_batch_size", truncated_batch_size, Integral, math.inf, whole),
    ):
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value <= most):
            raise ValueError(f"{name} must be {allowed}, and is {value!r}")


def _draw_otherwise(numbers: PublicNumbers) -> PublicNumbers:
    """Return the numbers with the probability within a fold, if their number is public."""
    folds, ranks = numbers.folds, numbers.ranks
    if not numbers.follows_from_data:
        raise ValueError(
            "with folds or truncated_batch_size epsilon follows from the number of samples, which "
            "is public then; leave out samples and sample_rate"
        )
    if numbers.samples < folds * ranks:
        count = f"{numbers.samples:,} {numbers.unit}s"
        raise ValueError(f"{count} are too few for folds={folds} on {ranks=}")
    rate = folds * numbers.sample_rate
    if folds > 1 and rate > 1:
        raise ValueError(
            f"a fold has {numbers.samples / folds:,.6g} {numbers.unit}s, fewer than the mean batch "
            f"size, {numbers.expected_batch_size:g}; give fewer folds than {folds}"
        )
    if (numbers.truncated_batch_size or 0) % ranks:
        raise ValueError(
            f"truncated_batch_size is over all ranks, so it must be a multiple of {ranks}, and is "
            f"{numbers.truncated_batch_size}"
        )
    return numbers._replace(sample_rate=rate)


def numbers_of_opacus(data_loader: DataLoader[Any]) -> Mapping[str, Any]:
    """Return the numbers that Opacus's ``make_private`` takes, to compare results with it.

    They follow from the number of samples: one less may change divisor and noise by a half.

    Returns:
        ``sample_rate`` and ``expected_batch_size``, for ``make_private``.
    """
    sampler: Any = data_loader.batch_sampler
    steps = len(data_loader) if _is_batches(sampler) else round(1 / float(sampler.sample_rate))
    samples = len(cast("Any", data_loader.dataset))
    return {"sample_rate": 1 / steps, "expected_batch_size": int(samples / steps)}


def _is_batches(sampler: Any) -> bool:
    return type(sampler) is BatchSampler


def _verify_sampler(data_loader: DataLoader[Any], *, draws_users: bool) -> BatchSampler | None:
    """Return a loader's sampler of batches, if it is uniform; None for Opacus's."""
    if isinstance(data_loader.dataset, IterableDataset):
        raise TypeError(
            "Poisson sampling draws samples by their number, and an IterableDataset has none"
        )
    if data_loader.drop_last:
        raise ValueError("drop_last=True leaves samples out of an epoch; use drop_last=False")
    sampler: Any = data_loader.batch_sampler
    if sampler is None:
        raise ValueError("a DataLoader with batch_size=None makes no batches; give a batch size")
    if f"{type(sampler).__module__}.{type(sampler).__qualname__}" == _OPACUS:
        if draws_users:
            raise ValueError(
                "Opacus's data loader draws samples by a rate of its own; for unit='user' give a "
                "DataLoader of PyTorch, whose batch_size is then the mean number of users"
            )
        return None
    if not _is_batches(sampler) or type(sampler.sampler) not in (RandomSampler, SequentialSampler):
        inner = getattr(sampler, "sampler", sampler)
        raise ValueError(
            f"a {type(inner).__name__} chooses samples in its own way, and privacy by sampling "
            "holds for Poisson batches alone; give a DataLoader with shuffle=True"
        )
    if isinstance(sampler.sampler, RandomSampler) and sampler.sampler.replacement:
        raise ValueError("a sampler with replacement is not Poisson sampling; use shuffle=True")
    drawn_from: int = len(cast("Any", sampler.sampler))
    there: int = len(cast("Any", data_loader.dataset))
    if drawn_from != there:
        raise ValueError(
            f"the sampler knows {drawn_from:,} samples, and the dataset has {there:,}; give a "
            "Subset of the dataset with shuffle=True"
        )
    return cast("BatchSampler", sampler)
