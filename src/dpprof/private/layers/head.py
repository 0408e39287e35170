"""Runs the head of a model with its loss, without its logits (``linear_cross_entropy``).

With a vocabulary of V ids, logits, loss and their gradients take V numbers for each token, mostly
more than the rest of the model. Here the logits of a few tokens exist at a time. Forward also
computes the gradient of the hidden states, which each token's incoming gradient only scales. A
trained head contributes a ``ChunkedProduct``: it computes its output gradients again, some samples
at a time, for the norm and for the clipped sum; or forward keeps them, one number for each logit.

Sources: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", for plain
training in chunks; ``norms.linear`` for the norm of what is computed again.

FLOPs of a head of d x V over N tokens: 4 N d V where it is frozen, as with logits. Where it is
trained, 10 N d V and the norm; with logits, or where gradients are kept, 6 N d V and the norm.
Where gradients are not rounded, forward finds the Gram matrices for the norm too: then 8 N d V and
these. Book-keeping turns kept gradients into those of samples, d V numbers each, where these take
no more bytes: then the norm costs hardly anything.

Shape legend: B samples, T tokens, N tokens of a chunk, d width of the hidden states, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dpprof.private.allocation_marks import allocates
from dpprof.private.contributions.contributions import (
    ChunkedProduct,
    Contribution,
    Receive,
    samples_in_a_chunk,
)
from dpprof.private.contributions.sample_gradients import SampleGradients
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.head_losses import HeadLoss, Operands, find_losses
from dpprof.private.layers.layers import apply, autocast_dtype
from dpprof.private.norms import placement
from dpprof.private.norms.linear import fill_grams
from dpprof.private.norms.tiles import accumulator_of, spans

CHUNK_BYTES = 2**28  # the logits of a chunk take about so much, in the dtype of sums


def run_head(layer: nn.Linear, receive: Receive | None, x: Tensor, loss: HeadLoss) -> Tensor:
    """Run a head and its loss, in autocast's dtype under autocast."""
    dtype = autocast_dtype(x)
    x = x if dtype is None else x.to(dtype)
    beside = loss.beside or (None, None, None)
    labels = loss.labels_BT
    if labels.device.type == "cpu" and not isinstance(labels, FakeTensor):
        refuse_labels(labels, loss.ignore_index, layer.out_features)
    loss = loss._replace(beside=None)
    return apply(_Head, x, layer.weight, layer.bias, labels, loss, receive, *beside)


def refuse_labels(labels_BT: Tensor, ignore_index: int, count: int) -> None:
    """Refuse labels that a head has no output for; this waits for the device (``ValueError``)."""
    wrong = (labels_BT != ignore_index) & ((labels_BT < 0) | (labels_BT >= count))
    if wrong.any():
        raise ValueError(
            f"a label is none of the head's {count} outputs; tokens without a loss have "
            f"{ignore_index}"
        )


def _may_find_norm(x_BTd: Tensor) -> bool:
    """Tell whether forward should find the Gram matrices of the losses' gradients for the norm.

    That saves computing the gradients once more. Norm and sum then see the same gradients to the
    bit: the chunks are the same, and nothing is rounded, as 16 bits would be by a token's weight.
    """
    _, T, d = x_BTd.shape
    is_exact = x_BTd.dtype == accumulator_of(x_BTd.dtype) and not placement.is_cuda(x_BTd)
    return is_exact and 2 * d >= T


@allocates("logits_and_loss")
def _make_kept(x_Nd: Tensor, weight: Tensor) -> Tensor:
    return x_Nd.new_empty(len(x_Nd), len(weight))


@allocates("gram_matrices")
def _make_grams(x_BTd: Tensor) -> Tensor:
    B, T, _ = x_BTd.shape
    return x_BTd.new_zeros(B, T, T)


