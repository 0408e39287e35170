"""The rule of ``nn.MultiheadAttention``.

Its projections are one autograd function, so that all of its parameters' contributions come
together; what follows has no parameters, and autograd differentiates it. The projection of the
output is a layer of its own, with a rule of its own, and always gets (T, B, E).

Shape legend: B samples, T tokens of queries, S tokens of keys, H heads, k width of a head, E width
of all heads.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpprof.private.contributions.contributions import Contribution, Product, Receive
from dpprof.private.contributions.sample_gradients import SampleGradients, Shift
from dpprof.private.errors import UnsupportedError
from dpprof.private.layers.layers import apply, autocast_dtype, cast_weight


class _Parameters(NamedTuple):
    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    @property
    def projecting(self) -> list[nn.Parameter]:
        """The weight that projects all inputs, or those that project one each."""
        return [weight for weight in self[:4] if weight is not None]

    @property
    def joining(self) -> list[nn.Parameter]:
        """The biases that join keys and values, (1, 1, E) each."""
        return [bias for bias in self[5:] if bias is not None]

    def weights_for(self, count: int) -> Sequence[Tensor]:
        """Return what projects each of one, two or three inputs."""
        if self.in_proj_weight is None:
            return self.projecting
        E = self.in_proj_weight.shape[1]
        rows = {1: [3 * E], 2: [E, 2 * E], 3: [E, E, E]}[count]
        return torch.split(self.in_proj_weight, rows)


class _Projections(torch.autograd.Function):
    """The projections of queries, keys and values (equal ones in one product), joined to biases."""

    @staticmethod
    def forward(ctx: Any, own: _Parameters, receive: Receive, count: int, *tensors: Tensor) -> Any:
        inputs = tensors[:count]
        ctx.save_for_backward(*inputs)
        ctx.own, ctx.receive, ctx.clipped = own, receive, tensors[count:]
        weights = own.weights_for(count)
        biases: list[Tensor | None] = [None] * count
        if own.in_proj_bias is not None:
            biases[:] = torch.split(own.in_proj_bias, [len(weight) for weight in weights])
        projected = [
            functional.linear(x, cast_weight(weight, x), None if bias is None else bias.to(x.dtype))
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        ]
        x = inputs[0]
        return *projected, *(bias.repeat(len(x), 1, 1).to(x.dtype) for bias in own.joining)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        own: _Parameters = ctx.own
        xs = [x.detach() for x in ctx.saved_tensors]
        count = len(xs)
        projected, joined = gradients[:count], gradients[count:]
        needed = ctx.needs_input_grad[3 : 3 + count]
        of_inputs = [
            g @ weight.to(g.dtype) if needs else None
            for g, weight, needs in zip(projected, own.weights_for(count), needed, strict=True)
        ]
        if own.in_proj_weight is not None and count > 1:  # one product, with zeros elsewhere
            xs, projected = [torch.cat(xs, 1)], (_join_diagonally(projected),)
        products = map(Product, xs, projected)
        contributions: list[tuple[nn.Parameter, Contribution]] = [
            *zip(own.projecting, products, strict=True)
        ]
        if own.in_proj_bias is not None:
            if len(projected) == 1:
                contributions.append((own.in_proj_bias, Shift(projected[0])))
            else:
                sums = [Shift(g).materialise(g) for g in projected]
                contributions.append((own.in_proj_bias, SampleGradients(torch.cat(sums, 1))))
        for parameter, g in zip(own.joining, joined, strict=True):
            contributions.append((parameter, SampleGradients(g[:, None])))
        ctx.receive([(p, part) for p, part in contributions if p.requires_grad])
        return None, None, None, *of_inputs, *[None] * len(ctx.clipped)


def _join_diagonally(parts: tuple[Tensor, ...]) -> Tensor:
    """Join (B, T, p) each to (B, sum of T, sum of p), with zeros elsewhere."""
    B, T, p = len(parts[0]), sum(g.shape[1] for g in parts), sum(g.shape[2] for g in parts)
    joined = parts[0].new_zeros(B, T, p)
    t = column = 0
    for g in parts:
        joined[:, t : t + g.shape[1], column : column + g.shape[2]] = g
        t, column = t + g.shape[1], column + g.shape[2]
    return joined


def refuse_other_projection(layer: nn.Module) -> None:
    """Refuse attention whose output no linear layer projects (``UnsupportedError``)."""
    projection = layer.get_submodule("out_proj")
    if type(projection).forward is not nn.Linear.forward:
        raise UnsupportedError(
            f"{type(layer).__name__} uses the weight of its out_proj alone, and that is a "
            f"{type(projection).__name__}, which may compute something else; use a Linear"
        )


def run_attention(  # noqa: PLR0917 (as torch's)
    layer: nn.MultiheadAttention,
    receive: Receive,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run multi-head attention of tensors that are not nested; the arguments are torch's."""
    q, k, v = _project(layer, receive, query, key, value)
    mask = _join_masks(layer, attn_mask, key_padding_mask, q, k)
    if is_causal and attn_mask is None:
        raise ValueError("is_causal needs attn_mask, as torch's attention does")
    is_causal = is_causal and not need_weights and key_padding_mask is None
    if layer.add_zero_attn:
        k, v = (functional.pad(part, (0, 0, 0, 1)) for part in (k, v))
    q_BHTk, k_BHSk, v_BHSk = (
        part.view(*part.shape[:2], layer.num_heads, layer.head_dim).transpose(1, 2)
        for part in (q, k, v)
    )
    dropout = layer.dropout if layer.training else 0.0
    if need_weights:
        scores_BHTS = q_BHTk * q_BHTk.shape[3] ** -0.5 @ k_BHSk.transpose(2, 3)
        weights_BHTS = (scores_BHTS if mask is None else scores_BHTS + mask).softmax(3)
        weights_BHTS = functional.dropout(weights_BHTS, dropout)
        y_BHTk = weights_BHTS @ v_BHSk
        weights = weights_BHTS.mean(1) if average_attn_weights else weights_BHTS
    else:
        y_BHTk = functional.scaled_dot_product_attention(
            q_BHTk, k_BHSk, v_BHSk, None if is_causal else mask, dropout, is_causal
        )
        weights = None
    # In PyTorch's order of elements: dropout after this layer draws by it.
    y_TBE = layer.out_proj(y_BHTk.permute(2, 0, 1, 3).flatten(2))
    return (y_TBE.transpose(0, 1) if layer.batch_first else y_TBE), weights


