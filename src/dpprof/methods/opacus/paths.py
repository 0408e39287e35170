"""Opacus's ways to a layer's per-sample gradients or norms; it imports nothing of Opacus."""

from dpprof.norms.code_paths import CodePath


class OpacusPath(CodePath):
    """A code path of Opacus, or of what it relies on."""

    GRAD_SAMPLER = "grad sampler", "gradients"
    """Opacus's rule for a type of layer."""

    NORM_SAMPLER = "norm sampler", "norms"
    """Its rule of ghost clipping, which makes no gradients."""

    FUNCTORCH = "functorch", "gradients"
    """``torch.func``, for layers without a rule."""

    EXPANDED_WEIGHTS = "expanded weights", "gradients"
    """PyTorch's, of ``torch.nn.utils``."""
