"""What a private ``Trainer`` logs: what was spent, and of samples only what is asked for."""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpprof.private.accounting.budget import Spent
from dpprof.private.loop.trainer_base import PrivateBase

_QUANTILES = (0.1, 0.5, 0.9)

_PUBLIC_LOGS = {"learning_rate", "epoch", "epsilon", "noise_multiplier"}  # follow from no sample


class PrivateLogs(PrivateBase):
    """The part of a private ``Trainer`` that logs."""

    spent: Spent
    _is_evaluating = False
    _told_at = _telling_took_s = 0.0  # when epsilon was logged, and what that took
    _flops_of_token: int | None = None
    _norms: list[Tensor]  # of the samples of steps, until they are logged

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Multiply those of one token by the tokens of all parts; 0 without ``log_private``."""
        if not self.privacy.log_private:
            return 0
        main = getattr(self.model, "main_input_name", "input_ids")
        if self._flops_of_token is None:
            token = {main: torch.empty(1, device="meta")}
            self._flops_of_token = int(super().floating_point_ops(token))
        parts = [part for part, _ in inputs["parts"] if isinstance(part, Mapping)]
        tokens: int = sum(part[main].numel() for part in parts if main in part)
        return self._flops_of_token * tokens

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        for part, _ in inputs["parts"]:
            super()._track_num_input_tokens(part)

    def evaluate(self, *inputs: Any, **named: Any) -> Any:
        """Evaluate as ``Trainer`` does: what follows from these samples is logged."""
        self._is_evaluating = True
        try:
            return super().evaluate(*inputs, **named)
        finally:
            self._is_evaluating = False

    def log(self, logs: dict[str, float], *inputs: Any, **named: Any) -> None:
        """Log what was spent; in training without ``log_private`` leave out all that is private."""
        if "loss" in logs:
            logs |= self._describe_norms()
            logs["noise_multiplier"] = self.private_optimizer.noise_multiplier
            if self._epsilon_is_due():
                start = time.monotonic()
                epsilon = self.spent.epsilon()
                up = math.ceil(epsilon * 1e4) / 1e4 if math.isfinite(epsilon) else epsilon
                logs["epsilon"] = up
                self._told_at = time.monotonic()
                self._telling_took_s = self._told_at - start
        if self.is_in_train and not (self._is_evaluating or self.privacy.log_private):
            for name in logs.keys() - _PUBLIC_LOGS:  # also from the metrics that train returns
                del logs[name]
        super().log(logs, *inputs, **named)

    def _epsilon_is_due(self) -> bool:
        """Tell whether to compute epsilon: at the end, and before as long as that costs 1 %."""
        if self.privacy.delta is None or not self.spent.history:
            return False
        is_last = self.state.global_step >= self.state.max_steps
        return is_last or time.monotonic() - self._told_at >= 100 * self._telling_took_s

    def _describe_norms(self) -> dict[str, float]:
        if not self._norms:
            return {}
        norms = torch.cat([norms_B.float().cpu() for norms_B in self._norms])
        self._norms.clear()
        finite = norms[norms.isfinite()]
        if not len(finite):
            return {}
        quantiles = torch.quantile(finite, finite.new_tensor(_QUANTILES)).tolist()
        names = (f"sample_norm_{round(100 * share)}%" for share in _QUANTILES)
        described = dict(zip(names, quantiles, strict=True))
        if self.privacy.clipping == "flat":  # normalised clipping scales every sample
            described["clipped_share"] = float((finite > self.privacy.max_grad_norm).float().mean())
        return described
