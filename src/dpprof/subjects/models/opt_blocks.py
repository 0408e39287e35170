"""OPT's blocks, with samples and tokens in axes of their own.

Per-sample gradients need the first axis of every layer's input to be the batch. OPT's blocks give
their MLP and its norm all tokens of all samples in one axis; nothing in that axis says which row
belongs to which sample. And OPT's lookup of positions is called with the mask and a number in
addition to the ids, to which it adds 2. Both are replaced.

Shape legend: B batch, T tokens, D width.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers.models.opt.modeling_opt import OPTDecoderLayer, OPTLearnedPositionalEmbedding


class _BatchFirstOPTBlock(OPTDecoderLayer):  # type: ignore[misc]
    """OPT's block, with samples and tokens in axes of their own throughout."""

    def forward(self, hidden_states: Tensor, use_cache: bool = False, **others: Any) -> Tensor:
        """Apply the block; (B, T, D) to (B, T, D)."""
        del use_cache  # of generation

        def attend(x_BTD: Tensor) -> Any:
            return self.self_attn(hidden_states=x_BTD, **others)[0]

        def run_mlp(x_BTD: Tensor) -> Any:
            return self.fc2(self.activation_fn(self.fc1(x_BTD)))

        x_BTD = self._add(hidden_states, self.self_attn_layer_norm, attend)
        return self._add(x_BTD, self.final_layer_norm, run_mlp)

    def _add(self, x_BTD: Tensor, norm: nn.Module, part: Callable[[Tensor], Any]) -> Tensor:
        """Add a part to the residual stream; the norm is before the part, or after the sum."""
        y_BTD = part(norm(x_BTD) if self.do_layer_norm_before else x_BTD)
        x_BTD = x_BTD + functional.dropout(y_BTD, p=self.dropout, training=self.training)
        return x_BTD if self.do_layer_norm_before else norm(x_BTD)


def keep_batch_first(model: nn.Module) -> None:
    """Let the blocks of a model that join samples and tokens keep them apart; values are equal."""
    for layer in model.modules():
        if type(layer) is OPTDecoderLayer:
            layer.__class__ = _BatchFirstOPTBlock
        elif type(layer) is OPTLearnedPositionalEmbedding:
            layer.__class__ = nn.Embedding
            layer.register_forward_pre_hook(_look_up_positions, with_kwargs=True)


def _look_up_positions(
    layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the lookup of positions its ids alone; a copy that Opacus runs gets them at once."""
    if "position_ids" not in named:
        return args, named
    return (named["position_ids"] + layer.offset,), {}
