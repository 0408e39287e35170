"""Traces of one experiment with any batch, of few blocks where the whole follows from them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, count, pairwise
from typing import NamedTuple

import numpy as np

from dpprof.instruments.memory import Facts, Traced, trace_whole
from dpprof.memory.allocator_replay import MOST_STEPS, Placement, place
from dpprof.memory.atoms import Recording
from dpprof.memory.caching_allocator import DEFAULT, Settings
from dpprof.memory.events import Allocated, Freed
from dpprof.memory.pattern import Assembled, Integers, Pattern, Sizes, interpolate
from dpprof.methods.training_step import Enter
from dpprof.models.blocks import Blocks, NotAlikeError, find_blocks, join, with_blocks
from dpprof.records.result import ModelFacts, NormChoice
from dpprof.spec.experiment import Experiment

_NEEDED = 3
"""So many records are needed, each of one block more."""

_MOST_LEAST = 3
"""The smallest record has at most so many blocks."""


def trace_steps(experiment: Experiment, enter: Enter) -> Traced:
    """Trace a training, from few blocks where the whole follows from them.

    Args:
        experiment: What to trace.
        enter: Called as each phase begins.

    Raises:
        UnsupportedError: The device is a GPU without a known target.
    """
    return Traces(experiment, enter).trace(experiment.batch_size)


class Traces:
    """Traces of one experiment with any batch size.

    Args:
        experiment: Its batch size does not matter.
        enter: Called as each phase begins.
    """

    def __init__(self, experiment: Experiment, enter: Enter) -> None:
        self._experiment = experiment
        self._enter = enter
        self._traced: dict[tuple[int, int], Traced] = {}
        self._learned: dict[int, tuple[Pattern, Blocks, Sizes]] = {}
        self._why_whole: str | None = None

    def trace(self, batch_size: int) -> Traced:
        """Return the trace of the whole model with a batch."""
        try:
            pattern, blocks, sizes = self._learn(batch_size)
            whole = find_blocks(self._experiment)
            assembled = pattern.assemble(whole.count, sizes)
            few = [self._trace(batch_size, blocks.count + further) for further in range(_NEEDED)]
            facts = extend_facts([one.facts for one in few], blocks, whole.count)
        except NotAlikeError as error:
            return self._trace_whole(batch_size, str(error))
        return few[0]._replace(
            recording=assembled.recording,
            facts=facts,
            from_blocks=f"the {whole.count} blocks follow from traces of "
            f"{blocks.count} to {blocks.count + _NEEDED - 1}",
        )

    def _trace_whole(self, batch_size: int, why: str) -> Traced:
        experiment = self._experiment.model_copy(update={"batch_size": batch_size})
        return trace_whole(experiment, self._enter, f"all were traced: {why}")

    def _trace(self, batch_size: int, blocks: int) -> Traced:
        key = batch_size, blocks
        if key not in self._traced:
            experiment = self._experiment.model_copy(update={"batch_size": batch_size})
            self._traced[key] = trace_whole(with_blocks(experiment, blocks), self._enter)
        return self._traced[key]

    def _learn(self, batch_size: int) -> tuple[Pattern, Blocks, Sizes]:
        if batch_size not in self._learned:
            self._learned[batch_size] = self._learn_anew(batch_size)
        return self._learned[batch_size]

    def _learn_anew(self, batch_size: int) -> tuple[Pattern, Blocks, Sizes]:
        blocks = find_blocks(self._experiment)
        problem = NotAlikeError("there are few blocks")
        for least in range(1, _MOST_LEAST + 1):
            if blocks.count <= least + _NEEDED:
                break
            few = Blocks(blocks.container, least)
            recordings = [
                self._trace(batch_size, least + further).recording for further in range(_NEEDED)
            ]
            try:
                pattern = Pattern(recordings, few)
            except NotAlikeError as error:
                problem = error
            else:
                return pattern, few, pattern.sizes
        raise problem


def extend_facts(few: Sequence[Facts], blocks: Blocks, count: int) -> Facts:
    """Return the facts of a model with more blocks from those of ``blocks.count`` and more.

    Raises:
        NotAlikeError: They do not grow with the blocks.
    """
    first, second, third = few
    if not (first.samplers == second.samplers == third.samplers):
        raise NotAlikeError("layers take other paths with one more block")

    def extend(of_few: Sequence[int | None]) -> int | None:
        x, y, z = of_few
        if x is None or y is None or z is None:
            return None
        if z - y != y - x:
            raise NotAlikeError("the model's size is not affine in the number of blocks")
        return x + (count - blocks.count) * (y - x)

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
        numbered = [at for at, name in enumerate(names) if split[name][1] is not None]
        start, end = (numbered[0], numbered[-1] + 1) if numbered else (0, 0)
        plan = {name: first[name] for name in names[:start]}
        for block in order:
            plan |= {str(join(split[name][0], block)): first[name] for name in inside}
        return plan | {name: first[name] for name in names[end:]}

    for further, other in enumerate(others, start=1):
        if other != repeat(blocks.count + further):
            raise NotAlikeError("the ways to norms differ with one more block")
    return repeat(count)
