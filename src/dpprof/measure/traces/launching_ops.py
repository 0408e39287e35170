"""Assigns each kernel, or CPU operator, to the operator that launched it.

The launching operator decides the op kind; the kernel's own name decides only where no operator is
known, or not what the operator does. Of nested operators, the outermost one that does work decides:
a copy within a lookup is the lookup's. Some operators do no work of their own, such as a view or
reading a number. A kernel that they launch is theirs, with the op kind of the kernel's name. On a
CPU, the operators that do work take the place of kernels.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from dpprof.experiments.records.terms import PHASES, OpKind, Phase
from dpprof.measure.traces.trace_files import NORMS, PHASE, Span, Trace
from dpprof.predict.flops.cost import EINSUMS, OpFamily, Scope, kind_of_op
from dpprof.predict.flops.op_families import family_of

_OPERATOR = re.compile(r"\w+::\w+")  # the pattern of an operator's name in a trace

_EINSUMS = tuple(f"aten::{name}" for name in EINSUMS)

_BY_KERNEL: tuple[tuple[str, OpFamily], ...] = (
    # torch.compile names a kernel after all operators that it fuses.
    (r"^triton_(poi|for)_", "elementwise"),
    (r"^triton_(red|per|spl|mix)_", "reduction"),
    (r"^triton_\w*(attention|sdpa)", "attention"),
    (r"^triton_(tem_|\w*mm_|convolution)", "matmul"),
    (r"nccl|nvshmem|multimem|cross_device_reduce|(one|two)_shot_all_reduce", "communication"),
    (r"memcpy|memset|copy_kernel|_copy_|CatArray|chunk_cat|arange|tri[ul]_|im2col|jagged", "copy"),
    (r"(Fill|Copy|Zero)Functor|::Copy<|(fill|copy)Buffer|nchwToNhwc|nhwcToNchw|AddPadding", "copy"),
    (r"convertTensor|permut(e_|ation)|_pad\d?d?_|(cast|batched)_transpose|transpose_read", "copy"),
    (r"roll_cuda|flip_kernel", "copy"),
    (r"gram_squares|product_squares|\bNorm\w*Ops|l[p2]_?norm|nrm2", "norm"),
    (r"fmha|flash(?!infer)|attention|attn|sdpa|cudnn::fusion", "attention"),
    (r"embedding", "indexing"),
    (r"adam|sgd|adagrad|rmsprop|lamb_?(stage|functor)|optimizer", "optimizer"),
    (r"scal_kernel|scalePackedTensor", "elementwise"),
    (r"(?<!fb)gemm|gemv|cutlass|cublas|xmma|wgmma|splitK|nvjet|dot_kernel|matmul|Cijk_", "matmul"),
    (r"conv(?!er)|wgrad|dgrad|winograd|scudnn|cask|fft2d|rnn|\dcudnn|trsm", "matmul"),
    (r"softmax|(layer|batch|group|instance|rms|weight)_?norm|\b(bn|ln)_", "reduction"),
    (r"reduce|welford|scan|(nll|ctc)_loss|(?<!binary_)cross_entropy|(?<!un)pool", "reduction"),
    (r"RowwiseMoments|GammaBeta|FusedParams|InternalGradients|adaptive_average", "reduction"),
    (r"philox|curand|distribution|random|dropout", "random"),
    (r"gather|scatter|ind(ex|ices)|grad_weight|sort|topk|unique|nonzero|histogram", "indexing"),
    (r"unpool|upsample|grid_sampler|partial_segment|of_segments|segment_offset", "indexing"),
    (r"DeviceSelect", "indexing"),
    (r"elementwise|pointwise|vectorized|unrolled|multi_tensor_apply|masked_", "elementwise"),
    (r"relu|gelu|silu|swiglu|rope_|rotary|(lstm|gru)_cell|quantize|axpy|amp_", "elementwise"),
    (r"op_?(generic_)?tensor|^triton_(fused_|_\d)", "elementwise"),
)
"""Families by the names of GPU kernels without a known operator; the first match decides.

