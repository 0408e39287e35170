"""Exact per-sample clipping of any model's gradient, without per-sample gradients.

``BookKeeping`` and ``FlashClipping`` clip the gradient of each sample to one bound, in one
backward pass and in two; ``PerLayerClipping`` clips each layer to a bound of its own.
``make_private`` makes a whole training loop private in one call. ``NoisyOptimizer`` adds the noise,
and ``CapturedStep`` runs whole steps as CUDA graphs. ``check`` says whether a user's own loop is
private as it says.
"""

from typing import TYPE_CHECKING

from dpprof.private.lazy_imports import import_at_first_use

if TYPE_CHECKING:
    from dpprof.private.capture.captured_step import CapturedStep as CapturedStep
    from dpprof.private.checks.audit import Audited as Audited
    from dpprof.private.checks.audit import audit as audit
    from dpprof.private.checks.check import check as check
    from dpprof.private.checks.comparison import Checked as Checked
    from dpprof.private.checks.learning_monitor import LearningMonitor as LearningMonitor
    from dpprof.private.checks.settings import Mechanism as Mechanism
    from dpprof.private.engine.book_keeping import BookKeeping as BookKeeping
    from dpprof.private.engine.engine import Clipping as Clipping
    from dpprof.private.engine.flash_clipping import FlashClipping as FlashClipping
    from dpprof.private.engine.per_layer import PerLayerClipping as PerLayerClipping
    from dpprof.private.errors import UnsupportedError as UnsupportedError
    from dpprof.private.layers.causal_lm import causal_lm_losses as causal_lm_losses
    from dpprof.private.layers.linear_cross_entropy import (
        linear_cross_entropy as linear_cross_entropy,
    )
    from dpprof.private.loop.private_trainer import PrivacyArguments as PrivacyArguments
    from dpprof.private.loop.private_trainer import PrivateTrainer as PrivateTrainer
    from dpprof.private.loop.private_training import PrivateTraining as PrivateTraining
    from dpprof.private.loop.private_training import make_private as make_private
    from dpprof.private.loop.public_norms import suggest_max_grad_norm as suggest_max_grad_norm
    from dpprof.private.loop.public_numbers import numbers_of_opacus as numbers_of_opacus
    from dpprof.private.noise.optimizer import NoisyOptimizer as NoisyOptimizer
    from dpprof.private.noise.strategies import find_errors as find_errors
    from dpprof.private.noise.strategies import make_strategy as make_strategy
    from dpprof.private.samples.company import WrongTrainingError as WrongTrainingError
    from dpprof.private.samples.users import Segments as Segments

_MODULES = {
    "Audited": "dpprof.private.checks.audit",
    "Checked": "dpprof.private.checks.comparison",
    "LearningMonitor": "dpprof.private.checks.learning_monitor",
    "Mechanism": "dpprof.private.checks.settings",
    "Segments": "dpprof.private.samples.users",
    "WrongTrainingError": "dpprof.private.samples.company",
    "audit": "dpprof.private.checks.audit",
    "check": "dpprof.private.checks.check",
    "BookKeeping": "dpprof.private.engine.book_keeping",
    "CapturedStep": "dpprof.private.capture.captured_step",
    "Clipping": "dpprof.private.engine.engine",
    "FlashClipping": "dpprof.private.engine.flash_clipping",
    "NoisyOptimizer": "dpprof.private.noise.optimizer",
    "find_errors": "dpprof.private.noise.strategies",
    "make_strategy": "dpprof.private.noise.strategies",
    "PerLayerClipping": "dpprof.private.engine.per_layer",
    "PrivacyArguments": "dpprof.private.loop.private_trainer",
    "PrivateTrainer": "dpprof.private.loop.private_trainer",
    "PrivateTraining": "dpprof.private.loop.private_training",
    "make_private": "dpprof.private.loop.private_training",
    "numbers_of_opacus": "dpprof.private.loop.public_numbers",
    "suggest_max_grad_norm": "dpprof.private.loop.public_norms",
    "causal_lm_losses": "dpprof.private.layers.causal_lm",
    "linear_cross_entropy": "dpprof.private.layers.linear_cross_entropy",
    "UnsupportedError": "dpprof.private.errors",
}
__all__ = list(_MODULES)
__getattr__ = import_at_first_use(__name__, _MODULES)