def _project(
    layer: nn.MultiheadAttention, receive: Receive, *inputs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Project queries, keys and values, and append their biases; the batch is first, (B, T, E)."""
    if any(x.is_nested for x in inputs):
        raise UnsupportedError("nested tensors have no per-sample gradients; pass padded ones")
    if any(x.dim() != 3 for x in inputs):  # noqa: PLR2004
        raise ValueError("attention gets no batch; give its inputs three axes")
    query, key, value = inputs
    distinct = list(inputs)
    if layer.in_proj_weight is not None and key is value:
        distinct = [query] if query is key else [query, key]
    dtype = autocast_dtype(query)
    distinct = [
        (x if layer.batch_first else x.transpose(0, 1)).to(x.dtype if dtype is None else dtype)
        for x in distinct
    ]
    count = len(distinct)
    if len({len(x) for x in distinct}) > 1:
        raise ValueError("queries, keys and values of attention are of batches of other lengths")
    own = _Parameters(*(layer._parameters.get(name) for name in _Parameters._fields))  # noqa: SLF001
    used = [parameter for parameter in own if parameter is not None]
    outputs = apply(_Projections, own, receive, count, *distinct, *used)
    q, k, v = (part for y in outputs[:count] for part in y.split(layer.embed_dim, 2))
    if outputs[count:]:
        of_k, of_v = outputs[count:]
        k, v = torch.cat([k, of_k], 1), torch.cat([v, of_v], 1)
    return q, k, v


def _join_masks(
    layer: nn.MultiheadAttention,
    of_pairs: Tensor | None,
    of_keys: Tensor | None,
    q: Tensor,
    k: Tensor,
) -> Tensor | None:
    """Join masks to what is added to scores, (B or 1, H or 1, T or 1, S); None for none."""
    B, T, S = len(q), q.shape[1], k.shape[1] - (layer.bias_k is not None)
    parts = []
    if of_pairs is not None:
        if of_pairs.shape not in ((T, S), (B * layer.num_heads, T, S)):
            raise ValueError(
                f"attn_mask has shape {tuple(of_pairs.shape)}; give it (T, S) or (B H, T, S)"
            )
        is_alike = of_pairs.dim() == 2  # noqa: PLR2004
        parts.append(of_pairs[None, None] if is_alike else of_pairs.view(B, layer.num_heads, T, S))
    if of_keys is not None:
        if of_keys.shape != (B, S):
            raise ValueError(f"key_padding_mask has shape {tuple(of_keys.shape)}; give it (B, S)")
        parts.append(of_keys[:, None, None])
    if not parts:
        return None
    added = [_make_additive(part, q) for part in parts]
    columns = (layer.bias_k is not None) + layer.add_zero_attn
    return functional.pad(sum(added[1:], added[0]), (0, columns))


def _make_additive(mask: Tensor, like: Tensor) -> Tensor:
    """Turn a mask that is true where attention is not allowed into what is added to scores."""
    if mask.is_floating_point():
        return mask.to(like.dtype)
    if mask.dtype is not torch.bool:
        raise ValueError(f"masks of attention are bool or floating point, and one is {mask.dtype}")
    return like.new_zeros(()).masked_fill(mask, -torch.inf)