def _rows_at_once(weight: Tensor, dtype: torch.dtype) -> int:
    return max(1, CHUNK_BYTES // (weight.shape[0] * accumulator_of(dtype).itemsize))


class _Kept:
    """Gradients of a head's outputs that forward keeps, in one tensor for each few samples."""

    def __init__(self, x_BTd: Tensor, p: int) -> None:
        self.T = x_BTd.shape[1]
        self._at_once = samples_in_a_chunk(self.T, p, x_BTd.element_size())
        self._parts: list[Tensor | None] = []
        self._needed: list[int] = []  # how many samples of each part are not released

    @property
    def rows(self) -> int:
        """How many rows come at once."""
        return max(1, self.T * self._at_once)

    def make(self, x_Nd: Tensor, weight: Tensor) -> Tensor:
        """Allocate those of the next rows, (N, V)."""
        part_NV = _make_kept(x_Nd, weight)
        self._parts.append(part_NV)
        self._needed.append(len(part_NV) // self.T)
        return part_NV

    @allocates("logits_and_loss")
    def of(self, some: slice) -> Tensor:
        """Return those of some samples, (b, T, V); a copy where they came in several parts."""
        taken = []
        for number, own in self._places(some):
            part_NV = self._parts[number]
            assert part_NV is not None
            taken.append(part_NV.view(-1, self.T, part_NV.shape[1])[own])
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def release(self, some: slice) -> None:
        """Free each part of which no other sample is needed."""
        for number, own in self._places(some):
            self._needed[number] -= own.stop - own.start
            if not self._needed[number]:
                self._parts[number] = None

    def _places(self, some: slice) -> Iterator[tuple[int, slice]]:
        """Yield each part that some samples are in, and which of its samples these are."""
        for start in range(some.start - some.start % self._at_once, some.stop, self._at_once):
            own = slice(max(some.start - start, 0), min(some.stop - start, self._at_once))
            yield start // self._at_once, own


class _FromGradients(NamedTuple):
    """What forward computes from the gradients of the head's outputs; None if not needed."""

    of_input_Nd: Tensor | None
    of_beside_Nk: Tensor | None
    grams_BTT: Tensor | None

    def take(self, g_NV: Tensor, some: slice, operands: Operands, kept_NV: Tensor | None) -> None:
        if self.grams_BTT is not None:
            T = self.grams_BTT.shape[1]
            samples = slice(some.start // T, some.stop // T)
            fill_grams(g_NV.view(-1, T, g_NV.shape[1]), self.grams_BTT[samples])
        if kept_NV is not None and kept_NV.dtype != g_NV.dtype:  # else they are there already
            g_NV = kept_NV.copy_(g_NV)
        weights = operands.weight, operands.beside_weight
        for product, weight in zip(self[:2], weights, strict=True):
            if product is not None and weight is not None:
                torch.mm(g_NV.to(product.dtype), weight.to(product.dtype), out=product[some])


def _spans_with_kept(
    x_Nd: Tensor, weight: Tensor, at_once: int, kept: _Kept | None
) -> Iterator[tuple[slice, Tensor | None]]:
    """Yield the rows of each chunk, and where their gradients are kept."""
    if kept is None:
        for some in spans(len(x_Nd), at_once):
            yield some, None
        return
    for part in spans(len(x_Nd), kept.rows):
        kept_NV = kept.make(x_Nd[part], weight)
        for some in spans(len(kept_NV), at_once):
            yield slice(part.start + some.start, part.start + some.stop), kept_NV[some]


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes them so)
        ctx: Any,
        x_BTd: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels_BT: Tensor,
        loss: HeadLoss,
        receive: Receive | None,
        *beside: Tensor | None,
    ) -> Tensor:
        x_Nd, labels_N = x_BTd.flatten(0, 1), labels_BT.flatten()
        beside_Nk = None if beside[0] is None else beside[0].flatten(0, 1)
        operands = Operands(x_Nd, weight, bias, beside_Nk, *beside[1:])
        losses_N = x_Nd.new_empty(len(x_Nd), dtype=accumulator_of(x_Nd.dtype))
        is_trained = any(ctx.needs_input_grad[1:3])
        at_once, T = _rows_at_once(weight, x_Nd.dtype), labels_BT.shape[1]
        of_input_Nd = torch.empty_like(x_Nd) if ctx.needs_input_grad[0] else None
        of_beside_Nk = None
        if beside_Nk is not None and ctx.needs_input_grad[6]:
            of_beside_Nk = torch.empty_like(beside_Nk)
        kept = _Kept(x_BTd, len(weight)) if loss.keep and is_trained else None
        grams_BTT = None
        is_clipped = receive is not None and of_input_Nd is not None and ctx.needs_input_grad[1]
        if is_clipped and kept is None:
            whole = T * samples_in_a_chunk(T, weight.shape[0], x_BTd.element_size())
            if whole <= at_once and _may_find_norm(x_BTd):
                at_once, grams_BTT = whole, _make_grams(x_BTd)
        products = _FromGradients(of_input_Nd, of_beside_Nk, grams_BTT)
        is_needed = kept is not None or of_input_Nd is not None or of_beside_Nk is not None
        for some, kept_NV in _spans_with_kept(x_Nd, weight, at_once, kept):
            losses_N[some], g_NV = find_losses(
                *(operands.rows(some), labels_N[some], loss),
                differentiates=is_needed,
                out_NV=kept_NV,
            )
            if g_NV is not None:
                products.take(g_NV, some, operands, kept_NV)
            del g_NV
        saved = (x_BTd, beside[0]) if is_trained else (None, None)
        ctx.save_for_backward(labels_BT, *saved, *products)
        ctx.weights, ctx.loss, ctx.receive = (weight, bias, *beside[1:]), loss, receive
        ctx.kept = kept  # unlike saved tensors, backward can free some samples' of these
        ctx.clipped = [p for p in (weight, bias) if p is not None and receive is not None]
        return losses_N.view(labels_BT.shape)

    @staticmethod
    def backward(ctx: Any, g_BT: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "the loss contains a gradient, which goes through linear_cross_entropy; compute "
                "the logits, and their cross_entropy"
            )
        labels_BT, x_BTd, beside_BTk, *products, grams_BTT = ctx.saved_tensors
        of_input, of_beside = (
            None if product is None else _scale_rows(product.view(*g_BT.shape, -1), g_BT)
            for product in products
        )
        if x_BTd is None:  # of a frozen head
            return of_input, None, None, None, None, None, of_beside, None, None
        weight, bias, *beside = ctx.weights
        beside_Nk = None if beside_BTk is None else beside_BTk.detach().flatten(0, 1)
        operands = Operands(x_BTd.detach().flatten(0, 1), weight, bias, beside_Nk, *beside)
        chunks = _Chunks(operands, labels_BT, g_BT, ctx.loss, ctx.kept)
        of_parameters: tuple[Tensor | None, Tensor | None] = (None, None)
        if ctx.receive is None:
            of_parameters = chunks.sum_plainly(ctx.needs_input_grad[1:3])
        else:
            contributions: list[tuple[nn.Parameter, Contribution]] = []
            if ctx.needs_input_grad[1]:
                contributions.append((weight, chunks.as_product(grams_BTT)))
            if ctx.needs_input_grad[2]:
                contributions.append((bias, SampleGradients(chunks.sum_tokens())))
            ctx.receive(contributions)
        return of_input, *of_parameters, None, None, None, of_beside, None, None


def _scale_rows(x_BTd: Tensor, g_BT: Tensor) -> Tensor:
    """Multiply each token's row by a number; rounded to the rows' dtype once."""
    return torch.mul(x_BTd, g_BT[:, :, None], out=torch.empty_like(x_BTd))


class _Chunks(NamedTuple):
    """Computes the output gradients of some samples at a time, from kept ones if there are any."""

    operands: Operands
    labels_BT: Tensor
    g_BT: Tensor
    loss: HeadLoss
    kept: _Kept | None

    @allocates("logits_and_loss")
    def gradients_of(self, some: slice) -> Tensor:
        """Return the gradients of the head's outputs, (b, T, V), in the dtype of its inputs."""
        if self.kept is not None:
            kept_bTV = self.kept.of(some)
            return _scale_rows(kept_bTV, self.g_BT[some])
        b, T = self.labels_BT[some].shape
        operands = self.operands.samples(some, T)
        x_Nd, weight = operands.x_Nd, operands.weight
        labels_N, incoming_N = self.labels_BT[some].flatten(), self.g_BT[some].flatten()
        all_NV = x_Nd.new_empty(len(x_Nd), len(weight))
        for rows in spans(len(x_Nd), _rows_at_once(weight, x_Nd.dtype)):
            chunk = (operands.rows(rows), labels_N[rows], self.loss)
            _, g_NV = find_losses(*chunk, incoming_N=incoming_N[rows])
            assert g_NV is not None
            all_NV[rows] = g_NV
            del g_NV
        return all_NV.view(b, T, -1)

    @property
    def inputs_BTd(self) -> Tensor:  # noqa: N802 (its shape)
        """The rows of each sample."""
        return self.operands.x_Nd.view(*self.labels_BT.shape, -1)

    def as_product(self, grams_BTT: Tensor | None) -> ChunkedProduct:
        """Return what the weight contributes; with the Gram matrices that forward found, if any.

        Kept gradients stay as they are: the inputs are multiplied by the incoming gradients, unless
        that may overflow, as in float16.
        """
        V, read, g_BT = len(self.operands.weight), (self.labels_BT, self.g_BT), self.g_BT
        x_BTd, kept = self.inputs_BTd, self.kept
        if kept is not None and x_BTd.dtype == torch.float16:
            return ChunkedProduct(x_BTd, self.gradients_of, V, read, release=kept.release)
        if kept is not None:
            x_BTd = _scale_rows(x_BTd, g_BT)
            return ChunkedProduct(x_BTd, kept.of, V, read, None, g_BT, kept.release)
        if grams_BTT is not None:
            grams_BTT = grams_BTT * (g_BT[:, :, None] * g_BT[:, None, :])
        return ChunkedProduct(x_BTd, self.gradients_of, V, read, grams_BTT)

    def sum_tokens(self) -> Tensor:
        """Return what the bias contributes; (B, V)."""
        x_BTd, exact = self.inputs_BTd, accumulator_of(self.operands.x_Nd.dtype)
        B, T, _ = x_BTd.shape
        at_once = samples_in_a_chunk(T, len(self.operands.weight), x_BTd.element_size())
        parts = [self.gradients_of(some).sum(1, dtype=exact) for some in spans(B, at_once)]
        return torch.cat(parts)

    def sum_plainly(self, needed: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of weight and bias without clipping."""
        weight, bias = self.operands.weight, self.operands.bias
        of_weight = torch.zeros_like(weight) if needed[0] else None
        of_bias = None if bias is None or not needed[1] else torch.zeros_like(bias)
        for some in spans(len(self.labels_BT), 1):
            g_NV, x_Nd = self.gradients_of(some).flatten(0, 1), self.inputs_BTd[some].flatten(0, 1)
            if of_weight is not None:
                of_weight += g_NV.t() @ x_Nd
            if of_bias is not None:
                of_bias += g_NV.sum(0)
        return of_weight, of_bias
