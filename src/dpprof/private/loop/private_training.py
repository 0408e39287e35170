"""Private training in one call: clipping, noise, Poisson batches and accounting together."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpprof.private.accounting.budget import Spent, verify_budget, warn_of_delta
from dpprof.private.accounting.schedule import Sampling
from dpprof.private.engine.book_keeping import BookKeeping
from dpprof.private.engine.engine import Clipping
from dpprof.private.engine.factor import find_factor
from dpprof.private.engine.flash_clipping import FlashClipping
from dpprof.private.errors import refuse_other_class
from dpprof.private.loop.captured_parts import capture_parts, refuse_execution
from dpprof.private.loop.joined_optimizers import join_optimizers
from dpprof.private.loop.method_choice import choose_method, draw_first
from dpprof.private.loop.part_size import AUTO, find_max_batch_size, read_max_batch_size
from dpprof.private.loop.poisson_batches import PoissonLoader, refuse_related
from dpprof.private.loop.private_optimizer import PrivateOptimizer
from dpprof.private.loop.public_numbers import find_public_numbers
from dpprof.private.loop.second_moment import correct_second_moment
from dpprof.private.noise.strategies import is_correlated_noise, make_strategy
from dpprof.private.ranks.ranks import find_ranks
from dpprof.private.samples.random_state import get_state, set_state
from dpprof.private.samples.repeated_checks import RepeatedChecks
from dpprof.private.samples.users import read_users

METHODS: dict[str, type[Clipping]] = {
    "auto": BookKeeping,
    "flash-bk": BookKeeping,
    "flash": FlashClipping,
}
"""By their names in ``dpprof advise``; ``auto`` is the default, where nothing is predicted."""

_TRIED = 4  # the samples that are checked where it is not known how many fit


class PrivateTraining:
    """A model, its optimizer and its data loader, and what was spent; unpacks to these three.

    Args:
        model: The model, whose layers are clipped.
        optimizer: Adds the noise.
        data_loader: Draws the batches.
        spent: Counts the steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: PrivateOptimizer,
        data_loader: PoissonLoader,
        spent: Spent,
    ) -> None:
        self.model, self.optimizer, self.data_loader = model, optimizer, data_loader
        self.spent = optimizer.spent = spent

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer, self.data_loader))

    @property
    def delta(self) -> float | None:
        """The delta of the guarantee; None where none was given."""
        return self.spent.delta

    @property
    def guarantee(self) -> str:
        """What is guaranteed, with the numbers that everybody may know."""
        return self.data_loader.numbers.describe(self.optimizer)

    def remove(self) -> None:
        """End private training: model and optimizer are again as without it.

        What was spent stays. A batch that is not finished is thrown away.
        """
        self.optimizer.remove()

    def epsilon_spent(self, delta: float | None = None) -> float:
        """Return the epsilon of all steps so far (``Spent.epsilon``)."""
        return self.spent.epsilon(delta)

    def state_dict(self, *, exact: bool = False) -> dict[str, Any]:
        """Return all that a run needs to go on, between two steps.

        That is the state of the model, of the optimizer, with what was spent, and of the sampling.

        Args:
            exact: Whether it has ``secrets`` too, of the noise, the sampling and PyTorch's
                generators, which ``load_state_dict`` needs for ``exact``. Keep these apart from
                what is published, with a mode of 0600: the noise of the next step follows from
                them. Generators of Python and NumPy are not in it.

        Raises:
            RuntimeError: A batch is not finished.
        """
        optimizer = self.optimizer.state_dict(exact=exact)
        loader = self.data_loader.state_dict(exact=exact)
        state = {"optimizer": optimizer, "model": self.model.state_dict(), "data_loader": loader}
        if exact:
            state["secrets"] = {
                "noise": optimizer["privacy"].pop("secrets"),
                "sampling": loader.pop("secrets"),
                "random": {str(device): get_state(device) for device in self._devices},
            }
        return state

    def load_state_dict(self, state: dict[str, Any], *, exact: bool = False) -> None:
        """Restore a state; the next iteration over the data loader goes on where it was saved.

        Args:
            state: Of ``state_dict``; without ``exact`` its secrets are not read.
            exact: Whether the run ends with the same bits as the one that was saved, if it gets the
                same data. By default noise and samples are drawn anew (``NoisyOptimizer``).

        Raises:
            RuntimeError: A batch is not finished, or the model is another one.
            ValueError: The state is of other settings, as ``NoisyOptimizer.load_state_dict`` says;
                or it has no secrets for ``exact``.
        """
        secrets: dict[str, Any] = state.get("secrets", {}) if exact else {}
        if exact and not secrets:
            raise ValueError(
                "this state has no secrets: save state_dict(exact=True), or leave out exact=True"
            )
        loader, optimizer = dict(state["data_loader"]), dict(state["optimizer"])
        if secrets:
            loader["secrets"] = secrets["sampling"]
            optimizer["privacy"] = {**optimizer["privacy"], "secrets": secrets["noise"]}
        self.data_loader.refuse_other(loader, exact=exact)
        self.optimizer.refuse_load(optimizer, exact=exact)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(optimizer, exact=exact)
        self.data_loader.load_state_dict(loader, exact=exact)
        for device in self._devices if secrets else ():
            set_state(device, secrets["random"][str(device)])

    @property
    def _devices(self) -> list[torch.device]:
        own = {parameter.device for parameter in self.model.parameters()}
        return [torch.device("cpu"), *sorted((d for d in own if d.type == "cuda"), key=str)]