Names that older versions of torch.compile gave, such as ``triton__0d1d2d``, do not say what the
kernel does and count as elementwise.
"""


class Ran(NamedTuple):
    """A kernel that ran, or an operator of the CPU."""

    name: str
    op: str | None
    op_kind: OpKind
    phase: Phase | None
    start_s: float
    end_s: float
    launched_s: float  # when the host launched it
    bytes: int


class _Caller(NamedTuple):
    """The operator, family and scope that were active on the host."""

    op: str | None = None
    """The operator that does the work; if there is none, the innermost active operator."""

    family: OpFamily | None = None
    scope: Scope | None = None


class Phases:
    """The phases of a trace by time."""

    def __init__(self, host: Iterable[Span]) -> None:
        spans = sorted((span for span in host if span.name.startswith(PHASE)), key=_start)
        self._spans = [span for span in spans if span.name.removeprefix(PHASE) in PHASES]
        self._starts = [span.start_s for span in self._spans]

    def at(self, instant_s: float) -> Phase | None:
        """Return the phase of an instant; None between phases."""
        position = bisect_right(self._starts, instant_s) - 1
        if position < 0 or instant_s > self._spans[position].end_s:
            return None
        phase: Phase = self._spans[position].name.removeprefix(PHASE)  # type: ignore[assignment]
        return phase


def _start(span: Span) -> tuple[float, float]:
    """Return a sort key: earlier start first, then longer duration."""
    return span.start_s, -span.end_s


def attribute(trace: Trace, *, on_cuda: bool) -> list[Ran]:
    """Return what ran, with its op kind, in order of start.

    These are the kernels of a GPU with ``on_cuda``, of which the tracer may have recorded none;
    else operators of the CPU.
    """
    phases = Phases(trace.host)
    launches: dict[int | None, tuple[_Caller, float]] = {}
    operators: list[Ran] = []
    by_thread: dict[Any, list[Span]] = defaultdict(list)
    for span in (*trace.host, *trace.calls):
        by_thread[span.thread].append(span)
    for spans in by_thread.values():
        for span, caller, begins in _walk(sorted(spans, key=_start)):
            if span.correlation is not None:
                launches[span.correlation] = caller, span.start_s
            elif begins:
                operators.append(_settle(span, caller, span.start_s, phases))
    kernels = []
    for span in trace.device:
        caller, launched_s = launches.get(span.correlation, (_Caller(), span.start_s))
        kernels.append(_settle(span, caller, launched_s, phases))
    return sorted(kernels if on_cuda else operators, key=lambda ran: ran.start_s)


def _walk(spans: Iterable[Span]) -> Iterator[tuple[Span, _Caller, bool]]:
    """Yield each span of a thread, the active operator, and whether the span is its work."""
    stack: list[tuple[float, _Caller]] = []
    for span in spans:
        while stack and stack[-1][0] <= span.start_s:
            stack.pop()
        caller = stack[-1][1] if stack else _Caller()
        begins = False
        if span.name == NORMS:
            caller = caller._replace(scope="norm")
        elif span.name in _EINSUMS and caller.scope is None:
            caller = caller._replace(scope="einsum")
        elif caller.family is None and _OPERATOR.fullmatch(span.name):
            caller = caller._replace(op=span.name, family=family_of(span.name))
            begins = caller.family is not None
        stack.append((span.end_s, caller))
        yield span, caller, begins


def _settle(span: Span, caller: _Caller, launched_s: float, phases: Phases) -> Ran:
    phase = phases.at(launched_s)
    family = caller.family or "other"
    if family == "other" and span.name != caller.op:
        family = family_by_kernel(span.name)
    return Ran(
        name=span.name,
        op=caller.op,
        op_kind=kind_of_op(family, phase, caller.scope),
        phase=phase,
        start_s=span.start_s,
        end_s=span.end_s,
        launched_s=launched_s,
        bytes=span.bytes,
    )


def family_by_kernel(name: str) -> OpFamily:
    """Return a kernel's family, guessed from its name."""
    for pattern, family in _BY_KERNEL:
        if re.search(pattern, name, re.IGNORECASE):
            return family
    return "other"
