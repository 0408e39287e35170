"""Checks whether a user's own training is as private as its settings say.

Shape legend: B samples, T tokens.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from dpprof.private.checks.batch import read_batch
from dpprof.private.checks.comparison import Checked, Comparison
from dpprof.private.checks.learning import find_obstacles
from dpprof.private.checks.loop import Loop, completed
from dpprof.private.checks.settings import Mechanism, PrivateOptimizer
from dpprof.private.engine.engine import Clipping
from dpprof.private.samples.users import Segments, Users

_log = logging.getLogger("dpprof")


def check(
    model: nn.Module,
    loss: Callable[..., Any],
    batch: Any,
    private: PrivateOptimizer | Clipping | Mechanism,
    *,
    step: Callable[..., Any] | None = None,
    samples: Sequence[Any] = (),
    collate: Callable[[list[Any]], Any] | None = None,
    padding: Tensor | None = None,
    tolerance: float | None = None,
    users: Segments | None = None,
    data_is_public: bool = False,
) -> Checked:
    """Check one's own private training on one batch, and name the first thing that is wrong.

    A step's gradient without noise is compared with the clipped gradients of single samples, each
    in a batch of its own through ordinary autograd. A loss may draw numbers: every step, and every
    sample alone, gets those that were drawn for the batch. A sample's loss must stay the same
    beside others, in another order and at its own length (``samples.company``). Then it is checked
    that every trained parameter is in the optimizer, moves, and gets noise of the right scale; that
    frozen ones stay; that padding and an empty batch contribute nothing. Dropout is off, but for
    one comparison with the gradient of each sample's loss in the whole batch, with the same random
    numbers. Everything is restored afterwards: parameters, gradients, the optimizer's state,
    generators; no accountant counts. It costs B + 12 steps at most, B + 2 more with dropout, the
    forward passes of 16 batches, and of 42 more with draws; and the memory of B + 6 gradients and
    of two copies of the parameters and the optimizer's state.

    Args:
        model: The model that is trained, as the loop has it: plain, with adapters, or wrapped by
            Opacus.
        loss: Computes from ``(model, *batch)`` what the loop differentiates: one loss a sample,
            (B,); the mean of them; or, in ghost clipping, the loss of Opacus's criterion.
        batch: As the data loader hands it out, with at least two samples. Mappings are given by
            name, lists and tuples by position, where the loss takes them so, and all else as one
            argument. Inside, tensors, arrays and lists with one entry for each sample are split by
            samples; the rest belongs to all of them.
        private: dpprof's ``NoisyOptimizer`` or the optimizer of ``make_private``, Opacus's
            optimizer, a ``Clipping`` without either, whose optimizer and noise then stay unchecked,
            or a ``Mechanism`` that describes a loop by hand.
        step: One whole step on ``batch``: clear gradients, forward, backward, step, and no
            scheduler. By default the step of a loop with ``loss`` and ``private``.
        samples: Samples of the dataset, of different lengths, which are collated together, each
            alone and in parts. Without them, rows are cut from the batch, and each to its own
            length where the batch has a mask.
        collate: Makes a batch of some, as the data loader's ``collate_fn``.
        padding: (B, T) bool, True at tokens that must not matter. By default the zeros of a mask
            of 0 and 1 in the batch.
        tolerance: Largest relative error of a gradient; by default 1e-6 in float64, 1e-2 in float32
            and 5e-2 where something computes in 16 bits.
        users: How many samples of the batch each user has, at least two users, where whole users
            are clipped: ``Segments((3, 1, 2))``, or with ``averages=False`` for sums.
        data_is_public: True says that nobody's privacy depends on these samples; then
            ``Checked.obstacles`` tells by them too what keeps the training from learning: a bound
            that clips every sample or none, a signal far below the noise, labels that are not
            shifted.

    Raises:
        WrongTrainingError: Something is wrong. The message names the first such thing, and nothing
            of single samples; what is known of those is in ``details``, and private.
        ValueError: There are fewer than two samples, a list of the batch may be read in two ways,
            the loss or the step draws what cannot be repeated, or an argument is invalid; or
            users are clipped, and ``users`` are missing or are others.
        TypeError: ``private`` is of another type.

    Guarantee: on this batch the gradient before noise is within the tolerance that of the
    definition, and right noise is called wrong with a probability below 1e-11 a parameter. Limits:
    one batch shows a bug; it does not prove that there is none. Sampling, accounting and the
    quality of random numbers are not looked at; adaptive clipping is refused.

    Example:
        >>> import torch
        >>> from dpprof.private import BookKeeping, NoisyOptimizer
        >>> from dpprof.private import check
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = NoisyOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     BookKeeping(model, max_grad_norm=1.0),
        ...     noise_multiplier=1.0,
        ...     expected_batch_size=4,
        ... )
        >>> def loss(model, inputs, targets):
        ...     return (model(inputs) - targets).square().mean(1)
        >>> found = check(model, loss, (torch.randn(4, 3), torch.randn(4, 2)), optimizer)
        >>> found.samples, found.parameters, found.unchecked
        (4, 2, {'padding': 'the batch has no mask of 0 and 1; give the places as padding'})
    """
    if bool(samples) != (collate is not None):
        raise ValueError("give samples and collate together: collate makes a batch of some samples")
    clipping = getattr(private, "clipping", private)
    if isinstance(clipping, Clipping) and clipping.ranks.is_sharded:
        raise ValueError("check needs whole parameters: check the model before fully_shard")
    if isinstance(private, Clipping):
        if step is not None:
            raise ValueError("step makes the steps of an optimizer; give that as private")
        with completed(private, model) as optimizer:
            checked = check(
                *(model, loss, batch, optimizer),
                samples=samples,
                collate=collate,
                padding=padding,
                tolerance=tolerance,
                users=users,
                data_is_public=data_is_public,
            )
        why = "a Clipping has none; give the optimizer that adds the noise"
        return checked._replace(unchecked={"optimizer": why} | checked.unchecked)
    _refuse_other_users(users, getattr(private, "users", None))
    loop_batch = read_batch(batch, loss, model)
    loop = Loop(model, loss, private, step, users)
    comparison = Comparison(loop, loop_batch, tolerance, samples, collate)
    checked = comparison.run(padding)
    obstacles = find_obstacles(loop, comparison.batch if data_is_public else None)
    for obstacle in obstacles:
        _log.warning("check: %s", obstacle)
    return checked._replace(obstacles=obstacles)


def _refuse_other_users(users: Segments | None, of_training: Users | None) -> None:
    """Refuse users that the training has otherwise (``ValueError``)."""
    if users is None and of_training is not None:
        raise ValueError(
            "this training has unit='user': give users=Segments(sizes), how many samples of the "
            "batch each user has"
        )
    averages = getattr(users, "averages", True)
    if of_training is not None and averages != of_training.averages:
        raise ValueError(
            f"users.averages must be {of_training.averages}, as user_gradient of the training "
            f"says, and is {averages}"
        )
