"""Rules of recurrent layers: PyTorch's ``RNN``, ``LSTM``, ``GRU`` and cells, and Opacus's layers.

PyTorch's kernels run many steps at once and give no output gradients of their matrices. So the
steps run here one by one, with operators that autograd differentiates, and an offset of zero is
added to what each matrix returns: the offset's gradient is the output gradient. All offsets come
from one autograd function, whose backward runs last, and passes on the contributions of all
parameters together. Formulas: the documentation of ``torch.nn.LSTM``, ``GRU`` and ``RNN``.

Cost: the FLOPs of PyTorch's, in about 15 small operators for each step, layer and direction.

Shape legend: B samples, T steps, d width of an input, h width of the state, p width of all gates.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from dpprof.private.contributions.contributions import Contribution, Product, Receive
from dpprof.private.contributions.sample_gradients import Shift
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.layers import apply, autocast_dtype, refuse_other_numbers

_State = tuple[Tensor, ...]  # hidden state, and the cell state of an LSTM; (B, h) each
_Matrix = tuple[nn.Parameter, nn.Parameter | None]  # a weight, and its bias if there is one

_Drop = Callable[[Tensor], Tensor]
_KEEP = nn.Identity()


def _step_lstm(of_x: Tensor, of_h: Tensor, state: _State) -> _State:
    i, f, g, o = (of_x + of_h).chunk(4, 1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _step_gru(of_x: Tensor, of_h: Tensor, state: _State) -> _State:
    h = state[0].shape[1]
    r, z = (of_x[:, : 2 * h] + of_h[:, : 2 * h]).sigmoid().chunk(2, 1)
    n = (of_x[:, 2 * h :] + r * of_h[:, 2 * h :]).tanh()
    return ((1 - z) * n + z * state[0],)


_STEPS: dict[str, Callable[[Tensor, Tensor, _State], _State]] = {
    "LSTM": _step_lstm,
    "GRU": _step_gru,
    "RNN_TANH": lambda of_x, of_h, _: ((of_x + of_h).tanh(),),
    "RNN_RELU": lambda of_x, of_h, _: ((of_x + of_h).relu(),),
}
"""The step of each mode, by PyTorch's name of it."""


