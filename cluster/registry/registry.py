"""The fleet as workers report it: who is there, and in which state.

Pure: it reads a clock and nothing else. Silence is measured in the time that the registry itself
was awake (`now_s`): somebody must call `refresh` every `look_s`, or the gap is the registry's own
absence. All workers run one model: the first worker's `model_fingerprint` binds the registry.
A worker's life here:

1. `register` (STARTING), unless it runs another model. A known worker id with a newer incarnation
   replaces the older one. What comes on an older stream of the worker counts no more, and that a
   stream ends says nothing.
2. The first heartbeat with step progress makes it LIVE; asked to drain, or draining by itself, it
   is DRAINING for good.
3. Silent for `silent_after_s` or stuck (runnable work and no step for `stuck_factor` times the
   predicted time, or `first_step_s` where no step yet predicts it): SUSPECT, until it is heard of
   and steps again.
4. Silent for `gone_after_s`, or its process is known to be over (`gone`): GONE, and forgotten
   `forget_after_s` later.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.config.workers import RegistryConfig
from baton.errors import OtherModelError
from cluster.pools.pool_table import Place, Pool, PoolBook
from cluster.pools.role_plan import Role, RolePlan, active_roles
from cluster.registry.awake_clock import AwakeClock, Clock
from cluster.registry.router_reports import RouterBook, SilentRouter
from cluster.registry.units import UnitList


class WorkerState(enum.Enum):
    STARTING = "starting"
    LIVE = "live"
    SUSPECT = "suspect"
    DRAINING = "draining"
    GONE = "gone"


_SERVING = (WorkerState.LIVE, WorkerState.SUSPECT)  # a moment's silence switches nobody's role


@dataclass(frozen=True)
class Progress:
    """What a heartbeat says of the engine."""

    runnable: bool
    """Whether a step is under way, or there is work for one."""
    idle_s: float
    """Since the last step ended."""
    predicted_step_s: float | None
    """Of the step under way; None: the worker has never done work of its kind or length."""

    def is_stuck(self, config: RegistryConfig) -> bool:
        """Whether the step under way has taken longer than a sound one may."""
        if not self.runnable:
            return False
        if self.predicted_step_s is None:
            return self.idle_s >= config.first_step_s
        patience_s = max(config.stuck_after_s, config.stuck_factor * self.predicted_step_s)
        return self.idle_s >= patience_s


@dataclass(frozen=True)
class Registration:
    """One start of one worker. `info` and the load are opaque here: serialised messages."""

    worker_id: str
    incarnation: int
    pool: str
    info: bytes
    model: str = ""
    """The name by which clients know its model."""
    model_fingerprint: bytes = b""
    """Of its model's weights and configuration; empty: it has none."""


@dataclass(frozen=True)
class Stream:
    """One call of a worker to register; the newest is the one it is heard on."""

    worker_id: str
    number: int


@dataclass(frozen=True)
class FleetEntry:
    registration: Registration
    state: WorkerState
    load: bytes
    suspect_s: float
    """For how long it has been SUSPECT; 0 for one that is not."""
    active_role: Role | None = None
    """What it takes new requests for, where that is less than it could."""


@dataclass(frozen=True)
class FleetSnapshot:
    version: int
    workers: tuple[FleetEntry, ...]
    pools: tuple[Pool, ...]
    routers: tuple[bytes, ...] = ()
    """What routers told last."""
    keeps_pools: bool = False
    standings: Mapping[str, int] = field(default_factory=dict)
    """Of the places that stay, by their workers' ids: the greatest of a pool leave first."""
    settles: bool = False
    """Workers that were here before the registry started may have yet to register."""
    silent_routers: tuple[SilentRouter, ...] = ()
    model_fingerprint: bytes = b""


@dataclass
class _Worker:
    registration: Registration
    stream: Stream
    heard_at: float
    drain_asked: bool = False
    progress: Progress | None = None
    load: bytes = b""
    state: WorkerState = WorkerState.STARTING
    state_since: float = 0.0


