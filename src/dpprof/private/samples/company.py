"""Compares samples alone and in company: a sample's loss may depend on that sample alone.

Some samples are collated together, each alone, in another order and in parts, and their losses must
agree. Then no loss depends on the longest sample beside it, on padding, on how many others there
are, or on what ``collate_fn`` mixes. It compares values, so it also finds what reaches a loss
without a gradient.

Where ``collate_fn`` or the loss draws numbers, a sample alone gets other numbers. Then samples are
collated anew, some replaced by others or the longest left out, with the same numbers: the others'
losses must stay. Operators of PyTorch get those of the same places (``Tape``), and NumPy
and Python start from the same states; where they draw more or fewer numbers for the other samples,
only the first sample is known to get its own. For the other comparisons rows are cut from one
collated batch, and each to its own length by the mask of the batch; a model that draws in training
is put into evaluation for them.

All is compared twice: with the model as it is, and with the outputs of its layers amplified to a
size of one, so that a model that begins its training shows what positions and attention do. And
others are made loud, which shows one scale for all of a batch.

Losses agree if they differ by less than rounding explains. That is measured: the outputs of layers
get random errors of two units in their last place, and losses may differ by ``_ROUNDING`` times the
largest change that this makes.

It proves that with these samples and these batches losses keep to their samples. It does not see
other samples, larger batches, rare events, or effects below rounding, which is larger in 16 bits.

Shape legend: B samples, T tokens.
"""

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from dpprof.private.refusals.released_state import is_same
from dpprof.private.samples import batches
from dpprof.private.samples.changed_layers import amplified, louder, rounding_otherwise
from dpprof.private.samples.random_state import States, random_state_kept
from dpprof.private.samples.runs import Run, agree, leaves_of, shapes_of

if TYPE_CHECKING:
    from dpprof.private.engine.engine import Clipping

COMPANY = "each sample's loss is the same beside others"  # the name of this check
COMPARED = 4  # samples that are compared, the shortest and the longest of ``LOOKED_AT`` among them

LOOKED_AT = 64

_ROUNDS = 3  # how often samples are replaced where numbers are drawn, each amplified too

_OF_FEW = 12  # over their number: of two samples every other permutation leaves each in its place

_ROUNDING = 2.0
_FLOOR = 16  # units in the last place of a loss that always count as rounding
_HIDDEN = 0.1  # the share of a loss from which on rounding hides too much

_COARSE = "rounding changes each loss by more than a tenth, and hides what others change"

_LENGTH = (
    "a sample's loss follows the length to which a batch pads it: look at positions (RoPE that "
    "follows the longest sample, padding on the left without position_ids), at pooling or "
    "normalising over padding, at what collate_fn puts in place of padding, and for a mask that "
    "the model does not get"
)
_COLLATED = (
    "collate_fn gives a sample other values beside other samples: look for mixup, cutmix, packing, "
    "refilling and statistics of the batch; augment each sample by itself, in the dataset"
)
_MIXED = (
    "a sample's loss depends on the samples beside it: look in the model and the loss for batch "
    "statistics, one scale for all, contrast, counts or means over the batch, and numbers that "
    "follow its size"
)
_DRAWN = (
    "numbers are drawn with NumPy or Python, or one by one, and how many follows other samples: "
    "draw all numbers of a sample one after another, or with PyTorch for the whole batch"
)
_NOT_COMPARED = (
    "numbers are drawn, and no sample can be compared beside others: collate_fn, the model or the "
    "loss needs these samples or lengths, or draws one by one; check=False leaves this out"
)
LOSES_AXIS = "loses the axis of a batch of one, as squeeze() without an axis does"
_REORDERED = (
    "collate_fn or the loss puts samples in another order, by which those of a user are told: keep "
    "the order in which collate_fn gets them"
)


class WrongTrainingError(RuntimeError):
    """A training loop is wrong; the message names the first thing that is, and nothing of samples.

    Args:
        message: What is wrong.
        details: What else is known: losses, norms, places in the batch, or what the user's code
            raised. It is private, so it is an attribute, and no part of the message.
    """

    def __init__(self, message: str, details: str | None = None) -> None:
        super().__init__(message)
        self.details = details