class _Offsets(torch.autograd.Function):
    """Zeros to add to what matrices return, (B, T, p) each.

    ``inputs`` is a list that gets each matrix's inputs, (B, T, d), once it ran; None stands for x
    itself. The first ``states`` tensors are states, so that gradients of states pass here too.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd passes them so)
        ctx: Any,
        x: Tensor,
        matrices: Sequence[_Matrix],
        inputs: list[Tensor | None],
        receive: Receive,
        states: int,
        *tensors: Tensor,
    ) -> Any:
        ctx.save_for_backward(x)
        ctx.matrices, ctx.inputs, ctx.receive = matrices, inputs, receive
        ctx.states, ctx.clipped = states, tensors[states:]
        zero = x.new_zeros(())
        return tuple(zero.expand(*x.shape[:2], len(weight)) for weight, _ in matrices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        contributions: list[tuple[nn.Parameter, Contribution]] = []
        inputs = [x.detach() if x_BTd is None else x_BTd for x_BTd in ctx.inputs]
        for (weight, bias), x_BTd, g_BTp in zip(ctx.matrices, inputs, gradients, strict=True):
            if weight.requires_grad:
                contributions.append((weight, Product(x_BTd, g_BTp)))
            if bias is not None and bias.requires_grad:
                contributions.append((bias, Shift(g_BTp)))
        ctx.receive(contributions)
        return *[None] * 5, *[None] * (ctx.states + len(ctx.clipped))


class _Recurrence:
    """The layers and directions of one recurrent layer that is run once.

    ``suffixes`` tell how the names of the parameters end, of each layer's directions.
    ``drop_outputs`` drops some of what a layer gives the next, ``drop_state`` of what a step does.
    """

    def __init__(
        self,
        layer: nn.Module,
        mode: str,
        suffixes: Sequence[Sequence[str]],
        receive: Receive,
        *,
        drop_outputs: _Drop = _KEEP,
        drop_state: _Drop = _KEEP,
    ) -> None:
        self._step, self._receive = _STEPS[mode], receive
        self._matrices = [[_read_matrices(layer, suffix) for suffix in group] for group in suffixes]
        self._drop_outputs, self._drop_state = drop_outputs, drop_state

    def run(
        self, x: Tensor, states: Sequence[_State], is_step_BT: Tensor | None = None
    ) -> tuple[Tensor, list[_State]]:
        """Run all steps on (B, T, d), from the first states of each layer and direction.

        Only steps in ``is_step_BT`` count. Returns the last layer's hidden states, (B, T, h), and
        the last states.
        """
        matrices = [matrix for group in self._matrices for own in group for matrix in own]
        inputs: list[Tensor | None] = []  # filled below, and read in backward
        refuse_other_numbers(matrices[0][0], x)
        dtype = autocast_dtype(x) or x.dtype
        x, states = x.to(dtype), [tuple(h.to(dtype) for h in state) for state in states]
        tensors = [h for state in states for h in state]
        count = len(tensors)
        tensors += [p for matrix in matrices for p in matrix if p is not None]
        offsets = iter(apply(_Offsets, x, matrices, inputs, self._receive, count, *tensors))
        waiting, last = iter(states), []
        for number, group in enumerate(self._matrices):
            if number:
                x = self._drop_outputs(x)
            outputs = []
            for direction, own in enumerate(group):
                inputs.append(x.detach() if number else None)
                own_offsets = [next(offsets) for _ in own]
                y, state, used = self._run_direction(
                    x, own, own_offsets, next(waiting), is_step_BT, is_reversed=direction == 1
                )
                inputs += used
                outputs.append(y)
                last.append(state)
            x = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
        return x, last

    def _run_direction(
        self,
        x: Tensor,
        matrices: Sequence[_Matrix],
        offsets: Sequence[Tensor],
        state: _State,
        is_step_BT: Tensor | None,
        *,
        is_reversed: bool,
    ) -> tuple[Tensor, _State, list[Tensor]]:
        """Run one direction; return hidden states, the last state, and inputs of its matrices."""
        # Detached: the gradients of matrices are those of the offsets.
        of_inputs, of_state, *projection = (
            (weight.detach().to(x.dtype), None if bias is None else bias.detach().to(x.dtype))
            for weight, bias in matrices
        )
        of_x = (functional.linear(x, *of_inputs) + offsets[0]).unbind(1)
        of_h, *of_projection = (offset.unbind(1) for offset in offsets[1:])
        order = range(x.shape[1])
        before, unprojected, outputs = [], [], []
        for t in reversed(order) if is_reversed else order:
            before.append(state[0].detach())
            h, *c = self._step(of_x[t], functional.linear(state[0], *of_state) + of_h[t], state)
            for matrix, offset in zip(projection, of_projection, strict=True):
                unprojected.append(h.detach())
                h = functional.linear(h, *matrix) + offset[t]
            new = (self._drop_state(h), *c)
            if is_step_BT is not None:
                is_step_B1 = is_step_BT[:, t, None]
                new = tuple(map(torch.where, [is_step_B1] * len(new), new, state))
            state = new
            outputs.append(state[0])
        columns = [outputs, before, *([unprojected] if unprojected else [])]
        y, *used = (torch.stack(steps[::-1] if is_reversed else steps, 1) for steps in columns)
        return y, state, used


def _read_matrices(layer: nn.Module, suffix: str) -> list[_Matrix]:
    """Return the matrices of one direction: of inputs, of states, and of projected states."""
    return [
        (weight, getattr(layer, f"bias_{of}{suffix}", None))
        for of in ("ih", "hh", "hr")
        if (weight := getattr(layer, f"weight_{of}{suffix}", None)) is not None
    ]


def run_cell(
    layer: nn.RNNCellBase,
    receive: Receive,
    input: Tensor,  # noqa: A002 (torch's)
    hx: Tensor | _State | None = None,
) -> Tensor | _State:
    """Run a cell; ``ValueError`` if its input has no batch, or a state has another shape."""
    if input.dim() != 2:  # noqa: PLR2004
        raise ValueError(f"{type(layer).__name__} gets no batch; give its input two axes")
    mode = f"RNN_{layer.nonlinearity}".upper() if isinstance(layer, nn.RNNCell) else "GRU"
    mode = "LSTM" if isinstance(layer, nn.LSTMCell) else mode
    first_states = None if hx is None else tuple(h[None] for h in _as_tuple(hx))
    states = _read_states(first_states, mode, 1, input, [layer.hidden_size] * 2)
    _, [last] = _Recurrence(layer, mode, [[""]], receive).run(input[:, None], states)
    return last if mode == "LSTM" else last[0]


def run_recurrent(
    layer: nn.RNNBase,
    receive: Receive,
    input: Tensor | PackedSequence,  # noqa: A002
    hx: Tensor | _State | None = None,
) -> Any:
    """Run a layer; ``ValueError`` if its input has no batch, or a state has another shape."""
    drop = partial(functional.dropout, p=layer.dropout, training=layer.training)
    return _run(layer, layer.mode, receive, input, hx, drop_outputs=drop)


def run_opacus_recurrent(
    layer: Any,
    receive: Receive,
    input: Tensor | PackedSequence,  # noqa: A002
    state_init: Tensor | _State | None = None,
) -> Any:
    """Run a layer of Opacus's own cells (``UnsupportedError``), with dropout within each step."""
    drop = layer.dropout_layer or _KEEP
    return _run(layer, _mode_of_cells(layer), receive, input, state_init, drop_state=drop)


