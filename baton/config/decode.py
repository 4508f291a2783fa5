"""The decode role's settings. Standard library only: `baton.config.cluster` composes them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeConfig:
    """How long a decode worker waits, and how long it keeps output that nobody asks for. All times
    are in seconds."""

    orphan_ttl_s: float = 30.0
    """How long a request runs on, or its output is kept, after its router is gone."""
    finished_ttl_s: float = 30.0
    """How long an ended request is remembered."""
    max_finished: int = 4096
    """Ended requests remembered at most, and as many attempts that ended without output."""
    max_finished_bytes: int = 256 << 20
    """The same in bytes of their prompts and outputs."""
    no_capacity_retry_s: float = 0.1
    """When a router that met a full worker is to come back."""
    max_lease_s: float = 600.0
    """Longest life of a lease for a request without a deadline."""
    open_timeout_s: float = 10.0
    """A session whose first message has not come by then is ended."""

    def __post_init__(self) -> None:
        if self.max_finished < 1:
            raise ValueError(f"max_finished must be at least 1, not {self.max_finished}")
        if self.max_finished_bytes < 0:
            raise ValueError(
                f"max_finished_bytes must not be negative, not {self.max_finished_bytes}"
            )
        for name in ("orphan_ttl_s", "finished_ttl_s", "no_capacity_retry_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative, and finite")
        for name in ("max_lease_s", "open_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {getattr(self, name)}")
