"""What is known of a cluster at one moment: the planner's input.

Figures are of single workers and routers, each with the time it was measured, so that the planner
itself leaves out what is old or was measured on a worker that is still warming up. Times are
seconds of any one clock, the same for all of them. What is not known is None: a figure that is no
finite number (a quantile of nothing, say) is refused with a ValueError that names it.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, fields

from cluster.pools.role_plan import Role, RolePlan


@dataclass(frozen=True)
class _Figures:
    """What somebody measured."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{each.name} must be a finite number, not {value}")


class WorkerPhase(enum.Enum):
    """How far a worker is. The registry's SUSPECT and LIVE are both LIVE here: what a silent worker
    told last grows old by itself. One that is GONE is left out, and so are its figures."""

    STARTING = "starting"
    """It has a machine and loads: capacity to come, nothing to measure."""
    LIVE = "live"
    DRAINING = "draining"
    """It takes nothing new: neither capacity nor load of the pool's others."""


@dataclass(frozen=True)
class WorkerSignals(_Figures):
    """One worker, as `WatchFleet` tells of it (`FleetWorker`)."""

    worker_id: str
    """`FleetWorker.info.ref.worker_id`."""
    phase: WorkerPhase = WorkerPhase.LIVE
    """`FleetWorker.state`."""
    live_since_s: float | None = None
    """When it was first seen LIVE; None: it never was."""
    measured_at_s: float | None = None
    """When the figures below were heard; None: never. The wire tells no time of its own yet."""
    num_streams: int = 0
    """Requests that run or whose KV is on its way: `WorkerLoad.num_running + num_reserved`."""
    max_streams: int = 1
    """`WorkerInfo.max_num_seqs`."""
    kv_use: float = 0.0
    """Share of the KV blocks that requests hold, 0 to 1: `1 - num_free_blocks / num_blocks`."""
    num_queued_tokens: int = 0
    """Prompt tokens that it still has to compute: `WorkerLoad.num_queued_tokens`."""
    prefill_tokens_per_s: float | None = None
    """Its learned rate: `WorkerLoad.prefill_tokens_per_s`; None: it has never prefilled."""
    itl_s: float | None = None
    """What its decode steps take, without the prompts that share them: `WorkerLoad.decode_step_s`,
    learned; None: it has never decoded."""


@dataclass(frozen=True)
class PoolSignals:
    """One pool and its workers."""

    name: str
    role: Role
    """`PoolStatus.role`."""
    desired_replicas: int
    """The one truth about the pool's size now, whoever wrote it: `PoolStatus.desired_replicas`, the
    scale subresource under Kubernetes. Never what the planner asked for last."""
    max_replicas: int
    """From the pool's configuration; like `min_replicas` the pool's desired size where somebody
    else says it: then the planner goes by it, and the other pools neither stop nor start for it."""
    min_replicas: int = 0
    num_pending: int = 0
    """Replicas without a machine yet: `PoolStatus.pending_replicas`, and pods that are Pending."""
    num_failed_starts: int = 0
    """In a row, of the replica that fails most: `PoolStatus.num_failed_starts`."""
    workers: tuple[WorkerSignals, ...] = ()
    role_plan: RolePlan = field(default_factory=RolePlan)
    """The roles in force, of a mixed pool."""


@dataclass(frozen=True)
class QueueSignals(_Figures):
    """Requests of one router that wait for the same thing."""

    num_requests: int = 0
    num_tokens: int = 0
    """Their prompts' tokens that are expected not to be cached."""
    oldest_wait_s: float = 0.0
    median_wait_s: float = 0.0


@dataclass(frozen=True)
class PoolGaps(_Figures):
    """What one router's clients had of late of the streams that a pool decodes: `PoolFigures`."""

    pool: str
    num_gaps: int
    p95_s: float


@dataclass(frozen=True)
class RouterSignals(_Figures):
    """One router, from its metrics. A router that is gone is left out."""

    router_id: str
    measured_at_s: float | None
    """When the figures below were read; None: never, or they are gone with what it told."""
    silent_s: float | None = None
    """For how long it has told nothing, where it did tell of itself before."""
    requests_per_s: float = 0.0
    """Arrivals, also of what waits or is held: never completions, which a full pool caps. Counted
    over some seconds, so that it is 0 when nothing has arrived."""
    uncached_tokens_per_s: float = 0.0
    """Prompt tokens that arrive (`baton_prompt_tokens`), less the share that recent prefills found
    cached (`baton_cached_prompt_tokens`), and the share that decode workers prefill themselves."""
    output_tokens: float | None = None
    """Of a request, mean of those that ended of late (`baton_output_tokens` over `baton_requests`);
    None: none has."""
    num_held: int = 0
    """Requests held because a pool that they need is at zero; they wait below, too."""
    waiting_for_prefill: QueueSignals = QueueSignals()
    """Requests that no prefill worker could start soon enough."""
    waiting_for_decode: QueueSignals = QueueSignals()
    """Requests that no decode worker has room for."""
    gaps: tuple[PoolGaps, ...] = ()
    """Those of one pool come together, each by its number."""


@dataclass(frozen=True)
class Signals:
    """Everything that one decision goes by."""

    now_s: float
    pools: tuple[PoolSignals, ...]
    """In any order; names are distinct."""
    routers: tuple[RouterSignals, ...]
    settles: bool = False
    """Whether workers may have yet to register: `WatchFleetResponse.settles`."""

    @property
    def routers_silent_s(self) -> float | None:
        """For how long no router has told anything; None: none ever did."""
        silent_s = [router.silent_s for router in self.routers]
        silent_s += [
            self.now_s - router.measured_at_s
            for router in self.routers
            if router.measured_at_s is not None
        ]
        return min((each for each in silent_s if each is not None), default=None)