def make_private(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    data_loader: DataLoader[Any],
    losses_of: Callable[..., Tensor] | None = None,
    *,
    max_grad_norm: float,
    noise_multiplier: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    samples: int | None = None,
    sample_rate: float | None = None,
    expected_batch_size: float | None = None,
    folds: int = 1,
    truncated_batch_size: int | None = None,
    unit: str = "sample",
    users: Sequence[int] | None = None,
    samples_of_user: int | None = None,
    user_gradient: str = "mean",
    spent: Spent | None = None,
    method: str = "auto",
    clipping: str = "flat",
    stability: float | None = None,
    max_batch_size: int | Literal["auto"] | None = None,
    execution: str = "auto",
    accountant: str = "prv",
    check: bool = True,
    verify_every: int | None = None,
    sampling_generator: torch.Generator | None = None,
    noise_generator: torch.Generator | None = None,
    secure_mode: bool = False,
    noise: str = "independent",
    bands: int = 1,
    noise_buffers: str = "device",
    bound_quantile: float | None = None,
    second_moment_floor: float | None = None,
    loss_scale: float = 1.0,
    public_buffers: Collection[str] = (),
) -> PrivateTraining:
    """Make an ordinary training loop private.

    Args:
        model: Each of its trained parameters belongs to a layer; ``Clipping`` says what is refused.
        optimizer: Any PyTorch optimizer of its parameters; or several, each of some of them, which
            step together: one draw of noise, one step for the accountant.
        data_loader: With ``shuffle=True`` or without; batches become Poisson batches, which draw
            each sample with the probability ``batch_size / samples``.
        losses_of: Computes the losses of a batch, one a sample; for ``check`` and ``verify_every``.
        max_grad_norm: Bound C of each sample's gradient.
        noise_multiplier: Standard deviation of the noise over C; or give ``epsilon``.
        epsilon: The budget, which needs ``delta`` and either ``epochs`` or ``steps``. The least
            noise that keeps it is found by the accountant, and no step follows the last one that
            was planned.
        delta: Of the guarantee, less than one over the number of samples.
        epochs: Of ``ceil(samples / batch_size)`` steps each.
        steps: How many steps are planned; of all rounds, where ``spent`` has others.
        samples: How many samples the public knows of, by default the length of the dataset, which
            is public then (``PrivateTraining.guarantee`` says so).
        sample_rate: The probability with which a step draws each sample, in place of ``samples``.
        expected_batch_size: The mean batch size, over all ranks, and what a step's sum is divided
            by; by default the data loader's own ``batch_size``.
        folds: Cyclic Poisson sampling: steps draw in turn from samples 0, ``folds``, ..., from 1,
            ``folds`` + 1, ..., and so on, each with ``folds`` times the probability. Then a sample
            is in every ``folds``-th step at most.
        truncated_batch_size: Truncated Poisson sampling: of more samples, over all ranks, a random
            subset of so many stays. No step is larger, and on a GPU one graph runs it. Chosen near
            the mean it costs epsilon: ``pld`` tells how much, ``prv`` and ``rdp`` bound it by the
            probability that a batch is cut. Both need the data's number of samples to be public.
        unit: ``sample``, or ``user``: then a whole user is drawn, clipped and counted as one, and
            users take the place of samples in all numbers above, the loader's ``batch_size`` too.
        users: (samples,) the id of each sample's user, a whole number. ``collate_fn`` and losses
            must keep the order of samples.
        samples_of_user: The most samples of a user in a step, drawn anew in each.
        user_gradient: A user's gradient is the ``mean`` or the ``sum`` of those of their samples.
        spent: Of an earlier training on the same samples and the same users, whose steps count too.
        method: ``flash-bk`` is the fastest on nearly every GPU, ``flash`` needs less memory;
            ``auto`` predicts both and takes the faster one that fits (``choose_method``), which
            takes seconds and needs ``losses_of`` and a known GPU, and is ``flash-bk`` elsewhere.
        clipping: ``flat`` scales long gradients to C, ``normalised`` (AUTO-S) and ``psac`` all to
            less than C (``factor``): other mechanisms with the same noise and accounting.
        stability: Of normalised clipping, by default 0.01, or the r of psac, by default 0.1.
        max_batch_size: The most samples at a time; a batch with more comes in parts. ``auto`` tries
            which number is fastest on a CPU, and how many fit on a GPU (``part_size``); it needs
            ``losses_of``.
        execution: ``auto`` runs steps as CUDA graphs on a GPU, where ``backward`` is given the
            function of the losses and nothing prevents it (a warning says what); or ``eager``.
        accountant: ``prv``; ``rdp``, which spends more; ``pld``, of dp-accounting, fast for long
            trainings too; or ``tightest``, the least of all that are installed.
        check: Whether the clipped gradient of a first batch is compared with those of its single
            samples (``Clipping.check``), and the losses of some samples of different lengths alone
            with those beside others (``company``).
        verify_every: Repeat that comparison, and look at gradients as in the first batch, at
            random steps, on average every so many. The training's bits stay the same.
        sampling_generator: Draws a secret that the samples follow from, so that no other training
            of it draws the same; by default the operating system does.
        noise_generator: Draws the noise; by default it follows from the operating system's secret.
        secure_mode: Draw noise that withstands floating point attacks.
        noise: ``independent`` in each step, or correlated, ``banded`` or ``bisr``
            (``make_strategy``), which needs ``epochs`` or ``steps``, and at least ``bands``
            ``folds``. With ``bisr`` all steps are one Gaussian mechanism.
        bands: Of correlated noise; ``bands - 1`` tensors of the parameters' size are kept.
        noise_buffers: Where they are: on the ``device``, or in the host's memory, ``cpu``.
        bound_quantile: Moves C from ``max_grad_norm`` to a quantile of norms (``QuantileBound``).
        second_moment_floor: What AdamW's second moment without the noise's is at least (DP-AdamBC,
            ``correct_second_moment``); None for AdamW as it is.
        loss_scale: What losses are multiplied with for backward in float16 (``Clipping``).
        public_buffers: Names of what may change because it holds nothing of the samples, or is not
            read again (``Clipping``).

    Returns:
        Model, optimizer and data loader, which it unpacks to, with ``epsilon_spent`` and
        ``state_dict``.

    Raises:
        ValueError: A setting is out of its range, two contradict each other, or the data loader
            does not allow Poisson sampling.
        UnsupportedError: The model cannot be clipped.
        WrongTrainingError: The check failed: the message says at which parameter, or what a
            sample's loss depends on. ``verify_every`` raises it in ``backward``.

    Formal guarantees: those of ``Clipping`` and ``NoisyOptimizer``, and that the steps of an
    ``epsilon`` spend no more than it at ``delta``, when one sample is added or removed. Divisor,
    probability and number of steps are public: give ``samples`` or ``sample_rate`` where the number
    of samples is not (``PublicNumbers``).

    Example:
        >>> import torch
        >>> from dpprof.private import make_private
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 3))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        >>> model = torch.nn.Linear(3, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> losses_of = lambda x: model(x).square().mean(1)
        >>> private = make_private(
        ...     model, sgd, loader, losses_of, max_grad_norm=1.0, noise_multiplier=1.0
        ... )
        >>> model, optimizer, loader = private
        >>> for batch in loader:
        ...     losses = optimizer.backward(losses_of, *batch)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.steps
        2
    """
    refuse_other_class("data_loader", data_loader, DataLoader)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, and is {method!r}")
    refuse_execution(execution)
    owners = read_users(unit, users, samples_of_user, user_gradient, data_loader.dataset)
    part_size, is_auto = read_max_batch_size(max_batch_size, unit), max_batch_size == AUTO
    optimizer = join_optimizers(optimizer)
    factor = find_factor(clipping, stability)
    verify_budget(noise_multiplier, epsilon, delta, accountant=accountant)
    if losses_of is None and (check or verify_every is not None or is_auto):
        raise ValueError(
            "give losses_of, so that a first batch can be checked; or check=False, and no "
            "verify_every, and no max_batch_size='auto'"
        )
    numbers = find_public_numbers(
        data_loader,
        samples=samples,
        sample_rate=sample_rate,
        expected_batch_size=expected_batch_size,
        folds=folds,
        truncated_batch_size=truncated_batch_size,
        ranks=find_ranks(model).size,
        users=owners,
    )
    sampling = Sampling(1.0, unit=unit) if noise == "bisr" else numbers.sampling
    counted = Spent(sampling, delta, accountant)
    if spent is not None:
        spent.continue_with(counted)
    warn_of_delta(delta, numbers.samples, unit)
    refuse_related(sampling_generator, noise_generator)
    refuse_truncation(noise, truncated_batch_size)
    is_correlated = is_correlated_noise(noise, bands)
    planned = numbers.plan_steps(epochs, steps) if is_correlated or epsilon is not None else None
    if epsilon is not None and planned is not None:
        noise_multiplier = counted.find_noise(epsilon, 1 if noise == "bisr" else planned)
    assert noise_multiplier is not None
    most = max(2, part_size or (_TRIED if is_auto else numbers.samples))  # one shows nothing
    draw = None if losses_of is None else cache(partial(draw_first, losses_of, data_loader, most))
    if method == "auto":
        usual = max(1, round(numbers.expected_batch_size * (samples_of_user or 1)))
        method = choose_method(model, optimizer, draw, part_size or usual)
    clipped = METHODS[method](
        model,
        max_grad_norm,
        **factor,
        loss_scale=loss_scale,
        public_buffers=public_buffers,
    )
    with ExitStack() as undo:
        undo.callback(clipped.remove)
        _refuse_parts_of_ranks(clipped, max_batch_size)
        if losses_of is not None and draw is not None:
            checks = RepeatedChecks(
                *(clipped, losses_of, data_loader.dataset, data_loader.collate_fn),
                most=most,
                every=verify_every,
                keeps_order=unit == "user",
            )
            if check:
                first = draw()
                clipped.check(
                    first.losses_of,
                    *first.batch,
                    users=None if owners is None else owners.cut(first.samples),
                )
                checks.compare_first()
        loader = PoissonLoader(
            data_loader,
            numbers,
            max_batch_size=part_size,
            generator=sampling_generator,
            rank=clipped.ranks.rank,
            ranks=clipped.ranks.size,
            users=owners,
        )
        loader.optimizer = private = PrivateOptimizer(
            optimizer,
            clipped,
            noise_multiplier=noise_multiplier,
            expected_batch_size=numbers.expected_batch_size,
            users=owners,
            generator=noise_generator,
            secure_mode=secure_mode,
            strategy=make_strategy(noise, steps=planned, bands=bands, folds=loader.folds)
            if is_correlated and planned
            else None,
            noise_buffers=noise_buffers,
            bound_quantile=bound_quantile,
        )
        undo.callback(private.remove)
        correct_second_moment(private, second_moment_floor)
        if is_auto and draw is not None:
            part_size = find_max_batch_size(clipped, optimizer, draw(), numbers.expected_batch_size)
            loader.max_batch_size = part_size
        private.captured = capture_parts(private, execution, part_size, numbers)
        undo.pop_all()
    private.planned_steps = None if epsilon is None else planned
    return PrivateTraining(model, private, loader, counted)


def refuse_truncation(noise: str, truncated_batch_size: int | None) -> None:
    """Refuse truncated batches under correlated noise (``ValueError``)."""
    if truncated_batch_size is not None and noise != "independent":
        raise ValueError(
            f"a sample may take another one's place in a truncated batch, and how far that moves "
            f"sums under noise={noise!r} is not known; leave out truncated_batch_size"
        )


def _refuse_parts_of_ranks(clipping: Clipping, max_batch_size: int | str | None) -> None:
    if clipping.ranks.size > 1 and max_batch_size == AUTO:
        raise ValueError("on several ranks max_batch_size must be a number, and is 'auto'")
    if clipping.ranks.is_sharded and max_batch_size is not None:
        raise ValueError(
            "under fully_shard ranks draw other numbers of parts, and wait for each other; leave "
            "out max_batch_size"
        )