def _run(
    layer: Any,
    mode: str,
    receive: Receive,
    sequence: Tensor | PackedSequence,
    states: Tensor | _State | None,
    **drops: _Drop,
) -> Any:
    """Run a recurrent layer on a sequence, and return what its ``forward`` would."""
    x, is_step_BT = _read_input(layer, sequence)
    count = layer.num_layers * (1 + layer.bidirectional)
    sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size]
    first = _read_states(states, mode, count, x, sizes)
    directions = ("", "_reverse") if layer.bidirectional else ("",)
    suffixes = [[f"_l{number}{end}" for end in directions] for number in range(layer.num_layers)]
    y, last = _Recurrence(layer, mode, suffixes, receive, **drops).run(x, first, is_step_BT)
    stacked = tuple(torch.stack(states_of_layers) for states_of_layers in zip(*last, strict=True))
    state = stacked if mode == "LSTM" else stacked[0]
    if isinstance(sequence, PackedSequence):  # packed as the input was
        return sequence._replace(data=apply(_Pack, y, _list_places(sequence))), state
    return (y if layer.batch_first else y.transpose(0, 1)), state


def _mode_of_cells(layer: Any) -> str:
    """Return the mode of a layer of Opacus's, which is made of cells."""
    modes = {
        "DPLSTMCell.forward": "LSTM",
        "DPGRUCell.forward": "GRU",
        "DPRNNCell.forward": f"RNN_{layer.cell_params.get('nonlinearity')}".upper(),
    }
    written = layer.cell_type.forward
    mode = modes.get(written.__qualname__)
    if mode not in _STEPS or written.__module__ != "opacus.layers.dp_rnn":
        raise UnsupportedError(
            f"{type(layer).__name__} has no rule for cells of {layer.cell_type.__name__}; use "
            "Opacus's own cells, or freeze its parameters"
        )
    assert mode is not None
    return mode


def _read_input(
    layer: nn.RNNBase, sequence: Tensor | PackedSequence
) -> tuple[Tensor, Tensor | None]:
    """Return an input as (B, T, d) in the order of the batch, and which steps there are; (B, T).

    Of a packed input, a sample's other steps are its first one, so that each is its own.
    """
    if isinstance(sequence, PackedSequence):
        places_R, sizes = _list_places(sequence), sequence.batch_sizes
        B, T = int(sizes[0]), len(sizes)
        rows = places_R.new_full((B * T,), -1)
        rows[places_R] = torch.arange(len(places_R), device=rows.device)
        rows_BT = rows.view(B, T)
        is_step_BT = rows_BT >= 0
        own_BT = torch.where(is_step_BT, rows_BT, rows_BT[:, :1])
        x_BTd = sequence.data.index_select(0, own_BT.flatten()).view(B, T, -1)
        return x_BTd, is_step_BT
    if sequence.dim() != 3:  # noqa: PLR2004
        raise ValueError(f"{type(layer).__name__} gets no batch; give its input three axes")
    return (sequence if layer.batch_first else sequence.transpose(0, 1)), None


def _list_places(sequence: PackedSequence) -> Tensor:
    """Return the place in (B, T), flattened and in the order of the batch, of each row; (R,)."""
    sizes, order = sequence.batch_sizes, sequence.sorted_indices
    is_step_TB = sizes[:, None] > torch.arange(int(sizes[0]))
    times_R, samples_R = is_step_TB.nonzero().to(sequence.data.device).unbind(1)
    samples_R = samples_R if order is None else order[samples_R]
    return samples_R * len(sizes) + times_R


class _Pack(torch.autograd.Function):
    """Put the steps of samples, (B, T, h), into other places, (R, h).

    Not by an index that ``graph`` could read: what pads it again, it cannot.
    """

    @staticmethod
    def forward(ctx: Any, y_BTh: Tensor, places_R: Tensor) -> Tensor:
        ctx.save_for_backward(places_R)
        ctx.sizes = y_BTh.shape
        return y_BTh.flatten(0, 1)[places_R]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (places_R,) = ctx.saved_tensors
        flat = g.new_zeros(ctx.sizes[0] * ctx.sizes[1], ctx.sizes[2]).index_copy(0, places_R, g)
        return flat.view(ctx.sizes), None


def _as_tuple(states: Tensor | _State) -> _State:
    return (states,) if isinstance(states, Tensor) else tuple(states)


def _read_states(
    states: Tensor | _State | None, mode: str, count: int, x: Tensor, sizes: Sequence[int]
) -> list[_State]:
    """Return the first states of each layer and direction; zeros where none are given."""
    kinds = sizes if mode == "LSTM" else sizes[:1]
    shapes = [(count, len(x), size) for size in kinds]
    if states is None:
        states = tuple(x.new_zeros(shape) for shape in shapes)
    tensors = _as_tuple(states)
    own_shapes = [tuple(h.shape) for h in tensors]
    if own_shapes != shapes:
        raise ValueError(
            f"the first states of a recurrent layer have shapes {own_shapes}, and need {shapes}"
        )
    return list(zip(*(h.unbind(0) for h in tensors), strict=True))