class Registry:
    """Own the fleet's membership and states; the pools' book, the routers' and the list of units
    are parts of it."""

    def __init__(
        self,
        config: RegistryConfig,
        clock: Clock,
        keeps_pools: bool = False,
        model_fingerprint: bytes = b"",
        units: UnitList | None = None,
    ) -> None:
        """`keeps_pools`: every worker is of a pool that is known or will be added.
        `model_fingerprint`: of the model that served before a restart."""
        self._config, self._keeps_pools = config, keeps_pools
        self._model_fingerprint = model_fingerprint
        self._clock = AwakeClock(clock, 2 * config.look_s)
        self.routers = RouterBook(self._clock)
        self.pools = PoolBook()
        self.units = units or UnitList()
        self._workers: dict[str, _Worker] = {}
        self._heard: set[str] = set()  # worker ids, of all that ever told how they stand
        self._num_streams = 0
        self._num_changes = 0  # of workers

    @property
    def look_s(self) -> float:
        """How often somebody must look."""
        return self._config.look_s

    @property
    def register_within_s(self) -> float:
        """How long a call may take to say who registers."""
        return self._config.register_within_s

    @property
    def model_fingerprint(self) -> bytes:
        """Of the one model that serves here; empty: no worker has registered yet."""
        return self._model_fingerprint

    # --- workers --------------------------------------------------------------------------------

    def register(self, registration: Registration) -> Stream | None:
        """Take in a worker, to be heard on a stream; None: a newer incarnation of it is there.

        Raises OtherModelError for a worker of another model than those that are here.
        """
        self._check_model(registration)
        worker_id, now = registration.worker_id, self._clock()
        known = self._workers.get(worker_id)
        if known is not None and known.state is WorkerState.GONE:
            known = None  # nor does it refuse a smaller incarnation: clocks can be set back
        if known is not None and known.registration.incarnation > registration.incarnation:
            return None
        self._num_streams += 1
        stream = Stream(worker_id, self._num_streams)
        if known is not None and known.registration.incarnation == registration.incarnation:
            known.registration, known.stream, known.heard_at = registration, stream, now
            self._settle(known)
        else:
            self._workers[worker_id] = _Worker(registration, stream, now, state_since=now)
            self._changed()
        self._model_fingerprint = self._model_fingerprint or registration.model_fingerprint
        return stream

    def heartbeat(
        self, stream: Stream, progress: Progress | None, load: bytes, draining: bool
    ) -> bool:
        """Book what a worker says of itself; False: it is not heard here (any more)."""
        worker = self._heard_on(stream)
        if worker is None:
            return False
        worker.heard_at = self._clock()
        worker.progress = progress or worker.progress
        worker.load = load or worker.load
        worker.drain_asked = worker.drain_asked or draining
        self._settle(worker)
        return True

    def hears(self, stream: Stream) -> bool:
        """Whether the worker is known and has not registered again since, on another stream."""
        return self._heard_on(stream) is not None

    def ask_drain(self, worker_id: str) -> None:
        """Mark a worker to drain. Raises KeyError for one that is unknown or gone."""
        worker = self._workers[worker_id]
        if worker.state is WorkerState.GONE:
            raise KeyError(worker_id)
        worker.drain_asked = True
        self._settle(worker)

    def drain_asked(self, stream: Stream) -> bool:
        worker = self._heard_on(stream)
        return worker is not None and worker.drain_asked

    def gone(self, worker_id: str, incarnation: int) -> None:
        """The worker's process is known to be over."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.registration.incarnation == incarnation:
            self._enter(worker, WorkerState.GONE)

    def workers_of(self, pool: str) -> list[str]:
        """Those that are not gone, by their ids."""
        return [
            worker_id
            for worker_id, worker in self._workers.items()
            if worker.registration.pool == pool and worker.state is not WorkerState.GONE
        ]

    def now_s(self) -> float:
        """Seconds that the registry has been awake, up to this look."""
        return self._clock()

    def refresh(self) -> int:
        """Let time pass: states that follow from silence. Returns the version afterwards."""
        self._clock.look()
        now = self._clock()
        for worker in list(self._workers.values()):
            self._settle(worker)
            since_s = now - worker.state_since
            if worker.state is WorkerState.GONE and since_s >= self._config.forget_after_s:
                del self._workers[worker.registration.worker_id]
                self._changed()
        self._count_live()
        return self._version

    def snapshot(self) -> FleetSnapshot:
        """The fleet as of the last `refresh` or call of a worker. Changes nothing."""
        now, roles = self._clock(), self._active_roles()
        workers = tuple(
            FleetEntry(
                worker.registration,
                worker.state,
                worker.load,
                now - worker.state_since if worker.state is WorkerState.SUSPECT else 0.0,
                roles.get(worker.registration.worker_id),
            )
            for worker in self._workers.values()
        )
        return FleetSnapshot(
            self._version,
            workers,
            self.pools.shown(),
            self.routers.reports(),
            self._keeps_pools,
            {
                place.worker_id: standing
                for pool in self.pools.all_settings()
                for standing, place in enumerate(self.staying(pool))
            },
            self._settles(),
            self.routers.silent(),
            self._model_fingerprint,
        )

    def staying(self, pool: str) -> list[Place]:
        """The pool's places that are not on their way out: the last ones leave first when it gets
        smaller. So what serves stays, then the lowest."""
        places = [place for place in self.pools.places_of(pool) if not place.is_leaving]
        return sorted(places, key=lambda place: (self._distance(place), place.index))

    def awaits_adopted(self, pool: str) -> bool:
        """Whether a worker of the pool that a former supervisor left has yet to say how it stands,
        and with it who is to leave. It will soon, or be taken for hung."""
        return any(
            place.is_adopted and place.worker_id not in self._heard
            for place in self.pools.places_of(pool)
        )

    def _settles(self) -> bool:
        """Whether workers that were here before this registry may have yet to register: one that
        has not within `silent_after_s` counts as silent, but for those that the pools tell of, or
        will: by then nobody may have looked what a former supervisor left."""
        if self._clock() < self._config.silent_after_s:
            return True
        if not self._keeps_pools:
            return False
        sizes = self.pools.desired_replicas()
        return (
            not sizes
            or any(size and not self.pools.is_found(pool) for pool, size in sizes.items())
            or any(self.awaits_adopted(pool) for pool in sizes)
            or any(
                worker.registration.pool not in sizes and worker.state is not WorkerState.GONE
                for worker in self._workers.values()
            )
        )

    def _distance(self, place: Place) -> int:
        """From serving: 0 does, 1 may be about to again."""
        worker = self._workers.get(place.worker_id)
        if worker is None:
            return 1 if place.is_adopted else 3 if place.is_pending else 2
        return {WorkerState.LIVE: 0, WorkerState.SUSPECT: 1}.get(worker.state, 2)

    @property
    def _version(self) -> int:
        return self._num_changes + self.pools.version

    def _active_roles(self) -> dict[str, Role]:
        """Of the workers of pools that are split."""
        roles: dict[str, Role] = {}
        for pool, plan in self.pools.role_plans().items():
            if plan != RolePlan():
                serving = [
                    worker_id
                    for worker_id, worker in self._workers.items()
                    if worker.registration.pool == pool and worker.state in _SERVING
                ]
                roles |= active_roles(plan, serving)
        return roles

    def _check_model(self, registration: Registration) -> None:
        """Raises OtherModelError."""
        here, its_own = self._model_fingerprint, registration.model_fingerprint
        if not here or its_own in (b"", here):
            return
        settings = self.pools.all_settings().get(registration.pool)
        model = registration.model if settings is None else settings.model.label
        raise OtherModelError(
            f"worker {registration.worker_id} loaded {model}: its weights or configuration differ "
            f"from those that serve here: fingerprint {its_own.hex()}, not {here.hex()}. Pin "
            "`model_revision`, or start a new cluster for another model"
        )

    # --- states ---------------------------------------------------------------------------------

    def _changed(self) -> None:
        """A worker has come, has gone or is in another state."""
        self._num_changes += 1
        if self._workers and all(w.state is WorkerState.GONE for w in self._workers.values()):
            self._model_fingerprint = b""  # nobody is left that another model could clash with
        self._count_live()

    def _count_live(self) -> None:
        live = [each for each in self._workers.values() if each.state is WorkerState.LIVE]
        self.pools.see_live(Counter(each.registration.pool for each in live))

    def _heard_on(self, stream: Stream) -> _Worker | None:
        worker = self._workers.get(stream.worker_id)
        if worker is None or worker.stream != stream or worker.state is WorkerState.GONE:
            return None
        return worker

    def _settle(self, worker: _Worker) -> None:
        state = self._state_of(worker)
        if state is not worker.state:
            self._enter(worker, state)

    def _enter(self, worker: _Worker, state: WorkerState) -> None:
        if state is WorkerState.LIVE:
            self.pools.forgive(worker.registration.worker_id)
        self._heard.add(worker.registration.worker_id)
        worker.state = state
        worker.state_since = self._clock()
        self._changed()

    def _state_of(self, worker: _Worker) -> WorkerState:
        if worker.state is WorkerState.GONE:
            return WorkerState.GONE
        silent_s = self._clock() - worker.heard_at
        if silent_s >= self._config.gone_after_s:
            return WorkerState.GONE
        if silent_s >= self._config.silent_after_s or self._stuck(worker):
            return WorkerState.SUSPECT
        if worker.drain_asked:
            return WorkerState.DRAINING
        return WorkerState.STARTING if worker.progress is None else WorkerState.LIVE

    def _stuck(self, worker: _Worker) -> bool:
        return worker.progress is not None and worker.progress.is_stuck(self._config)
