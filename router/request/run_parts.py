"""What all requests of a router share."""

from __future__ import annotations

import random
from dataclasses import dataclass

from baton.clock import Clock
from baton.config.router import RouterConfig
from baton.errors import NotResumableError
from router.fleet.fleet import Fleet
from router.fleet.fleet_links import FleetLinks
from router.placement.admission import Admission
from router.placement.fairness import FairLine, RetryBudget
from router.report.figures import Counts, PoolFigures, RequestFigures
from router.report.metrics import RouterMetrics
from router.report.recent import RecentTraffic
from router.report.traces import Trace
from router.text import TextModel


def not_resumable() -> NotResumableError:
    return NotResumableError(
        "the model that the request's tokens come from is not served any more;"
        " ask again under a new id"
    )


@dataclass(frozen=True)
class ServedModel:
    """The model that a router serves for its life, with its tokenizer."""

    name: str
    """What answers call it."""
    text: TextModel
    fingerprint: bytes = b""
    """It covers weights and configuration. Empty: the worker that sent its tokenizer has none."""
    code: str = ""
    """The code of the unit that serves it."""

    @property
    def unit(self) -> str:
        """Return the unit as Routed names it; empty: the fingerprint is not known."""
        return f"{self.code}/{self.fingerprint.hex()[:16]}" if self.fingerprint else ""


@dataclass(frozen=True)
class RunParts:
    config: RouterConfig
    model: ServedModel
    fleet: Fleet
    links: FleetLinks
    admission: Admission
    searching: FairLine
    """The line of requests that are looked for at the decode workers."""
    retries: RetryBudget
    metrics: RouterMetrics
    trace: Trace
    counts: Counts
    request_figures: RequestFigures
    pool_figures: PoolFigures
    recent: RecentTraffic
    clock: Clock
    rng: random.Random
