"""What a private ``Trainer`` logs: what was spent, and of samples only what is asked for."""

import inspect
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dpprof.private.accounting.budget import Spent
from dpprof.private.loop.trainer_base import PrivateBase
from dpprof.private.substitutes import substitute

_QUANTILES = (0.1, 0.5, 0.9)

_PUBLIC_LOGS = {
    "step",
    "learning_rate",
    "epoch",
    "epsilon",
    "noise_multiplier",
}  # follow from no sample


class PrivateLogs(PrivateBase):
    """The part of a private ``Trainer`` that logs."""

    spent: Spent
    _evaluated: str | None = None  # how the names of an evaluation begin, while there is one
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
        bound = inspect.signature(super().evaluate).bind(*inputs, **named).arguments
        with substitute(self, "_evaluated", bound.get("metric_key_prefix", "eval")):
            return super().evaluate(*inputs, **named)

    def log(self, logs: dict[str, float], *inputs: Any, **named: Any) -> None:
        """Log what was spent."""
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
        super().log(logs, *inputs, **named)

    @contextmanager
    def _logging_quietly(self) -> Iterator[None]:
        """Without ``log_private`` let nothing private reach logs inside the context.

        It is left out where logs leave a trainer, after whatever a subclass adds to them.
        """
        handler: Any = self.callback_handler
        on_log = handler.on_log

        def log(args: Any, state: Any, control: Any, logs: dict[str, Any]) -> Any:
            for told in (logs, *state.log_history[-1:]):
                self._leave_out_private(told)
            return on_log(args, state, control, logs)

        is_quiet = not self.privacy.log_private
        with substitute(handler, "on_log", log) if is_quiet else nullcontext():
            yield

    def _leave_out_private(self, logs: dict[str, Any]) -> None:
        for name in logs.keys() - _PUBLIC_LOGS:
            if self._evaluated is None or not name.startswith(f"{self._evaluated}_"):
                del logs[name]

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
