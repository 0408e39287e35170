"""Poisson batches in parts: every step draws each sample with the same probability.

With folds it draws from one of them, in turn; of a truncated batch a random subset stays. Where
whole users are protected it draws users so, and of each at most so many samples, anew each time.

A batch has any number of samples, also none, and is handed out in parts that fit into memory. The
optimizer is told which part is the last, so that a step is one batch, and what to do with the one
sample that stands for a batch without samples.
"""

import hashlib
import logging
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from dpprof.private.errors import refuse_other_class
from dpprof.private.loop.captured_parts import Part
from dpprof.private.loop.public_numbers import PublicNumbers
from dpprof.private.noise.noise_keys import make_generator
from dpprof.private.samples.data_digest import digest_data
from dpprof.private.samples.users import Users

if TYPE_CHECKING:
    from dpprof.private.loop.private_optimizer import PrivateOptimizer

_log = logging.getLogger("dpprof")

_LEAST_IN_FLOAT32 = 2.0**-12
"""The least rate that is drawn in float32: to at most 2^-12 of it, and never more often."""


class _OneByOne(Dataset[Any]):
    """A dataset of which each sample is read by itself, and so sees no other of its batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


class _Parts(Sampler[list[int]]):
    def __init__(
        self,
        folds: Sequence[range],
        sample_rate: float,
        max_batch_size: int | None,
        generator: torch.Generator,
        *,
        largest: int | None = None,
        users: Users | None = None,
    ) -> None:
        self._folds, self._largest, self._users = folds, largest, users
        # Draws are multiples of 2^-24, of 2^-53 in float64. Opacus draws in float32 too.
        bits = 24 if sample_rate >= _LEAST_IN_FLOAT32 else 53
        self._dtype = torch.float32 if bits == 24 else torch.float64  # noqa: PLR2004
        self._threshold = math.floor(sample_rate * 2**bits) / 2**bits
        self.most = max_batch_size or len(folds[0]) * (1 if users is None else users.most)
        self.generator = generator
        self.restore(generator.get_state())
        self.steps = 0
        """How many batches the next iteration draws."""

        self.turn = 0  # how many were drawn before, which says from which fold the first is
        self.drawn: deque[Part] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        for turn in range(self.turn, self.turn + self.steps):
            fold = turn % len(self._folds)
            indices = self._folds[fold]
            self._renew_in_fork()
            drawn = torch.rand(len(indices), generator=self.generator, dtype=self._dtype)
            chosen = (drawn < self._threshold).nonzero()[:, 0]
            if self._largest is not None and len(chosen) > self._largest:
                kept = torch.randperm(len(chosen), generator=self.generator)[: self._largest]
                chosen = chosen[kept.sort().values]
            batch = [self._draw_samples(indices[at]) for at in chosen.tolist()]
            parts = self._split(batch) or [[self._draw_samples(indices[0])[:1]]]
            state = self.generator.get_state()
            for at, part in enumerate(parts, start=1):
                samples = [sample for own in part for sample in own]
                own = None if self._users is None else self._users.segment(part)
                self.drawn.append(Part(len(samples), at == len(parts), not batch, state, fold, own))
                yield samples

    @property
    def state(self) -> torch.Tensor:
        """The generator's, where the next batch begins that was not handed out as a whole."""
        self._renew_in_fork()
        return self._state

    def restore(self, state: torch.Tensor) -> None:
        """Draw from this state on, in this process."""
        self._state, self._process = state, os.getpid()
        self.generator.set_state(state)

    def end_batch(self, part: Part) -> None:
        """Note that the last part of a batch was handed out."""
        self._state = part.state

    def _renew_in_fork(self) -> None:
        if os.getpid() != self._process:  # it would draw the other's batches
            self.restore(make_generator().get_state())

    def _draw_samples(self, unit: int) -> list[int]:
        return [unit] if self._users is None else self._users.draw(unit, self.generator)

    def _split(self, batch: Sequence[list[int]]) -> list[list[list[int]]]:
        """Split a batch into parts with whole units, each counted like the largest."""
        parts: list[list[list[int]]] = []
        for own in sorted(batch, key=len):
            if not parts or (len(parts[-1]) + 1) * len(own) > self.most:
                parts.append([])
            parts[-1].append(own)
        return parts


