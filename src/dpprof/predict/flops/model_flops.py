"""Model FLOPs: what the non-private step has to compute for a token, by formula.

6 N + 12 L d T (Chowdhery et al. 2022, "PaLM", appendix B): a weight takes a product forward and
two backward, two FLOPs each, and L layers of attention of width d over T tokens take six products
of 2 d T. A causal mask is not discounted, nor is anything that is computed again.
"""

from torch import nn

from dpprof.subjects.models.quantized import count_elements


def model_flops_per_token(module: nn.Module, *, seq_len: int, layers: int, d_model: int) -> int:
    """Return the FLOPs that a step of a dense transformer needs for each token, forward and back.

    N counts the elements of matrices, shared ones once, without embedding tables. A frozen matrix
    costs 4 and not 6: only its input's gradient is computed. Below the first trained layer that is
    too much, as no gradient is computed there. The formula does not hold for mixtures of
    experts and for convolutions.

    Args:
        module: The model; what requires a gradient must be settled.
        seq_len: Tokens that attend to one another, T.
        layers: Layers with attention, L.
        d_model: Their width, d: heads times the width of a head.
    """
    weights = {
        parameter
        for layer in module.modules()
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        for parameter in layer.parameters(recurse=False)
        if parameter.dim() > 1
    }
    products = sum((6 if p.requires_grad else 4) * count_elements(p) for p in weights)
    return products + 12 * layers * d_model * seq_len
