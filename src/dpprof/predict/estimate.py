"""Instrument ``estimate``, and traces of an experiment with any batch.

Where the blocks of a model are equal, few of them are traced, and the whole follows
(``memory.pattern``). Otherwise the whole is traced. A result says which it was.
"""

import functools
from bisect import bisect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.varying import list_variations
from dpprof.experiments.records.result import Measurement, ModelFacts, NormChoice
from dpprof.predict.memory.allocator_replay import Footprint
from dpprof.predict.memory.pattern import Pattern, Sizes, interpolate
from dpprof.predict.tracing import Facts, Traced, state_estimate, trace_whole
from dpprof.predict.varying import vary
from dpprof.subjects.methods.training_step import Enter
from dpprof.subjects.models.blocks import Blocks, NotAlikeError, find_blocks, join, with_blocks
from dpprof.subjects.setup import import_method

_NEEDED = 3  # how many records are traced, each with one block more than the last
_MOST_LEAST = 3  # the most blocks that the smallest record may have
_LINE = 3  # how many batches must lie on a line before sizes count as affine in the batch

_SPARE = 20
"""A batch that should be too large exceeds a guess by one part in so many of the way there."""

_WITHIN = 3
"""A batch that should fit, whatever fragments memory, is smaller than a guess by one part in so
many."""


def estimate(experiment: Experiment, enter: Enter) -> Measurement:
    """Instrument ``estimate``: predict an experiment without the memory and time that it needs.

    Raises:
        UnsupportedError: The device is a GPU without a known target.
    """

    @functools.cache
    def predict(batch_size: int, seq_len: int) -> tuple[Footprint, Measurement]:
        asked = experiment.model_copy(update={"batch_size": batch_size, "seq_len": seq_len})
        traced = trace_steps(asked, enter)
        return Footprint.of(traced.recording), state_estimate(traced, asked)

    _, measurement = predict(experiment.batch_size, experiment.seq_len)
    if not list_variations(experiment):
        return measurement
    least = import_method(experiment).smallest_batch_size(experiment)
    varied, reasons = vary(experiment, least, predict)
    return measurement.model_copy(
        update={"varied": varied, "reasons": measurement.reasons | reasons}
    )


def trace_steps(experiment: Experiment, enter: Enter) -> Traced:
    """Trace a training, from few blocks where the whole follows from them.

    Raises:
        UnsupportedError: The device is a GPU without a known target.
    """
    return Traces(experiment, enter).trace(experiment.batch_size)


