"""Exact per-sample clipping of any model's gradient, without per-sample gradients.

``BookKeeping`` and ``FlashClipping`` clip the gradient of each sample to one bound, in one
backward pass and in two; ``PerLayerClipping`` clips each layer to a bound of its own.
``make_private`` makes a whole training loop private in one call. ``NoisyOptimizer`` adds the noise,
and ``CapturedStep`` runs whole steps as CUDA graphs.
"""

from typing import TYPE_CHECKING

from dpprof.system.imports import import_at_first_use

if TYPE_CHECKING:
    from dpprof.clipping.book_keeping import BookKeeping as BookKeeping
    from dpprof.clipping.captured_step import CapturedStep as CapturedStep
    from dpprof.clipping.causal_lm import causal_lm_losses as causal_lm_losses
    from dpprof.clipping.engine import Clipping as Clipping
    from dpprof.clipping.head import linear_cross_entropy as linear_cross_entropy
    from dpprof.clipping.optimizer import NoisyOptimizer as NoisyOptimizer
    from dpprof.clipping.per_layer import PerLayerClipping as PerLayerClipping
    from dpprof.clipping.private_trainer import PrivacyArguments as PrivacyArguments
    from dpprof.clipping.private_trainer import PrivateTrainer as PrivateTrainer
    from dpprof.clipping.private_training import PrivateTraining as PrivateTraining
    from dpprof.clipping.private_training import make_private as make_private
    from dpprof.clipping.public_norms import suggest_max_grad_norm as suggest_max_grad_norm
    from dpprof.clipping.public_numbers import numbers_of_opacus as numbers_of_opacus
    from dpprof.clipping.two_pass import FlashClipping as FlashClipping
    from dpprof.spec.registry import UnsupportedError as UnsupportedError

_MODULES = {
    "BookKeeping": "dpprof.clipping.book_keeping",
    "CapturedStep": "dpprof.clipping.captured_step",
    "Clipping": "dpprof.clipping.engine",
    "FlashClipping": "dpprof.clipping.two_pass",
    "NoisyOptimizer": "dpprof.clipping.optimizer",
    "PerLayerClipping": "dpprof.clipping.per_layer",
    "PrivacyArguments": "dpprof.clipping.private_trainer",
    "PrivateTrainer": "dpprof.clipping.private_trainer",
    "PrivateTraining": "dpprof.clipping.private_training",
    "make_private": "dpprof.clipping.private_training",
    "numbers_of_opacus": "dpprof.clipping.public_numbers",
    "suggest_max_grad_norm": "dpprof.clipping.public_norms",
    "causal_lm_losses": "dpprof.clipping.causal_lm",
    "linear_cross_entropy": "dpprof.clipping.head",
    "UnsupportedError": "dpprof.spec.registry",
}
__all__ = list(_MODULES)
__getattr__ = import_at_first_use(__name__, _MODULES)