def find_dropout(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """List the modules that drop, their attribute with the rate, and the rate."""
    kind = nn.modules.dropout._DropoutNd  # noqa: SLF001 (the common base)
    return [
        (module, name, rate)
        for module in model.modules()
        for kinds, name in ((kind, "p"), ((nn.MultiheadAttention, nn.RNNBase), "dropout"))
        if isinstance(module, kinds) and (rate := getattr(module, name))
    ]


def is_mask(part: Any) -> bool:
    """Tell whether a tensor is a mask, (B, T), of 0 and 1, with zeros at one end of each sample."""
    if not isinstance(part, Tensor) or part.dim() != 2:  # noqa: PLR2004 (B, T)
        return False
    if not bool(((part == 0) | (part == 1)).all()):
        return False
    changes = (part[:, 1:] != part[:, :-1]).sum(1)
    ends = (part[:, 0] == 1) | (part[:, -1] == 1) if part.shape[1] else part.sum(1) == 0
    return bool((changes <= 1).all() and ends.all())


def choose(dataset: Any, most: int = COMPARED, *, at_random: bool = False) -> list[Any]:
    """Load ``COMPARED`` samples of different lengths, the longest first, or ``most``."""
    count = len(cast("Sized", dataset))
    places: Sequence[int] = range(min(LOOKED_AT, count))
    if at_random:
        places = random.SystemRandom().sample(range(count), min(4 * COMPARED, count))
    items = sorted((dataset[place] for place in places), key=_size_of, reverse=True)
    few = min(COMPARED, max(2, most), len(items))
    return [items[place * (len(items) - 1) // max(1, few - 1)] for place in range(few)]


def _size_of(item: Any) -> int:
    """Count the numbers or letters of a sample."""
    if isinstance(item, Tensor):
        return item.numel()
    if isinstance(item, str | bytes):
        return len(item)
    if hasattr(item, "size") and isinstance(item.size, int):  # of an array
        return item.size
    parts = item.values() if isinstance(item, Mapping) else item
    is_nested = isinstance(item, Mapping | list | tuple)
    return sum(map(_size_of, parts)) if is_nested else 1


@dataclass
class Company:
    """Some samples, and the functions that compute their losses in any company.

    Args:
        model: Afterwards its buffers, attributes and modes are as before; nothing drops meanwhile.
        losses_of: Computes from a batch one loss for each sample, (B,), without clipping.
        gather: Makes a batch of some of the samples, by their places; the first is the longest.
        count: How many there are.
        collates: Whether ``gather`` collates them anew, and does not cut rows from one batch.
    """

    model: nn.Module
    losses_of: Callable[[Any], Any]
    gather: Callable[[Sequence[int]], Any]
    count: int
    collates: bool = True
    keeps_order: bool = False  # as those of users must; ``collate_fn`` may change it
    unchecked: list[str] = field(default_factory=list)  # what could not be compared, and why
    _is_hidden: bool = False  # whether numbers are drawn that cannot be repeated by their places

    def compare(self, states: States) -> list[str]:
        """Compare all samples together with each alone, and in other batches.

        Returns what could not be compared, and why. ``states`` are those of all generators;
        ``random_state_kept`` restores those it knows. ``WrongTrainingError``: a loss
        depends on other samples; no message has a sample's numbers.
        """
        if self.count < 2:  # noqa: PLR2004 (one has no company)
            return []
        # What is compiled would be compiled again, for layers with hooks.
        with _unchanged(self.model), torch.compiler.set_stance("force_eager"):
            for module, name, _ in find_dropout(self.model):
                setattr(module, name, 0.0)
            self.states = states
            self._compare()
        return list(dict.fromkeys(self.unchecked))

    def _compare(self) -> None:
        with self.states.noting() as of_batch:
            batch = self.gather(range(self.count))
        with self.states.noting() as of_losses:
            losses_B = self.compute(batch, self.count)
        gather = partial(batches.take, batch, self.count) if of_batch.drew else self.gather
        if of_batch.drew or of_losses.drew:
            self._replace_all()
            for module in self.model.modules() if of_losses.drew else ():
                module.training = False
            if self._is_hidden and of_batch.drew:
                self._replace_all()
            with self.states.noting() as of_losses:
                losses_B = self.compute(batch, self.count)
            if of_losses.drew:  # rows of a batch are cut with their draws elsewhere
                if self.collates or any(map(is_mask, leaves_of(batch, self.count))):
                    self.unchecked.append("the loss draws numbers, which alone are others")
                return
        if self._cannot_repeat(losses_B, self.compute(batch, self.count)):
            return
        is_cut = of_batch.drew or not self.collates
        if is_cut and (why := self._find_no_rows(batch)):
            self.unchecked.append(why)
            return
        for layers in (nullcontext(), amplified(self.model)):
            with layers:
                self._compare_parts(gather, batch, is_cut=is_cut)
        if self.unchecked.count(_COARSE) == 1:  # the other comparison shows enough
            self.unchecked.remove(_COARSE)

    def _compare_parts(
        self, gather: Callable[[Sequence[int]], Any], batch: Any, *, is_cut: bool
    ) -> None:
        """Compare a batch of all with each sample alone, at its own length, and with others."""
        losses_B = self.compute(batch, self.count)
        allowed_B = self._find_rounding(lambda: self.compute(batch, self.count), losses_B)
        if (allowed_B > _HIDDEN * losses_B.abs()).all() and losses_B.any():
            self.unchecked.append(_COARSE)
        alone_B = self._run_alone(gather, batch, losses_B, allowed_B, is_cut=is_cut)
        last = self.gather([self.count - 1]) if is_cut and self.collates else None
        # ``collate_fn`` may pad to one length, whatever samples there are.
        if is_cut and (last is None or shapes_of(last, 1) != shapes_of(batch, self.count)):
            self._compare_lengths(gather, alone_B, allowed_B)
        orders = [range(self.count)[::-1], range(0, self.count, 2), range(1, self.count, 2)]
        for order in (list(places) for places in orders if len(places) > 1):
            found_B = self.compute(gather(order), len(order))
            if self._differ(found_B, alone_B[order], allowed_B[order]):
                raise WrongTrainingError(_MIXED)
        self._compare_loud(batch, losses_B, allowed_B)

    def _compare_loud(self, batch: Any, losses_B: Tensor, allowed_B: Tensor) -> None:
        """Compare half of the samples beside others whose numbers are much larger."""
        halves = [list(range(start, self.count, 2)) for start in (0, 1)]
        for loud, others in (halves, halves[::-1]):
            try:
                with louder(self.model, self.count, loud):
                    found_B = self.compute(batch, self.count)
            except (torch.OutOfMemoryError, WrongTrainingError):
                raise
            except Exception:  # noqa: BLE001 (numbers may be too large for it)
                return
            if self._differ(found_B[others], losses_B[others], allowed_B[others]):
                raise WrongTrainingError(_MIXED)

    def compute(self, batch: Any, count: int) -> Tensor:
        """Return the losses of a batch; (B,) float64, on the CPU."""
        with torch.enable_grad():  # a loss may contain a gradient
            own = copy.copy(batch) if isinstance(batch, Mapping) else batch  # a loss may pop labels
            value = self.losses_of(own)
        losses = getattr(value, "loss_per_sample", value)
        if not isinstance(losses, Tensor) or losses.numel() != count:
            shape = tuple(getattr(losses, "shape", ()))
            raise WrongTrainingError(
                f"the losses of {count} samples have shape {shape}, and must be one for each: "
                "collate_fn packs samples or leaves some out, or the loss is that of a batch"
            )
        self._unit = torch.finfo(losses.dtype).eps
        return losses.detach().reshape(-1).cpu().double()

    def _cannot_repeat(self, first: Tensor, again: Tensor) -> bool:
        """Note where the same draws give another loss, by more than the order of additions."""
        cannot = not bool(agree(again, first, self._unit**0.5 * first.abs()).all())
        if cannot:
            self.unchecked.append(
                "the loss or collate_fn draws numbers that cannot be repeated, such as those of "
                "the operating system"
            )
        return cannot

    def _find_no_rows(self, batch: Any) -> str | None:
        """Say why a batch cannot be cut by samples, where it cannot."""
        try:
            path = next(batches.find_whole(batch, self.count), None)
        except ValueError as error:
            return str(error)
        return path and f"{path} has no entry for each sample, and belongs to the whole batch"

    def _find_rounding(self, run: Callable[[], Tensor], losses_B: Tensor) -> Tensor:
        """Return by how much losses may differ that ``run`` computes; (B,) float64."""
        changed = losses_B.new_zeros(())
        for seed in range(2):
            with rounding_otherwise(self.model, seed):
                change_B = (run() - losses_B).abs()
            changed = torch.maximum(changed, change_B.nan_to_num(0.0, 0.0).max())
        return _ROUNDING * changed + _FLOOR * self._unit * losses_B.abs()

    def _run_alone(
        self,
        gather: Callable[[Sequence[int]], Any],
        batch: Any,
        losses_B: Tensor,
        allowed_B: Tensor,
        *,
        is_cut: bool,
    ) -> Tensor:
        """Compare each sample alone with all together; return the losses, (B,) float64."""
        losses = []
        for place in range(self.count):
            try:
                losses.append(self.compute(gather([place]), 1))
            except (torch.OutOfMemoryError, WrongTrainingError):
                raise
            except Exception as error:  # noqa: BLE001 (any loss may fail in any way)
                raise WrongTrainingError(
                    f"one sample alone fails ({type(error).__name__}), and {self.count} together "
                    "do not: collate_fn, the model or the loss needs other samples, as contrastive "
                    f"losses, pairs of samples and batch statistics do, or {LOSES_AXIS}",
                    str(error),
                ) from None
        alone_B = torch.cat(losses)
        if self._differ(losses_B, alone_B, allowed_B):
            same_B = agree(losses_B, alone_B, allowed_B)
            place = int((~same_B).long().argmax())
            problem = _MIXED if is_cut else self._explain(place, batch, losses_B, allowed_B)
            raise WrongTrainingError(problem)
        return alone_B

    def _differ(self, found_B: Tensor, expected_B: Tensor, allowed_B: Tensor) -> bool:
        """Tell whether losses differ, and not only in their order, which counts for users."""
        if agree(found_B, expected_B, allowed_B).all():
            return False
        in_order = found_B.sort().values, expected_B.sort().values
        is_other = not bool(agree(*in_order, allowed_B.min()).all())
        if self.keeps_order and not is_other:
            raise WrongTrainingError(_REORDERED)
        return is_other

    def _explain(self, place: int, batch: Any, losses_B: Tensor, allowed_B: Tensor) -> str:
        """Say why a sample's loss alone is another: by how it is collated, or by other samples."""
        alone = self.gather([place])
        try:
            cut = batches.take(batch, self.count, [place])
            losses = self.compute(cut, 1)
        except Exception:  # noqa: BLE001 (a batch may be of any structure)
            return f"{_MIXED}; or {_COLLATED}"
        if not agree(losses, losses_B[[place]], allowed_B[[place]]).all():
            return _MIXED
        return _COLLATED if shapes_of(cut, 1) == shapes_of(alone, 1) else _LENGTH

    def _compare_lengths(
        self, gather: Callable[[Sequence[int]], Any], alone_B: Tensor, allowed_B: Tensor
    ) -> None:
        """Cut each row to its own length, where a mask tells it."""
        for place in range(self.count):
            trimmed = _trim(gather([place]))
            if trimmed is None:
                continue
            try:
                losses = self.compute(trimmed, 1)
            except Exception:  # noqa: BLE001 (a part may have its tokens on another axis)
                self.unchecked.append("a sample that is cut to its own length does not run")
                return
            if self._differ(losses, alone_B[[place]], allowed_B[[place]]):
                raise WrongTrainingError(
                    f"{_LENGTH} (each sample was cut to its own length by the batch's mask; if "
                    "every batch is padded to one length, check with samples and collate)"
                )

    def _replace_all(self) -> None:
        """Replace samples by those next in length, so that who sorts by it keeps the order."""
        order, half = list(range(self.count))[::-1], self.count // 2
        changes = [
            [change.get(at, at) for at in order]
            for longer, shorter in itertools.pairwise(order[::-1])
            for change in ({longer: shorter}, {shorter: longer})
        ]
        always = [order[:half] + [order[half - 1]] * (self.count - half), order[:-1]]
        rounds = 2 * max(_ROUNDS, _OF_FEW // self.count)
        changes = [changes[at * len(changes) // rounds] for at in range(rounds)]
        self._replace_others(order, [[picked, *always] for picked in changes[::2]])
        with amplified(self.model):
            self._replace_others(order, [[picked, *always] for picked in changes[1::2]])

    def _replace_others(self, order: list[int], changes: list[list[list[int]]]) -> None:
        """Compare samples with those in changed batches, with the same draws."""
        for others in changes:
            first = Run(self, order)
            after = self.states.read()  # the next turn draws other numbers
            losses_B, again = first.losses_B, partial(Run, self, order, first)
            if self._cannot_repeat(losses_B, again().losses_B):
                return
            allowed_B = self._find_rounding(lambda run=again: run().losses_B, losses_B)  # type: ignore[misc]
            compared = [self._is_compared(first, other, allowed_B) for other in others]
            if not any(compared):
                raise WrongTrainingError(_NOT_COMPARED)
            self.states.write(after)

    def _is_compared(self, first: "Run", order: list[int], allowed_B: Tensor) -> bool:
        """Compare the losses of those that stay in a changed batch; False where it cannot be."""
        count = len(order)
        stays_B = torch.tensor(order) == torch.tensor(first.order[:count])
        try:
            run = Run(self, order, first)
            if not run.draws_as(first):  # the numbers of the first come before those of others
                stays_B[1 if count == self.count else 0 :] = False
            expected = first.losses_B[:count], allowed_B[:count]
            agree_B = agree(run.losses_B, *expected)
            if not agree_B[stays_B].all():
                agree_B |= agree(Run(self, order, first, at_end=True).losses_B, *expected)
        except (torch.OutOfMemoryError, WrongTrainingError):
            raise
        except Exception:  # noqa: BLE001 (it may need several samples, or lengths)
            return False
        if run.hides(first) or not run.draws_rows_as(first):
            self._is_hidden |= run.hides(first)
            return False
        if agree_B[stays_B].all() or (not self.keeps_order and run.is_sorted_as(first, allowed_B)):
            return bool(stays_B.any())
        why = _MIXED if run.shapes == first.shapes else _LENGTH
        why = why if run.has_data_of(first, stays_B) else _COLLATED
        raise WrongTrainingError(why if run.draws_as(first) else f"{why}; or {_DRAWN}")


def compare_samples(
    clipping: "Clipping",
    losses_of: Callable[..., Any],
    load: Callable[[], Sequence[Any]],
    collate: Callable[[list[Any]], Any],
    *,
    keeps_order: bool = False,
) -> list[str]:
    """Compare samples that are collated together, each alone and in parts, as of ``Company``.

    Returns what could not be compared, and why. ``load`` returns the longest sample first, and
    ``losses_of`` computes losses, one for each, of what ``collate`` returns.
    ``WrongTrainingError``: a sample's loss depends on others.
    """
    with random_state_kept() as others, clipping.disabled():  # the data may draw
        states = States(others)

        def compute(batch: Any) -> Any:
            inputs, named = batches.give(losses_of, batch)
            return losses_of(*inputs, **named)

        def gather(places: Sequence[int]) -> Any:
            return collate([samples[number] for number in places])

        with states.restored():
            with states.noting():
                samples = load()
            company = Company(
                clipping.model, compute, gather, len(samples), keeps_order=keeps_order
            )
            return company.compare(states)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore attributes and buffers of modules at the end of the context."""
    modules = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]  # noqa: SLF001
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, own, buffers in modules:
            vars(module).clear()
            vars(module).update(own)
            module._buffers.clear()  # noqa: SLF001
            module._buffers.update(buffers)  # noqa: SLF001
        with torch.no_grad():
            for buffer, value in values:
                if not is_same(buffer, value):
                    buffer.copy_(value)


def _trim(batch: Any) -> Any | None:
    """Cut a batch of one sample to the length in its mask; None where that is the batch's."""
    leaves = [leaf for leaf in leaves_of(batch, 1) if isinstance(leaf, Tensor)]
    mask = next(filter(is_mask, leaves), None)
    if mask is None:
        return None
    tokens, places = mask.shape[1:], mask[0].nonzero().flatten().tolist()
    inputs = (leaf for leaf in leaves if leaf.shape[1:2] == tokens and not is_mask(leaf))
    has_inputs = any(x.dim() > 2 or not x.is_floating_point() for x in inputs)  # noqa: PLR2004
    if len(places) in (0, *tokens) or not has_inputs:
        return None

    def cut(leaf: Any) -> Any:
        has_tokens = isinstance(leaf, Tensor) and leaf.shape[1:2] == tokens
        return leaf[:, places[0] : places[-1] + 1] if has_tokens else leaf

    return batches.apply(batch, 1, cut)
