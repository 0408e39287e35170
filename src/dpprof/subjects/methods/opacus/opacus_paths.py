"""Opacus's code paths to per-sample gradients or norms; this module imports no Opacus."""

from dpprof.private.norms.code_paths import CodePath


class OpacusPath(CodePath):
    """A code path of Opacus, or of PyTorch on its behalf."""

    GRAD_SAMPLER = "grad sampler", "gradients"  # opacus's rule for a type of layer
    NORM_SAMPLER = "norm sampler", "norms"
    """Opacus's rule of ghost clipping for a type of layer, without gradients."""

    FUNCTORCH = "functorch", "gradients"  # ``torch.func``, for layers without a rule
    EXPANDED_WEIGHTS = "expanded weights", "gradients"
    """PyTorch's expanded weights, of ``torch.nn.utils``."""
