"""What a request brings along, and what all requests of a router share."""

from __future__ import annotations

import random
from dataclasses import dataclass
from urllib.parse import quote, unquote

from baton.clock import Clock
from baton.config.router import RouterConfig
from baton.errors import NotResumableError
from router.fleet.fleet import Fleet
from router.fleet.fleet_links import FleetLinks
from router.placement.admission import Admission
from router.placement.fairness import FairLine, RetryBudget
from router.report.figures import Counts, PoolFigures, RequestFigures
from router.report.metrics import RouterMetrics
from router.report.recent import Recent
from router.report.stages import Trace
from router.request.validate import ParsedRequest
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
    """Of weights and configuration. Empty: the worker that sent its tokenizer has none."""
    code: str = ""
    """Of the unit that serves it."""
    names: tuple[str, ...] = ()
    """That clients may call it, `name` among them; empty: that alone."""

    @property
    def unit(self) -> str:
        """As Routed names it; empty: the fingerprint is not known."""
        return f"{self.code}/{self.fingerprint.hex()[:16]}" if self.fingerprint else ""


@dataclass(frozen=True)
class RunParts:
    config: RouterConfig
    model: ServedModel
    fleet: Fleet
    links: FleetLinks
    admission: Admission
    searching: FairLine
    """Of requests that are looked for at the decode workers."""
    retries: RetryBudget
    metrics: RouterMetrics
    trace: Trace
    counts: Counts
    request_figures: RequestFigures
    pool_figures: PoolFigures
    recent: Recent
    clock: Clock
    rng: random.Random


@dataclass(frozen=True)
class Sought:
    """A request that a decode worker may keep: what the worker knows it by."""

    tenant: str
    request_id: str
    body_digest: bytes
    seed: int | None
    resume_from_index: int

    @property
    def wire_id(self) -> str:
        return wire_id(self.tenant, self.request_id)


@dataclass(frozen=True)
class Arrival:
    """A request as the service took it in."""

    request_id: str  # the client's, or drawn
    parsed: ParsedRequest
    traceparent: str
    arrived_s: float
    tokenize_s: float

    @property
    def key(self) -> tuple[str, str]:
        """(tenant, request id): what a request is known by in a router."""
        return (self.parsed.tenant, self.request_id)

    @property
    def chose_id(self) -> bool:
        """The client named the request, so it may come back for it."""
        return bool(self.parsed.request_id)

    @property
    def wire_id(self) -> str:
        return wire_id(self.parsed.tenant, self.request_id)

    @property
    def sought(self) -> Sought:
        parsed = self.parsed
        index = parsed.resume_from_index or 0
        return Sought(parsed.tenant, self.request_id, parsed.body_digest, parsed.seed, index)


def wire_id(tenant: str, request_id: str) -> str:
    """The id workers know a request by: one tenant's ids never meet another's."""
    own = quote(request_id, safe="")
    return f"{quote(tenant, safe='')}/{own}" if tenant else own


def key_of(named: str) -> tuple[str, str]:
    """Tenant and request id of a `wire_id`."""
    tenant, _, own = named.rpartition("/")
    return unquote(tenant), unquote(own)
