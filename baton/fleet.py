"""What every part of a cluster calls a worker's role and state. Standard library only."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What the workers of a pool can do."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    """Prefill and decode."""


class WorkerState(StrEnum):
    """A worker's state, as the registry tells it (`cluster.registry.registry`)."""

    STARTING = "starting"
    """It has registered, and no heartbeat has come yet."""
    LIVE = "live"
    SUSPECT = "suspect"
    """It is silent or stuck: it gets nothing new."""
    DRAINING = "draining"
    GONE = "gone"
    UNLISTED = "unlisted"
    """In a router: the registry no longer names it, perhaps after a restart."""
