"""The state of a cluster at one moment: the planner's input.

Figures belong to single workers and routers and carry the time of their measurement. So the planner
itself can leave out old ones and those of workers that still warm up. All times are seconds of one
clock. Unknown is None.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.fleet import Role, WorkerState
from cluster.role_plan import RolePlan


@dataclass(frozen=True)
class WorkerSignals:
    """One worker, from `WatchFleet`'s `FleetWorker`."""

    worker_id: str
    """`FleetWorker.info.ref.worker_id`."""
    state: WorkerState = WorkerState.LIVE
    """`FleetWorker.state`, but SUSPECT is LIVE here: the figures of a silent worker simply grow
    old. A GONE worker is left out, with its figures."""
    live_since_s: float | None = None
    """When it was first seen LIVE; None: never."""
    measured_at_s: float | None = None
    """When the figures below arrived; None: never. The wire carries no time."""
    num_streams: int = 0
    """Requests that run or whose KV is in transfer: `WorkerLoad.num_running + num_reserved`."""
    max_streams: int = 1
    """`WorkerInfo.max_num_seqs`."""
    kv_use: float = 0.0
    """Share of the KV blocks that requests hold, 0 to 1: `1 - num_free_blocks / num_blocks`."""
    num_queued_tokens: int = 0
    """Prompt tokens that it still has to compute: `WorkerLoad.num_queued_tokens`."""
    prefill_tokens_per_s: float | None = None
    """Its learned rate: `WorkerLoad.prefill_tokens_per_s`; None: it has never prefilled."""
    itl_s: float | None = None
    """Learned time of its decode steps without prompts in them: `WorkerLoad.decode_step_s`; None:
    it has never decoded."""


@dataclass(frozen=True)
class PoolSignals:
    """One pool and its workers."""

    name: str
    role: Role
    """`PoolStatus.role`."""
    desired_replicas: int
    """The pool's size now, whoever set it: `PoolStatus.desired_replicas`, or the scale subresource
    under Kubernetes. Never the planner's own last plan."""
    max_replicas: int
    """From the pool's configuration. If something else sets the pool's size, `min_replicas` and
    this are both that size; then the planner follows it, and no other pool stops or starts for
    it."""
    min_replicas: int = 0
    num_pending: int = 0
    """Replicas without a machine yet: `PoolStatus.pending_replicas`, and pods that are Pending."""
    num_failed_starts: int = 0
    """Failed starts in a row, of the worst replica: `PoolStatus.num_failed_starts`."""
    workers: tuple[WorkerSignals, ...] = ()
    role_plan: RolePlan = field(default_factory=RolePlan)
    """The current role plan of a mixed pool."""


@dataclass(frozen=True)
class QueueSignals:
    """Requests of one router that wait for the same resource."""

    num_requests: int = 0
    num_tokens: int = 0
    """Tokens of their prompts that are expected to be uncached."""
    oldest_wait_s: float = 0.0
    median_wait_s: float = 0.0


@dataclass(frozen=True)
class PoolGaps:
    """Recent gaps of one pool's streams at one router's clients: `PoolFigures`."""

    pool: str
    num_gaps: int
    p95_s: float


@dataclass(frozen=True)
class RouterSignals:
    """One router, from its metrics. A router that is gone is left out."""

    router_id: str
    measured_at_s: float | None
    """When the figures below were read; None: never, or they are void."""
    requests_per_s: float = 0.0
    """Arrivals, including waiting and held requests: completions would be capped by a full pool.
    Counted over some seconds, so that it is 0 when nothing arrived."""
    uncached_tokens_per_s: float = 0.0
    """Arriving prompt tokens (`baton_prompt_tokens`), less the recently cached share
    (`baton_cached_prompt_tokens`) and the share that decode workers prefill themselves."""
    output_tokens: float | None = None
    """Mean per request, of those that ended recently (`baton_output_tokens` / `baton_requests`);
    None: none ended."""
    num_held: int = 0
    """Requests held because a pool that they need has size 0. They also count below."""
    waiting_for_prefill: QueueSignals = QueueSignals()
    """Requests that no prefill worker could start soon enough."""
    waiting_for_decode: QueueSignals = QueueSignals()
    """Requests for which no decode worker has room."""
    gaps: tuple[PoolGaps, ...] = ()
    """Per pool; gaps of one pool are combined, weighted by their number."""


@dataclass(frozen=True)
class Signals:
    """All input of one decision."""

    now_s: float
    pools: tuple[PoolSignals, ...]
    """In any order; names are distinct."""
    routers: tuple[RouterSignals, ...]
    settles: bool = False
    """Whether workers may have yet to register: `WatchFleetResponse.settles`."""
