"""Per-sample gradients of the scale of a normalisation: one vector a sample.

They are small, so they are made; what would be large on the way, normalised inputs for all
tokens, is made for a few rows at a time.

Shape legend: B samples, T tokens, d width.
"""

from torch import Tensor

from dpprof.norms.tiles import WORKSPACE_BYTES, accumulator_of, spans


def scale_gradients(
    x_BTd: Tensor, g_BTd: Tensor, mean_BT1: Tensor | None, rstd_BT1: Tensor
) -> Tensor:
    """Sum ``g * (x - mean) * rstd`` over tokens.

    Args:
        x_BTd: Input of the normalisation.
        g_BTd: Gradient of its output.
        mean_BT1: What was subtracted, None for nothing.
        rstd_BT1: What was multiplied by.

    Returns:
        (B, d) in float32, or float64 for float64.
    """
    B, T, d = x_BTd.shape
    accumulator = accumulator_of(x_BTd.dtype)
    rows = max(1, WORKSPACE_BYTES // (4 * accumulator.itemsize * d))
    sums_Bd = x_BTd.new_zeros((B, d), dtype=accumulator)
    for some in spans(B, max(1, rows // max(T, 1))):
        for tokens in spans(T, rows):
            part = x_BTd[some, tokens].to(accumulator)
            part = (
                part * rstd_BT1[some, tokens]
                if mean_BT1 is None
                else ((part - mean_BT1[some, tokens]).mul_(rstd_BT1[some, tokens]))
            )
            sums_Bd[some] += part.mul_(g_BTd[some, tokens]).sum(1)
    return sums_Bd
