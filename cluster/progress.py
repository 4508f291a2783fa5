"""A worker's progress, judged alike by itself and by the registry."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.workers import RegistryConfig


@dataclass(frozen=True)
class Progress:
    """What a heartbeat reports about the engine."""

    runnable: bool
    """Whether a step is running, or there is work for one."""
    idle_s: float
    """Seconds since the last step ended."""
    predicted_step_s: float | None
    """Predicted time of the running step; None: the worker never did such work, or so much."""

    def is_stuck(self, config: RegistryConfig) -> bool:
        """Whether the running step has exceeded its limit."""
        if not self.runnable:
            return False
        if self.predicted_step_s is None:
            return self.idle_s >= config.first_step_s
        patience_s = max(config.stuck_after_s, config.stuck_factor * self.predicted_step_s)
        return self.idle_s >= patience_s