class PoissonLoader:
    """Hands out the parts of Poisson batches, epoch by epoch.

    Args:
        data_loader: What loads: its dataset, workers and ``collate_fn`` are used.
        numbers: With which probability samples are drawn, and how many steps an epoch has.
        max_batch_size: The most samples of a part; None for batches in one part.
        generator: Draws the secret that the samples follow from, and so moves on; None for the
            operating system.
        rank: This rank: each draws from samples of its own.
        ranks: How many there are.
        users: Whose the samples are; None where each is drawn by itself. All samples of a user are
            in one part, and on one rank.

    Raises:
        ValueError: There are fewer samples, or users, than ranks, or ``max_batch_size`` is below 1,
            or below the most samples of a user.
    """

    def __init__(
        self,
        data_loader: DataLoader[Any],
        numbers: PublicNumbers,
        *,
        max_batch_size: int | None = None,
        generator: torch.Generator | None = None,
        rank: int = 0,
        ranks: int = 1,
        users: Users | None = None,
    ) -> None:
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, and is {max_batch_size}")
        if users is not None and max_batch_size is not None and max_batch_size < users.most:
            raise ValueError(
                f"no part splits a user, who may have samples_of_user={users.most} samples, and "
                f"max_batch_size (of a Trainer per_device_train_batch_size) is {max_batch_size}; "
                f"set it to at least {users.most}, or samples_of_user to at most {max_batch_size}"
            )
        self.numbers = numbers
        self.optimizer: PrivateOptimizer | None = None
        """Is told of parts and of batches without samples; set before the first iteration."""

        self._rank = rank
        generator = make_generator(generator, rank)
        self.samples = len(cast("Sized", data_loader.dataset))
        self.users = users
        every = range(self.samples if users is None else len(users))
        folds = [every[fold :: numbers.folds][rank::ranks] for fold in range(numbers.folds)]
        if not all(folds):
            raise ValueError(f"{len(every)} {numbers.unit}s are too few for {ranks} ranks")
        self._digest = digest_data(data_loader.dataset) if ranks > 1 else ""
        self._parts = _Parts(
            *(folds, numbers.sample_rate, max_batch_size, generator),
            largest=numbers.largest_of_rank,
            users=users,
        )
        self._done = self._turn = self._batches = 0
        self._of_workers = torch.Generator()  # so that the global one stays as it is
        self._loader: DataLoader[Any] = DataLoader(
            _OneByOne(data_loader.dataset),
            batch_sampler=self._parts,
            num_workers=data_loader.num_workers,
            collate_fn=data_loader.collate_fn,
            pin_memory=data_loader.pin_memory,
            worker_init_fn=data_loader.worker_init_fn,
            prefetch_factor=data_loader.prefetch_factor,
            timeout=data_loader.timeout,
            multiprocessing_context=data_loader.multiprocessing_context,
            persistent_workers=data_loader.persistent_workers,
            generator=self._of_workers,
        )

    @property
    def folds(self) -> int:
        """In so many consecutive batches a sample is drawn at most once."""
        return self.numbers.folds

    def __len__(self) -> int:
        """How many steps an epoch has; it has more parts."""
        return self.numbers.steps_of_epoch

    @property
    def sample_rate(self) -> float:
        """The probability with which a step draws each sample."""
        return self.numbers.sample_rate

    @property
    def max_batch_size(self) -> int:
        """The most samples of a part, if each user had as many as its largest."""
        return self._parts.most

    @max_batch_size.setter
    def max_batch_size(self, most: int) -> None:
        self._parts.most = most

    @property
    def is_last_part(self) -> bool:
        """Whether what was handed out last ends a batch (``NoisyOptimizer.is_last_part``)."""
        return self.optimizer is None or self.optimizer.is_last_part

    def __iter__(self) -> Iterator[Any]:
        """Hand out the rest of an epoch; what was left of a batch is thrown away.

        So is the rest of a batch that the loop discards: which samples were in the parts before
        would show in the step.
        """
        assert self.optimizer is not None
        turn, begins = self._turn + 1, True
        try:
            for batch, part in self.parts():
                if begins:
                    self.optimizer.is_thrown_away = False
                if not self.optimizer.is_thrown_away:
                    self.optimizer.take_part(part)
                    yield batch
                begins = part.is_last
        finally:
            if turn == self._turn:
                self.optimizer.leave_parts()

    def parts(self) -> Iterator[tuple[Any, Part]]:
        """Hand out the rest of an epoch, with what ``PrivateOptimizer.take_part`` is to be told.

        Raises:
            RuntimeError: Another iteration began meanwhile, or a state was loaded.
        """
        if self.optimizer is None:
            raise RuntimeError(
                "Poisson batches are drawn in training alone, by train() of a trainer; load "
                "samples of train_dataset to look at some"
            )
        self._turn += 1
        turn = self._turn
        self.optimizer.data = self._digest
        if self.optimizer.is_within_a_batch:
            _log.warning(
                "an iteration over the data loader begins within a batch, whose parts are thrown "
                "away; one iteration hands out all parts of a batch"
            )
        self.optimizer.discard()
        self._parts.restore(self._parts.state)
        digest = hashlib.sha256(self._parts.state.numpy().tobytes()).digest()
        self._of_workers.manual_seed(int.from_bytes(digest[:7], "big"))
        self._parts.drawn.clear()
        left = self._parts.steps = len(self) - self._done
        self._parts.turn = self._batches
        for batch in self._loader:
            part = self._parts.drawn.popleft()
            left -= part.is_last
            if part.is_last:
                self._parts.end_batch(part)
                self._done = (self._done + 1) % len(self)
                self._batches += 1
            yield batch, part
            if turn != self._turn:  # before more samples are drawn
                if not left:
                    return
                raise RuntimeError(
                    "another iteration over this data loader began, or a state was loaded, since "
                    "this one handed out its last part; go on with the newer one"
                )

    def load(self, indices: Iterable[int]) -> Any:
        """Load and collate some samples, which nothing drew."""
        return self._loader.collate_fn([self._loader.dataset[at] for at in indices])

    def state_dict(self, *, exact: bool = False) -> dict[str, Any]:
        """Return where the next batch begins; with ``secrets``, which samples follow, if exact."""
        secrets = {
            "generator": self._parts.state,
            "samples": self.samples,
            "max_batch_size": self.max_batch_size,
            "users of samples": self.users and self.users.digest,
            "rank": self._rank,
        }
        return ({"secrets": secrets} if exact else {}) | {
            "steps of the epoch": self._done,
            "batches": self._batches,
            "steps in an epoch": len(self),
            "folds": self.numbers.folds,
            "truncated batch size": self.numbers.truncated_batch_size,
            "sample rate": self.sample_rate,
            "samples of a user": self.numbers.samples_of_user,
        }

    def load_state_dict(self, state: dict[str, Any], *, exact: bool = False) -> None:
        """Go on from a state: the next iteration hands out the rest of its epoch.

        Args:
            state: Of ``state_dict``.
            exact: Whether the samples are those that would have been drawn, in parts of the same
                size; by default they are drawn anew, as accountants suppose.

        Raises:
            ValueError: It is of other data, or of batches of another size; or it has no secrets for
                ``exact``.
        """
        self.refuse_other(state, exact=exact)
        self._turn += 1
        self._done, self._batches = state["steps of the epoch"], state["batches"]
        if exact:
            self._parts.restore(state["secrets"]["generator"].cpu())
            self.max_batch_size = state["secrets"]["max_batch_size"]
        else:
            self._parts.restore(make_generator(rank=self._rank).get_state())

    def refuse_other(self, state: dict[str, Any], *, exact: bool) -> None:
        """Refuse a state that ``load_state_dict`` cannot go on from (``ValueError``)."""
        if exact and not state.get("secrets"):
            raise ValueError(
                "this state has no secrets, so no run can draw the same samples: save "
                "state_dict(exact=True), or leave out exact=True here"
            )
        saved, own = dict(state), self.state_dict(exact=exact)
        names = [name for name in own if name not in ("secrets", "steps of the epoch", "batches")]
        if exact:
            saved, own = saved | saved["secrets"], own | own["secrets"]
            names += ["samples", "users of samples", "rank"]
        for name in names:
            if saved.get(name) != own[name]:
                raise ValueError(
                    f"this state was saved with {name}: {saved.get(name)}, and here there are "
                    f"{own[name]}"
                )


def refuse_related(sampling: torch.Generator | None, noise: torch.Generator | None) -> None:
    """Refuse generators from which samples and noise would follow alike (``ValueError``)."""
    for name, generator in (("sampling_generator", sampling), ("noise_generator", noise)):
        if generator is not None:
            refuse_other_class(name, generator, torch.Generator)
    if sampling is None or noise is None:
        return
    if sampling is noise or (
        sampling.device == noise.device and torch.equal(sampling.get_state(), noise.get_state())
    ):
        raise ValueError(
            "sampling_generator and noise_generator draw the same numbers, so noise would follow "
            "from the samples that were drawn; give each a seed of its own, or neither"
        )
