"""Opacus's ghost clipping: norms without per-sample gradients.

Source of the norm trick: Li et al. 2022, "Large Language Models Can Be Strong
Differentially Private Learners", section 4. Cost per linear layer of d x p:
10 B T d p + 2 B T^2 (d + p) FLOPs, and 2 B T^2 p more for a bias. Memory: two T x T matrices per
sample while a layer's norms are computed.
"""

from dpprof.methods.opacus.two_pass import OpacusTwoPass


class OpacusGhost(OpacusTwoPass):
    """``grad_sample_mode="ghost"``; only linear layers and embeddings need no gradients."""

    use_ghost_clipping = True
