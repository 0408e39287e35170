"""Holds what one use of a parameter contributes to the per-sample gradients, uncomputed.

A contribution holds the tensors that determine the per-sample gradients, such as activations and
output gradients. Contributions of matrices and tables compute their weighted sum over samples;
those of vectors are materialised first. Weights and sums are at least float32: a weight rounded to
16 bits could let a sample exceed its bound, and a sum rounded to 16 bits could move by more than
one sample contributes.

Shape legend: B samples, T tokens, d width of an input, p width of an output.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dpprof.private.allocation_marks import allocates_for_its_caller
from dpprof.private.contributions.sample_gradients import (
    GradientsInParts,
    SampleGradients,
    Scale,
    Shift,
)
from dpprof.private.errors import UnsupportedError
from dpprof.private.norms import placement, triton_ops
from dpprof.private.norms.convolution import Kernel, sample_gradients, sum_weighted
from dpprof.private.norms.float32_products import allows_tf32, convolutions_allow_tf32
from dpprof.private.norms.tiles import (
    REDUCED_SLICE,
    accumulator_of,
    may_weigh,
    multiply,
    spans,
)


class Product(NamedTuple):
    """The use of a matrix that multiplies every token: ``g_b^T x_b``, (p, d)."""

    x_BTd: Tensor
    g_BTp: Tensor
    transposed: bool = False  # whether the parameter is (d, p), as in GPT-2's Conv1D

    def transpose(self, like: "Product") -> "Product":
        """Return this use with inputs and output gradients exchanged.

        Powers of two scale both, so that their sizes have the ratio of those of the use ``like``:
        otherwise rounding errors of both uses together would seem too large.
        """
        x_BTd, g_BTp = self.g_BTp, self.x_BTd
        if x_BTd.dtype != torch.float16:  # which could overflow
            sizes = [
                torch.linalg.vector_norm(factor, dim=(1, 2), dtype=accumulator_of(factor.dtype))
                for factor in (like.x_BTd, like.g_BTp, x_BTd, g_BTp)
            ]
            ratio_B = (sizes[0] / sizes[1]) * (sizes[3] / sizes[2])
            power_B = (ratio_B.log2() / 2).round().nan_to_num(0, 0, 0)[:, None, None]
            x_BTd = torch.ldexp(x_BTd, power_B.to(x_BTd.dtype))
            g_BTp = torch.ldexp(g_BTp, -power_B.to(g_BTp.dtype))
        return Product(x_BTd, g_BTp, not self.transposed)

    def materialise(self, x_BTd: Tensor, g_BTp: Tensor) -> Tensor:
        """Compute the per-sample gradients; (B, p, d), or (B, d, p)."""
        left, right = (x_BTd, g_BTp) if self.transposed else (g_BTp, x_BTd)
        return multiply(left.transpose(1, 2), right)

    @property
    def is_rounded(self) -> bool:
        """Whether tensor cores multiply: they round operands of the sum to 16 bits or TF32."""
        return _is_rounded(self.x_BTd)

    @allocates_for_its_caller
    def sum(self, weights_B: Tensor, onto: Tensor | None = None) -> Tensor:
        """Compute the weighted sum over samples, added to ``onto``, in place, if there is one."""
        x, g = self.x_BTd, self.g_BTp
        weights_B11 = weights_B[:, None, None]
        if may_weigh(x):
            if x.shape[2] <= g.shape[2]:
                x = _weigh(x, weights_B)
            else:
                g = _weigh(g, weights_B)
            left, right = (x, g) if self.transposed else (g, x)
            left_mN, right_Nn = left.flatten(0, 1).t(), right.flatten(0, 1)
            accumulator = accumulator_of(left.dtype)
            if left.dtype != accumulator:
                product = torch.mm(left_mN, right_Nn, out_dtype=accumulator)
                return product if onto is None else onto.add_(product)
            return left_mN @ right_Nn if onto is None else onto.addmm_(left_mN, right_Nn)
        left, right = (x, g) if self.transposed else (g, x)
        weights_N1 = weights_B11.expand(-1, x.shape[1], 1).flatten(0, 1)
        left_Nm, right_Nn = left.flatten(0, 1), right.flatten(0, 1)
        summed = weights_B.new_zeros(left_Nm.shape[1], right_Nn.shape[1]) if onto is None else onto
        for some in spans(len(left_Nm), REDUCED_SLICE):
            summed.addmm_((left_Nm[some] * weights_N1[some]).t(), right_Nn[some].to(summed.dtype))
        return summed


def _weigh(x_BTd: Tensor, weights_B: Tensor) -> Tensor:
    """Multiply samples by their weights, and round to their dtype."""
    if triton_ops.is_fused(x_BTd) and x_BTd.stride()[1:] == (x_BTd.shape[2], 1):
        weighed_BTd: Tensor = triton_ops.launch(triton_ops.weigh, x_BTd, weights_B)
        return weighed_BTd
    return torch.mul(x_BTd, weights_B[:, None, None], out=torch.empty_like(x_BTd))


def _is_rounded(x: Tensor) -> bool:
    is_float32 = x.dtype in (torch.float32, torch.float16)  # which is cast
    return placement.is_cuda(x) and (x.dtype is torch.bfloat16 or (is_float32 and allows_tf32()))


AT_ONCE_BYTES = 2**28  # output gradients that a ``ChunkedProduct`` computes at a time, about


def samples_in_a_chunk(T: int, p: int, itemsize: int) -> int:
    """Return how many samples' output gradients a ``ChunkedProduct`` computes at a time."""
    return max(1, AT_ONCE_BYTES // max(1, T * p * itemsize))


class ChunkedProduct(NamedTuple):
    """A ``Product`` whose output gradients are kept or computed for some samples at a time."""

    x_BTd: Tensor
    gradients_of: Callable[[slice], Tensor]  # of some samples, (b, T, p), each time the same
    p: int

    read: tuple[Tensor, ...]  # what ``gradients_of`` reads that other code has too
    grams_BTT: Tensor | None = None  # of the output gradients, where known already
    incoming_BT: Tensor | None = None  # multiplies the inputs, where output gradients are kept
    release: Callable[[slice], None] | None = None
    """Frees the kept output gradients of some samples, as ``parts`` yields them, once nothing needs
    them again; None where output gradients are not kept."""

    @property
    def is_rounded(self) -> bool:
        """Whether tensor cores multiply, as for ``Product``."""
        return _is_rounded(self.x_BTd)

    @property
    def outlasts_gradients(self) -> bool:
        """Whether kept output gradients take at least the bytes of the per-sample gradients."""
        _, T, d = self.x_BTd.shape
        of_gradients = accumulator_of(self.x_BTd.dtype).itemsize * d
        return self.release is not None and of_gradients <= self.x_BTd.element_size() * T

    def parts(self) -> Iterator[tuple[slice, Product]]:
        """Compute the products of all samples, some at a time."""
        B, T, _ = self.x_BTd.shape
        for some in spans(B, samples_in_a_chunk(T, self.p, self.x_BTd.element_size())):
            yield some, Product(self.x_BTd[some], self.gradients_of(some))

    @allocates_for_its_caller
    def sum(self, weights_B: Tensor) -> Tensor:
        """Compute the weighted sum over samples."""
        summed: Tensor | None = None
        for some, product in self.parts():
            summed = product.sum(weights_B[some], summed)
        assert summed is not None
        return summed

    def largest(self) -> Tensor:
        """Compute the largest output gradient of each token; (B, T, 1)."""
        largest_BT1 = torch.cat(
            [
                torch.linalg.vector_norm(product.g_BTp, torch.inf, dim=2, keepdim=True)
                for _, product in self.parts()
            ]
        )
        return (
            largest_BT1 if self.incoming_BT is None else largest_BT1 * self.incoming_BT[:, :, None]
        )

    def without(self, excluded_B: Tensor) -> "ChunkedProduct":
        """Return the product with some samples set to zero."""
        excluded_B11 = excluded_B.to(self.x_BTd.device)[:, None, None]

        def gradients_of(some: slice) -> Tensor:
            return self.gradients_of(some).masked_fill(excluded_B11[some], 0)

        return self._replace(
            x_BTd=self.x_BTd.masked_fill(excluded_B11, 0), gradients_of=gradients_of
        )


def refuse_computed_again(contributions: Iterable[tuple[Any, Any]]) -> None:
    """Refuse gradients that need a weight which ``fully_shard`` freed (``UnsupportedError``)."""
    for _, contribution in contributions:
        if isinstance(contribution, ChunkedProduct) and contribution.release is None:
            raise UnsupportedError(
                "under fully_shard a head that is trained keeps the gradients of its outputs: give "
                "linear_cross_entropy keep=True"
            )


def refuse_float16(contributions: Iterable[tuple[Any, Any]]) -> None:
    """Refuse float16, which overflows where a sum makes numbers larger (``UnsupportedError``)."""
    for _, contribution in contributions:
        if any(isinstance(part, Tensor) and part.dtype == torch.float16 for part in contribution):
            raise UnsupportedError(
                "normalised clipping makes short gradients longer, for which float16 has too small "
                "a range; use bfloat16, or flat clipping"
            )


class Convolution(NamedTuple):
    """The use of a convolution's weight, (O, C / groups, ...) as ``norms.convolution`` says."""

    x: Tensor  # the inputs, (B, C, ...); for a transposed convolution the output gradients
    g: Tensor  # the output gradients, (B, O, ...); for a transposed convolution the inputs
    kernel: Kernel
    transposed: bool = False

    @staticmethod
    def materialise(
        x: Tensor,
        g: Tensor,
        kernel: Kernel,
        transposed: bool = False,  # noqa: ARG004 (as a field)
    ) -> Tensor:
        """Compute the per-sample gradients, (B, *weight)."""
        return sample_gradients(x, g, kernel)

    @property
    def is_rounded(self) -> bool:
        """Whether tensor cores multiply: 16 bits are cast for the sum, so they round to TF32."""
        is_exact = self.x.dtype == torch.float64 or not convolutions_allow_tf32()
        return placement.is_cuda(self.x) and not is_exact

    @property
    def output_gradients(self) -> Tensor:
        """The gradients of each place in a row, (B, L, channels of the output)."""
        gradients = self.x if self.transposed else self.g
        return gradients.flatten(2).transpose(1, 2)

    @allocates_for_its_caller
    def sum(self, weights_B: Tensor) -> Tensor:
        """Compute the weighted sum over samples; the weights scale the smaller operand."""
        return sum_weighted(self.x, self.g, self.kernel, weights_B)


class Lookup(NamedTuple):
    """The use of a lookup table, (rows, d); the padding row has no gradient."""

    ids_BT: Tensor
    g_BTd: Tensor
    rows: int
    padding: int  # row without a gradient, -1 for none

    @property
    def trained_BTd(self) -> Tensor:  # noqa: N802 (its shape)
        """The output gradients, zero at padding."""
        if self.padding < 0:
            return self.g_BTd
        return self.g_BTd.masked_fill((self.ids_BT == self.padding)[:, :, None], 0)

    @allocates_for_its_caller
    def sum(self, weights_B: Tensor) -> Tensor:
        """Compute the weighted sum over samples."""
        summed: Tensor = torch.ops.aten.embedding_dense_backward(
            self.g_BTd * weights_B[:, None, None], self.ids_BT, self.rows, self.padding, False
        )
        return summed


Direct = Shift | Scale | SampleGradients  # always materialised: small, or known no other way

Summable = Product | ChunkedProduct | Convolution | Lookup | SampleGradients
"""Contributions whose weighted sum can be computed."""

Contribution = Summable | Direct


Kept = Summable | GradientsInParts  # what is kept until the norms are known


def device_of(kept: Kept) -> torch.device:
    """Return the device of what is kept."""
    first = kept.parts[0] if isinstance(kept, GradientsInParts) else kept
    return first[0].device


def storage_of(x: Tensor) -> StorageWeakRef:
    """Identify the memory that a tensor, and each view of it, holds, without holding it.

    No other storage is equal to it: an address alone may be that of a later one.
    """
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]


