"""How operators pass owners on, from what they returned to what they got.

The proof stops where an operator has no rule here, or its rule returns None. A rule may prove less
than holds of its operator, and never more.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from dpprof.private.graph import index_rules
from dpprof.private.graph.nodes import (
    as_signed,
    axes_of,
    edges_of,
    is_read_once,
    kind_of,
    order_of,
    shape_of,
    shapes_of,
)
from dpprof.private.graph.operands import Operand, Rule
from dpprof.private.graph.owners import (
    FREE,
    MANY,
    Owners,
    Shape,
    along_first_axis,
    concatenate,
    merge,
    of_first_axis,
    place,
    reshape,
    spread,
    unrepeat,
)


def _pointwise(operand: Operand) -> Owners | None:
    """Each element of the output comes from the same place of operands, which may be repeated."""
    if getattr(operand.node, "_saved_reduction", 0):
        return spread(operand.output, range(operand.output.ndim)).reshape([1] * len(operand.shape))
    return unrepeat(operand.output, operand.shape)


def _of_first_operand(rule: Rule, operand: Operand) -> Owners | None:
    return None if operand.position else rule(operand)


def _reduction(operand: Operand) -> Owners | None:
    owners = merge(operand.above)
    return owners if owners.ndim == len(operand.shape) else np.expand_dims(owners, operand.axes)


def _mixing(operand: Operand) -> Owners | None:
    """Each element of the output may come from all along an axis."""
    return spread(operand.output, operand.axes)


def _moving(operand: Operand) -> Owners | None:
    """The operator mixes along axes, and may leave out the last elements of other ones."""
    owners = spread(operand.output, operand.axes)
    for axis, size in enumerate(operand.shape):
        if 1 < owners.shape[axis] < size:
            owners = place(owners, axis, size, range(owners.shape[axis]))
    return owners


def _reshaping(operand: Operand) -> Owners | None:
    return reshape(operand.output, shape_of(operand.node), operand.shape)


def _transposing(operand: Operand) -> Owners | None:
    if len(operand.shape) < 2:  # noqa: PLR2004
        return operand.output
    return operand.output.transpose(np.argsort(order_of(operand.node, len(operand.shape))))


def _repeat(operand: Operand) -> Owners | None:
    owners = operand.output
    extra = owners.ndim - len(operand.shape)
    owners = spread(owners, range(extra)).reshape(owners.shape[extra:])
    for axis, size in enumerate(operand.shape):
        length: int = owners.shape[axis]
        if length > 1:
            before, after = owners.shape[:axis], owners.shape[axis + 1 :]
            times = owners.reshape(*before, length // size, size, *after)
            owners = spread(times, [axis]).reshape(*before, size, *after)
    return owners


def _product(first: int, operand: Operand) -> Owners | None:
    """(..., n, k) times (..., k, m), or (k,), added to an operand that may come ``first``."""
    owners, factor = operand.output, operand.position - first
    if factor < 0:
        return unrepeat(owners, operand.shape)
    if kind_of(operand.node) == "Mv":
        return owners.reshape(-1, 1) if len(operand.shape) > 1 else spread(owners, [0])
    return spread(owners, [owners.ndim - 1 if factor == 0 else owners.ndim - 2])


def _attention(operand: Operand) -> Owners | None:
    owners = operand.output
    return spread(owners, (owners.ndim - 2, owners.ndim - 1)) if operand.position < 3 else None  # noqa: PLR2004


def _likelihood(operand: Operand) -> Owners | None:
    """Each loss comes from the classes of its place, which are on the second axis."""
    if operand.node._saved_reduction:  # noqa: SLF001
        return _pointwise(operand)
    return np.expand_dims(operand.output, min(1, operand.output.ndim))


def _layer_norm(operand: Operand) -> Owners | None:
    widths = len(operand.node._saved_normalized_shape)  # noqa: SLF001
    return spread(operand.output, range(len(operand.shape) - widths, len(operand.shape)))


def _batch_norm(operand: Operand) -> Owners | None:
    owners = operand.output
    is_mixing = operand.node._saved_training  # noqa: SLF001
    return spread(owners, [0, *range(2, owners.ndim)]) if is_mixing else owners


def _first_axis(operand: Operand) -> Owners | None:
    """Each entry of the first axis is treated apart."""
    first = along_first_axis(operand.output)
    return None if first is None else of_first_axis(first, len(operand.shape))


def _pad(operand: Operand) -> Owners | None:
    owners = operand.output
    pads = [as_signed(side) for side in operand.node._saved_pad]  # noqa: SLF001
    axes = reversed(range(owners.ndim))
    for axis, start, stop in zip(axes, pads[::2], pads[1::2], strict=False):
        if owners.shape[axis] > 1:
            if min(start, stop) < 0:
                return None
            owners = owners.take(range(start, owners.shape[axis] - stop), axis)
    return owners


def _unfold(operand: Operand) -> Owners | None:
    """Windows along one axis, whose places come last."""
    axis = as_signed(operand.node._saved_dimension) % len(operand.shape)  # noqa: SLF001
    return spread(operand.output, [axis, len(operand.shape)])[..., 0]


def _cat(operand: Operand) -> Owners | None:
    (axis,), owners = operand.axes, operand.output
    if owners.shape[axis] == 1:
        return owners
    sizes = [None if b is None else shape_of(b, o)[axis] for b, o in edges_of(operand.node)]
    unknown = [number for number, size in enumerate(sizes) if size is None]
    if len(unknown) == 1:
        rest = shape_of(operand.node)[axis] - sum(size for size in sizes if size is not None)
        sizes[unknown[0]] = rest
    before = sizes[: operand.position]
    if None not in before:
        start = sum(size for size in before if size is not None)
    elif None not in (after := sizes[operand.position :]):
        start = owners.shape[axis] - sum(size for size in after if size is not None)
    else:
        return None
    return owners.take(range(start, start + operand.shape[axis]), axis)


def _stack(operand: Operand) -> Owners | None:
    owners = operand.output
    axis = as_signed(operand.node._saved_dim) % owners.ndim  # noqa: SLF001
    return np.asarray(owners.take(operand.position if owners.shape[axis] > 1 else 0, axis))


def _select(operand: Operand) -> Owners | None:
    axis, size = operand.axes[0], operand.shape[operand.axes[0]]
    index = as_signed(operand.node._saved_index) % size  # noqa: SLF001
    return place(np.expand_dims(operand.output, axis), axis, size, [index])


def _slice(operand: Operand) -> Owners | None:
    axis, node = operand.axes[0], operand.node
    size = operand.shape[axis]
    start, end = as_signed(node._saved_start), as_signed(node._saved_end)  # noqa: SLF001
    places = range(size)[start : end : node._saved_step]  # noqa: SLF001
    return operand.output if len(places) == size else place(operand.output, axis, size, places)


def _split(operand: Operand) -> Owners | None:
    """The parts of what was cut along an axis, which those of ``unbind`` lack."""
    axis, parts = operand.axes[0], operand.above
    if kind_of(operand.node) == "Unbind":
        return concatenate([np.expand_dims(part, axis) for part in parts], axis, [1] * len(parts))
    return concatenate(parts, axis, [shape[axis] for shape in shapes_of(operand.node)])


def _diagonal(operand: Operand) -> Owners | None:
    node, count = operand.node, len(operand.shape)
    axes = [as_signed(axis) % count for axis in (node._saved_dim1, node._saved_dim2)]  # noqa: SLF001
    offset = as_signed(node._saved_offset)  # noqa: SLF001
    owners = operand.output
    places = np.arange(shape_of(node)[-1])
    filled = np.full((*owners.shape[:-1], *(operand.shape[axis] for axis in axes)), FREE, np.int32)
    filled[..., places + max(-offset, 0), places + max(offset, 0)] = owners
    return np.moveaxis(filled, (-2, -1), axes)


_POINTWISE = (
    "Abs Acos Acosh Add Addcdiv Addcmul Alias Angle Asin Asinh Atan Atan2 Atanh "
    "BinaryCrossEntropy BinaryCrossEntropyWithLogits Ceil Celu Clamp ClampMax ClampMin Clone "
    "Complex Conj Contiguous Copy Copysign Cos Cosh Digamma Div Elu Erf Erfc Erfinv Exp Exp2 "
    "Expand Expm1 Floor Fmod Frac Gelu Hardshrink Hardsigmoid Hardswish Hardtanh HuberLoss "
    "Hypot LeakyRelu Lerp Lgamma Log Log10 Log1P Log2 LogSigmoid Logaddexp Logaddexp2 Logit "
    "MaskedFill Maximum Minimum Mish MseLoss Mul NanToNum NativeDropout Neg Pow PreluKernel "
    "Reciprocal Relu Remainder Round Rsqrt Rsub Selu Sgn Sigmoid Sign Silu Sin Sinc Sinh "
    "SmoothL1Loss SoftMarginLoss Softplus Softshrink Sqrt Sub Tan Tanh Threshold ToCopy Tril "
    "Triu Trunc Where Xlogy"
)
_ATTENTION = (
    "ScaledDotProductCudnnAttention ScaledDotProductEfficientAttention "
    "ScaledDotProductFlashAttention ScaledDotProductFlashAttentionForCpu"
)
_FIRST_AXIS = (
    "AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D AvgPool2D AvgPool3D "
    "Col2Im Convolution GridSampler2D GridSampler3D Im2Col MaxPool2DWithIndices "
    "MaxPool3DWithIndices MkldnnConvolution NativeGroupNorm PixelShuffle PixelUnshuffle "
    "ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D ReplicationPad2D "
    "ReplicationPad3D UpsampleBicubic2D UpsampleBilinear2D UpsampleLinear1D UpsampleNearest1D "
    "UpsampleNearest2D UpsampleNearest3D UpsampleTrilinear3D"
)
_TABLE: Sequence[tuple[Rule, str]] = (
    (_pointwise, _POINTWISE),
    (_pointwise, " ".join(f"{name}Backward" for name in _POINTWISE.split())),
    (partial(_of_first_operand, _pointwise), "IndexFill"),
    (_reduction, "Amax Amin Aminmax Kthvalue LinalgVectorNorm Logsumexp Max Mean Median Min Mode"),
    (_reduction, "Nanmedian Nansum Norm Prod Std StdMean Sum Var VarMean"),
    (_mixing, "Cummax Cummin Cumprod Cumsum FftC2C FftC2R FftR2C LogSoftmax Logcumsumexp"),
    (_mixing, "SafeSoftmax Softmax"),
    (_moving, "Flip Glu Roll Sort Topk"),
    (_reshaping, "ReshapeAlias Squeeze UnsafeView Unsqueeze View"),
    (_transposing, "Permute T Transpose"),
    # Two real numbers, on an axis of their own, come from each complex one.
    (lambda operand: spread(operand.output, [len(operand.shape)])[..., 0], "ViewAsReal"),
    (lambda operand: np.expand_dims(operand.output, len(operand.shape) - 1), "ViewAsComplex"),
    (_repeat, "Repeat"),
    (partial(_product, 0), "Bmm Mm Mv"),
    (partial(_product, 1), "Addmm Baddbmm"),
    (lambda operand: operand.output.reshape(1), "Dot"),
    (_attention, _ATTENTION),
    (_likelihood, "NllLoss NllLoss2D"),
    (lambda operand: operand.output.reshape(1, -1, 1), "CtcLoss CudnnCtcLoss"),
    (partial(_of_first_operand, _layer_norm), "NativeLayerNorm"),
    (partial(_of_first_operand, _batch_norm), "NativeBatchNorm"),
    (partial(_of_first_operand, _first_axis), _FIRST_AXIS),
    (_pad, "ConstantPadNd"),
    (_unfold, "Unfold"),
    (_cat, "Cat"),
    (_diagonal, "Diagonal"),
    (index_rules.pick, "Index"),
    (index_rules.select, "IndexSelect"),
    (index_rules.gather, "Gather"),
    (index_rules.add_at, "IndexAdd IndexCopy"),
    (index_rules.scatter_elements, "Scatter ScatterAdd ScatterReduce"),
    (index_rules.put, "IndexPut MaskedScatter"),
    (index_rules.pack, "PackPaddedSequence"),
    (_select, "Select"),
    (_slice, "Slice"),
    (_split, "Split SplitWithSizes Unbind UnsafeSplit UnsafeSplitWithSizes"),
    (_stack, "Stack"),
)
"""The rules, and the operators that each holds of."""

_RULES: dict[str, Rule] = {name: rule for rule, names in _TABLE for name in names.split()}

_READING = (
    *(index_rules.pick, index_rules.select, index_rules.gather, index_rules.add_at),
    *(index_rules.scatter_elements, index_rules.put, index_rules.pack),
)
_JOINING = (*_READING, _cat, _diagonal, _select, _slice, _split, _stack)
"""Rules of operators that can change the order of samples, which lengths do not show."""


def owners_below(operand: Operand) -> Owners | None:
    """Return the owners of what an operator got as one operand."""
    rule = _RULES.get(kind_of(operand.node))
    if rule is None or (rule in _READING and is_read_once(operand.node)):
        return None
    below = rule(operand)
    if below is None or below.ndim != len(operand.shape):
        return None
    is_fitting = all(a in (1, b) for a, b in zip(below.shape, operand.shape, strict=True))
    return below if is_fitting else None


def joins_samples(operand: Operand, below: Owners) -> bool:
    """Tell whether an operator cuts, joins or picks along an axis on which several samples lie."""
    if _RULES.get(kind_of(operand.node)) not in _JOINING:
        return False
    saved = getattr(operand.node, "_saved_dim", None)

    def joins(owners: Owners) -> bool:
        axes = range(owners.ndim) if saved is None else [as_signed(saved)]
        axes = [axis for axis in axes if owners.ndim > axis >= -owners.ndim]
        return bool((spread(owners, axes) == MANY).any())

    return any(map(joins, (*operand.above, below)))


_APART = {
    *("Addmm", "Baddbmm", "Bmm", "Mm", "NativeLayerNorm", "Slice", "Split", "SplitWithSizes"),
    *_FIRST_AXIS.split(),
    *_ATTENTION.split(),
}
"""Operators that treat entries of the first axis apart, where that keeps its length."""


def owners_above(
    node: Any, position: int, below: Owners, shapes: tuple[Shape, Shape]
) -> Owners | None:
    """Return the owners of what an operator returned, where it keeps entries apart.

    ``below`` are those of the operand at ``position``, none of them free; ``shapes`` are the
    operand's, and that of what was returned.
    """
    (before, after), kind = shapes, kind_of(node)
    rule = _RULES.get(kind)
    if rule is _reshaping:
        return reshape(below, before, after)
    if rule is _transposing:
        return below.transpose(order_of(node, len(before)))
    if rule is _pointwise:
        return below if before == after else None
    if rule is _mixing:
        return below if all(below.shape[axis] == 1 for axis in axes_of(node, len(before))) else None
    # A product that is added to an operand gets that one first.
    first_factor = int(kind in ("Addmm", "Baddbmm"))
    is_apart = kind in _APART and position == first_factor and before[:1] == after[:1]
    first = along_first_axis(below) if is_apart else None
    return None if first is None else of_first_axis(first, len(after))