class Traces:
    """Traces of one experiment with any batch size.

    With ``describing`` calls of operators are described, as the times of a processor need.
    """

    def __init__(self, experiment: Experiment, enter: Enter, *, describing: bool = True) -> None:
        self.experiment = experiment
        self._enter = enter
        self._describing = describing
        self._traced: dict[tuple[int, int], Traced] = {}
        self._families: list[_Family] = []
        self._footprints: dict[int, Footprint] = {}
        self._why_whole = ""
        self._interpolating = True

        try:
            self._blocks = find_blocks(experiment)
        except NotAlikeError as error:
            self._why_whole = str(error)

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients of those trained and the optimizer's moments; 0 where unknown."""
        if self._why_whole:
            return 0
        experiment, blocks = self.experiment, self._blocks
        copies = 4 if experiment.optimizer in ("adamw", "adamw-fused") else 2
        return (copies * blocks.trained_bytes + blocks.frozen_bytes) // experiment.shards

    def trace(self, batch_size: int) -> Traced:
        """Return the trace of the whole model with a batch."""
        try:
            family = self._measure(batch_size)
            recording = family.pattern.assemble(self._blocks.count, family.sizes[batch_size])
            facts = self._extend_facts(batch_size, family)
        except NotAlikeError as error:
            return self._trace_whole(batch_size, str(error))
        like = self._trace(batch_size, family.blocks.count)
        return like._replace(
            recording=recording,
            facts=facts,
            from_blocks=f"the {self._blocks.count} blocks follow from traces of "
            f"{family.blocks.count} to {family.blocks.count + _NEEDED - 1}",
        )

    def facts(self, batch_size: int) -> Facts:
        """Return the facts of the whole model with a batch."""
        try:
            return self._extend_facts(batch_size, self._measure(batch_size))
        except NotAlikeError as error:
            return self._trace_whole(batch_size, str(error)).facts

    def footprint(self, batch_size: int) -> Footprint:
        """Return what the training allocates with a batch.

        It may follow from two other batches, also a little below them; then ``confirms`` must be
        asked about a batch.
        """
        if batch_size not in self._footprints:
            self._footprints[batch_size] = self._find_footprint(batch_size)
        return self._footprints[batch_size]

    def confirms(self, batch_size: int) -> bool:
        """Trace a batch; return whether it and the other batches confirm what was interpolated.

        The sizes of three batches must lie on a line. The sizes of one of them may be guessed.
        Where there are only two, a batch between them is traced; and the least that was followed,
        where it lies below them.
        """
        told = self.footprint(batch_size)
        followed = [family for family in self._families if family.followed]
        try:
            measured = self._measure(batch_size).footprint(batch_size)
            for family in followed:
                if (least := min(family.followed)) < min(family.sizes):
                    self._measure(least)
                if len(family.sizes) < _LINE:
                    self._measure(sum(family.sizes) // 2)
        except NotAlikeError:
            return not followed
        return told == measured and all(
            len(family.sizes) >= _LINE
            and family.is_line()
            and min(family.sizes) <= min(family.followed)
            for family in followed
        )

    def stop_interpolating(self) -> None:
        """Interpolate no footprint any more, and forget those that were."""
        self._interpolating = False
        self._footprints.clear()

    def rule_out(self, batch_size: int, further: int, budget: int) -> bool:
        """Return whether a batch needs far too much, by few blocks with a larger batch.

        Nothing is traced where not even parameters and moments fit.
        """
        if self.state_bytes > budget:
            return True
        if self._why_whole or self._blocks.count <= 1 + _NEEDED:
            return False
        first, second = (
            Footprint.of(self._trace(further, count).recording).peak_bytes for count in (1, 2)
        )
        whole = first + (self._blocks.count - 1) * (second - first)
        of_samples = whole - self.state_bytes
        return self.state_bytes + of_samples * batch_size // further > budget

    def frame(self, batch_size: int, budget: int) -> int:
        """Trace a batch, and return one that may need about the budget.

        The sizes of one that is a little too large are guessed. Where it has other atoms, it is
        traced, and the sizes of one that is well within the budget are guessed.
        """

        def guess_sizes(size: int, traced: int) -> None:
            more = self._trace(size, family.blocks.count + 1)
            family.sizes[size] = family.pattern.guess(more.recording, size / traced)
            family.guessed.add(size)

        try:
            family = self._measure(batch_size)
        except NotAlikeError:
            return batch_size
        guess = family.guess_batch(batch_size, budget)
        if guess <= batch_size or not self._interpolating:
            return guess
        too_large = guess + (guess - batch_size) // _SPARE + 2
        try:
            guess_sizes(too_large, batch_size)
        except NotAlikeError:
            with suppress(NotAlikeError):
                family = self._measure(too_large)
                guess = max(family.guess_batch(too_large, budget), batch_size)
                guess_sizes(guess - guess // _WITHIN, too_large)
        return guess

    def _find_footprint(self, batch_size: int) -> Footprint:
        if self._interpolating:
            for family in self._families:
                if family.reaches(batch_size):
                    if not family.has_measured(batch_size):
                        family.followed.add(batch_size)
                    return family.footprint(batch_size)
        try:
            return self._measure(batch_size).footprint(batch_size)
        except NotAlikeError as error:
            return Footprint.of(self._trace_whole(batch_size, str(error)).recording)

    def _extend_facts(self, batch_size: int, family: "_Family") -> Facts:
        few = [
            self._trace(batch_size, family.blocks.count + further).facts
            for further in range(2 if batch_size in family.others else _NEEDED)
        ]
        return extend_facts(few, family.blocks, self._blocks.count)

    def _trace_whole(self, batch_size: int, why: str) -> Traced:
        experiment = self.experiment.model_copy(update={"batch_size": batch_size})
        return trace_whole(
            experiment, self._enter, f"all were traced: {why}", describing=self._describing
        )

    def _trace(self, batch_size: int, blocks: int) -> Traced:
        key = batch_size, blocks
        if key not in self._traced:
            experiment = self.experiment.model_copy(update={"batch_size": batch_size})
            few = with_blocks(experiment, blocks)
            self._traced[key] = trace_whole(few, self._enter, describing=self._describing)
        return self._traced[key]

    def _measure(self, batch_size: int) -> "_Family":
        """Trace few blocks with a batch; return the family that its records belong to.

        Raises:
            NotAlikeError: The whole does not follow from few blocks.
        """
        if self._why_whole:
            raise NotAlikeError(self._why_whole)
        for family in self._families:
            if family.has_measured(batch_size):
                return family
        for family in self._families:
            least = family.blocks.count
            few, more = (self._trace(batch_size, least + further) for further in range(2))
            try:
                family.sizes[batch_size] = family.pattern.measure(few.recording, more.recording)
            except NotAlikeError:
                continue
            family.others.add(batch_size)
            family.guessed.discard(batch_size)
            return family
        self._families.append(self._learn(batch_size))
        return self._families[-1]

    def _learn(self, batch_size: int) -> "_Family":
        problem = NotAlikeError(f"there are {self._blocks.count} blocks")
        enough = self._families[-1].blocks.count if self._families else 1
        for least in range(enough, _MOST_LEAST + 1):
            if self._blocks.count <= least + _NEEDED:
                break
            few = replace(self._blocks, count=least)
            recordings = [
                self._trace(batch_size, least + further).recording for further in range(_NEEDED)
            ]
            try:
                pattern = Pattern(recordings, few)
            except NotAlikeError as error:
                problem = error
            else:
                return _Family(pattern, few, self._blocks.count, batch_size)
        self._why_whole = str(problem)
        raise problem


class _Family:
    """Batches whose records have the same atoms."""

    def __init__(self, pattern: Pattern, blocks: Blocks, count: int, batch_size: int) -> None:
        self.pattern = pattern
        self.blocks = blocks
        """The container, and the fewest blocks that were traced."""

        self.sizes: dict[int, Sizes] = {batch_size: pattern.sizes}
        self.others: set[int] = set()
        """Batches of which two records were enough."""

        self.guessed: set[int] = set()
        """Batches whose sizes were guessed from one record."""

        self.followed: set[int] = set()
        """Batches whose footprints rest on sizes that were not measured."""

        self._count = count

    def has_measured(self, batch_size: int) -> bool:
        """Return whether the sizes of a batch are known, and not guessed."""
        return batch_size in self.sizes and batch_size not in self.guessed

    def footprint(self, batch_size: int) -> Footprint:
        """Return the footprint of a batch that was traced, or that follows from two others."""
        sizes = self.sizes.get(batch_size)
        if sizes is None:
            batches = sorted(self.sizes)
            above = max(bisect(batches, batch_size), 1)
            sizes = self._interpolate(batches[above - 1], batch_size, batches[above])
        return self.pattern.footprint(self._count, sizes)

    def reaches(self, batch_size: int) -> bool:
        """Return whether a batch was traced, or lies between batches that are on a line.

        It may also lie below the first of them, as far as the second is above: ``confirms`` then
        traces the least such batch.
        """
        first, *others = sorted(self.sizes)
        is_near = bool(others) and 2 * first - others[0] <= batch_size < others[-1]
        return batch_size in self.sizes or (is_near and self.is_line())

    def is_line(self) -> bool:
        """Return whether every batch is on the line between its neighbours."""
        batches = sorted(self.sizes)
        find = functools.partial(self.pattern.footprint_sizes, self._count)
        return all(
            np.array_equal(find(self._interpolate(low, middle, high)), find(self.sizes[middle]))
            for low, middle, high in zip(batches, batches[1:], batches[2:], strict=False)
        )

    def _interpolate(self, low: int, middle: int, high: int) -> Sizes:
        return interpolate(low, high, middle, self.sizes[low], self.sizes[high])

    def guess_batch(self, batch_size: int, budget: int) -> int:
        """Guess which batch needs so many bytes, from one that was traced.

        Sizes that are multiples of the batch are taken to grow with it.
        """
        sizes = self.sizes[batch_size]
        doubled = Sizes(*(np.where(size % batch_size, size, 2 * size) for size in sizes))
        low, high = (
            self.pattern.footprint(self._count, each).peak_bytes for each in (sizes, doubled)
        )
        return batch_size + (batch_size * (budget - low) // (high - low) if high > low else 0)


def extend_facts(few: Sequence[Facts], blocks: Blocks, count: int) -> Facts:
    """Return the facts of a model with more blocks from those of ``blocks.count`` and the next.

    Raises:
        NotAlikeError: They do not grow with the blocks.
    """
    first = few[0]
    if any(facts.samplers != first.samplers for facts in few):
        raise NotAlikeError("layers take other paths with one more block")

    def extend(of_few: Sequence[int | None]) -> int | None:
        numbers = [number for number in of_few if number is not None]
        if len(numbers) < len(few):
            return None
        growth = {after - before for before, after in pairwise(numbers)}
        if len(growth) != 1:
            raise NotAlikeError("the model's size is not affine in the number of blocks")
        return numbers[0] + (count - blocks.count) * growth.pop()

    model = {
        name: extend([getattr(facts.model, name) for facts in few])
        for name in ModelFacts.model_fields
    }
    return first._replace(
        model=ModelFacts.model_validate(model),
        model_flops=extend([facts.model_flops for facts in few]),
        norm_plan=_extend_plan([facts.norm_plan for facts in few], blocks, count),
    )


def _extend_plan(
    few: Sequence[dict[str, NormChoice] | None], blocks: Blocks, count: int
) -> dict[str, NormChoice] | None:
    """Return the ways of all layers, in the order of the traces."""
    first, *others = few
    if first is None:
        return None

    def repeat(until: int) -> dict[str, NormChoice]:
        assert first is not None
        split = {name: blocks.split(name) for name in first}
        inside = [name for name, (_, block) in split.items() if block == 0]
        order = range(until)
        numbers = [block for _, block in split.values() if block is not None]
        if numbers and numbers[0] > numbers[-1]:
            order = order[::-1]
        names = list(first)
        numbered = [index for index, name in enumerate(names) if split[name][1] is not None]
        start, end = (numbered[0], numbered[-1] + 1) if numbered else (0, 0)
        plan = {name: first[name] for name in names[:start]}
        for block in order:
            plan |= {str(join(split[name][0], block)): first[name] for name in inside}
        return plan | {name: first[name] for name in names[end:]}

    for further, other in enumerate(others, start=1):
        if other != repeat(blocks.count + further):
            raise NotAlikeError("the ways to norms differ with one more block")
    return repeat(count)