class Versions:
    """How often the tensors of a contribution, which other code has too, had been changed."""

    def __init__(self, contribution: Kept | Direct) -> None:
        read = contribution.read if isinstance(contribution, ChunkedProduct) else ()
        tensors = [part for part in (*contribution, *read) if isinstance(part, Tensor)]
        self._known = [(tensor, tensor._version) for tensor in tensors]  # noqa: SLF001 (no public name)

    def verify(self, name: str) -> None:
        """Refuse a contribution to a parameter that was changed since (``RuntimeError``)."""
        if any(tensor._version != version for tensor, version in self._known):  # noqa: SLF001
            raise RuntimeError(
                f"an activation or output gradient that was kept for {name} was changed in place "
                "before it was summed, by a hook maybe; change a copy"
            )


def materialise_vector(contribution: Contribution) -> Summable:
    """Compute the per-sample gradients of a vector; leave other contributions as they are."""
    if isinstance(contribution, Shift | Scale):
        return SampleGradients(contribution.materialise(*contribution))
    return contribution


def zero_samples(contribution: Kept, excluded_B: Tensor) -> Kept:
    """Set some samples to zero. A weight of zero is not enough: 0 times NaN is NaN."""
    if isinstance(contribution, ChunkedProduct | GradientsInParts):
        return contribution.without(excluded_B)

    def fill(part: Tensor) -> Tensor:
        return part.masked_fill(excluded_B.to(part.device).view(-1, *(1,) * (part.dim() - 1)), 0)

    numbers: dict[str, Any] = {
        name: fill(part)
        for name, part in contribution._asdict().items()
        if isinstance(part, Tensor) and part.is_floating_point()
    }
    return contribution._replace(**numbers)


Contributions = Sequence[tuple[nn.Parameter, Contribution]]


class Receive(Protocol):
    """Takes what one use of a layer contributes, in each backward, even if that is nothing."""

    def __call__(
        self,
        contributions: Contributions,
        changed_B: Tensor | None = None,
        *,
        may_repeat: bool = False,
    ) -> None:
        """Take contributions of trained parameters.

        Outputs of samples in ``changed_B``, (B,), are others when computed again; ``may_repeat``
        says that the gradient of the layer's input may be differentiated again.
        """


def receive_turned(receive: Receive, B: int, contributions: Contributions, **named: Any) -> None:
    """Pass on contributions whose second axis is the batch of B samples, turned to the first."""

    def turn(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        apart = part.reshape(len(part), B, part.shape[1] // max(1, B), *part.shape[2:])
        return apart.transpose(0, 1).flatten(1, 2)

    receive(
        [
            (p, contribution._replace(**{k: turn(v) for k, v in contribution._asdict().items()}))
            for p, contribution in contributions
        ],
        **named,
    )
