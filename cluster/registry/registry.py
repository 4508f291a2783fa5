"""The fleet as its workers report it: which workers exist, and in which state.

Pure: it reads only a clock. Silence counts only time in which the registry itself was awake
(`now_s`). So its owner must call `refresh` every `look_s`; a longer gap counts as the registry's
own absence. All workers run one model: the first worker's `model_fingerprint` binds the registry.

A worker's states:

1. STARTING: it called `register` and runs the bound model. A newer incarnation replaces an older
   one of the same worker id. Messages on an older stream are ignored, and the end of a stream means
   nothing.
2. LIVE: its first heartbeat with step progress arrived. DRAINING: it was asked to drain, or drains
   on its own; it never becomes LIVE again.
3. SUSPECT: it was silent for `silent_after_s`, or it is stuck. Stuck means runnable work and no
   step for `stuck_factor` times the predicted time, or for `first_step_s` without a prediction. It
   recovers when it reports and steps again.
4. GONE: it was silent for `gone_after_s`, or its process has ended (`gone`). The registry forgets
   it `forget_after_s` later.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from baton.clock import AwakeClock, NowS
from baton.config.workers import RegistryConfig
from baton.errors import NotFoundError, OtherModelError
from baton.fleet import Role, WorkerState
from cluster.pools.pool_table import PoolTable, Slot
from cluster.progress import Progress
from cluster.registry.routers import RouterReports, UnitList
from cluster.role_plan import RolePlan, active_roles
from kv_transfer.process import ProcessIdentity

_SERVING = (WorkerState.LIVE, WorkerState.SUSPECT)  # a brief silence changes no roles


@dataclass(frozen=True)
class Registration:
    """One start of one worker. `info` is an opaque serialised message."""

    worker_id: str
    incarnation: int
    pool: str
    info: bytes
    model: str = ""
    """The model name that clients use."""
    model_fingerprint: bytes = b""
    """Fingerprint of its model's weights and configuration; empty: none."""
    dtype: str = ""
    """The dtype that it computes in; empty: it computes nothing."""
    processes: frozenset[ProcessIdentity] = frozenset()
    """The processes of its ranks."""


@dataclass(frozen=True)
class Stream:
    """One Register call of a worker. Only the newest one counts."""

    worker_id: str
    number: int


@dataclass(frozen=True)
class FleetEntry:
    registration: Registration
    state: WorkerState
    load: bytes
    suspect_s: float
    """Seconds since it became SUSPECT; 0 in any other state."""
    active_role: Role | None = None
    """The role that a role plan assigns it; None: no plan."""


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
    """Own the fleet's membership and states, the pool table, the routers' reports and the list of
    units. `refresh` must be called every `config.look_s` at least."""

    def __init__(
        self,
        config: RegistryConfig,
        clock: NowS,
        keeps_pools: bool = False,
        model_fingerprint: bytes = b"",
        units: UnitList | None = None,
    ) -> None:
        """`keeps_pools`: every worker's pool is in the table or will be added.
        `model_fingerprint`: the model that served before a restart."""
        self.config, self.keeps_pools = config, keeps_pools
        self.model_fingerprint = model_fingerprint
        """Fingerprint of the model that serves; empty: no worker has registered yet."""
        self._clock = AwakeClock(clock, 2 * config.look_s)
        self.routers = RouterReports(self._clock)
        self.pools = PoolTable()
        self.units = units or UnitList()
        self._workers: dict[str, _Worker] = {}
        self._heard: set[str] = set()  # ids of all workers that ever sent a heartbeat
        self._num_streams = 0
        self._num_changes = 0  # of workers' states

    # --- workers --------------------------------------------------------------------------------

    def register(self, registration: Registration) -> Stream | None:
        """Register a worker and return its stream; None: a newer incarnation is registered.

        Raises OtherModelError for a worker with another model than the registered ones.
        """
        self._check_model(registration)
        worker_id, now = registration.worker_id, self._clock()
        known = self._workers.get(worker_id)
        if known is not None and known.state is WorkerState.GONE:
            known = None  # even a smaller incarnation may follow: clocks can be set back
        if known is not None and known.registration.incarnation > registration.incarnation:
            return None
        self._num_streams += 1
        stream = Stream(worker_id, self._num_streams)
        if known is not None and known.registration.incarnation == registration.incarnation:
            known.registration, known.stream, known.heard_at = registration, stream, now
            self._update_state(known)
        else:
            self._workers[worker_id] = _Worker(registration, stream, now, state_since=now)
            self._changed()
        self.model_fingerprint = self.model_fingerprint or registration.model_fingerprint
        return stream

    def heartbeat(
        self, stream: Stream, progress: Progress | None, load: bytes, draining: bool
    ) -> bool:
        """Take a worker's heartbeat. False: the stream is not (or no longer) the worker's
        newest."""
        worker = self._heard_on(stream)
        if worker is None:
            return False
        worker.heard_at = self._clock()
        worker.progress = progress or worker.progress
        worker.load = load or worker.load
        worker.drain_asked = worker.drain_asked or draining
        self._update_state(worker)
        return True

    def hears(self, stream: Stream) -> bool:
        """Whether this is still the worker's newest stream."""
        return self._heard_on(stream) is not None

    def ask_drain(self, worker_id: str) -> None:
        """Ask a worker to drain. Raises NotFoundError if it is unknown or gone."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.state is WorkerState.GONE:
            raise NotFoundError(f"no worker {worker_id!r}")
        worker.drain_asked = True
        self._update_state(worker)

    def drain_asked(self, stream: Stream) -> bool:
        worker = self._heard_on(stream)
        return worker is not None and worker.drain_asked

    def gone(self, worker_id: str, incarnation: int) -> None:
        """The worker's process has provably ended."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.registration.incarnation == incarnation:
            self._enter(worker, WorkerState.GONE)

    def workers_of(self, pool: str) -> list[str]:
        """Ids of the pool's workers that are not gone."""
        return [
            worker_id
            for worker_id, worker in self._workers.items()
            if worker.registration.pool == pool and worker.state is not WorkerState.GONE
        ]

    def now_s(self) -> float:
        """Seconds that the registry has been awake."""
        return self._clock()

    def refresh(self) -> int:
        """Update the states that follow from silence. Returns the new version."""
        self._clock.look()
        now = self._clock()
        for worker in list(self._workers.values()):
            self._update_state(worker)
            since_s = now - worker.state_since
            if worker.state is WorkerState.GONE and since_s >= self.config.forget_after_s:
                del self._workers[worker.registration.worker_id]
                self._changed()
        self._count_live()
        return self.version

    def workers(self) -> tuple[FleetEntry, ...]:
        """The workers as of the last change. Writes nothing."""
        now, roles = self._clock(), self._active_roles()
        return tuple(
            FleetEntry(
                worker.registration,
                worker.state,
                worker.load,
                now - worker.state_since if worker.state is WorkerState.SUSPECT else 0.0,
                roles.get(worker.registration.worker_id),
            )
            for worker in self._workers.values()
        )

    def staying(self, pool: str) -> list[Slot]:
        """The pool's slots that are not leaving, in the order in which they stay: first those that
        serve, then the lowest indices. A shrinking pool drops them from the end."""
        slots = [slot for slot in self.pools.slots_of(pool) if not slot.is_leaving]
        return sorted(slots, key=lambda slot: (self._distance(slot), slot.index))

    def awaits_adopted(self, pool: str) -> bool:
        """Whether an adopted worker of the pool has yet to register. Until then the supervisor does
        not choose which slot leaves. It registers soon, or is ended as hung."""
        return any(
            slot.is_adopted and slot.worker_id not in self._heard
            for slot in self.pools.slots_of(pool)
        )

    @property
    def settles(self) -> bool:
        """Whether workers from before this registry's start may have yet to register.

        After `silent_after_s` a worker that has not counts as silent. The exceptions are adopted
        workers, and workers of pools whose replicas the supervisor has yet to look for."""
        if self._clock() < self.config.silent_after_s:
            return True
        if not self.keeps_pools:
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

    def _distance(self, slot: Slot) -> int:
        """How far a slot is from serving: 0 serves, 1 may serve again soon."""
        worker = self._workers.get(slot.worker_id)
        if worker is None:
            return 1 if slot.is_adopted else 3 if slot.is_pending else 2
        return {WorkerState.LIVE: 0, WorkerState.SUSPECT: 1}.get(worker.state, 2)

    @property
    def version(self) -> int:
        """Increases when a worker's membership or state, or a pool, changes."""
        return self._num_changes + self.pools.version

    def _active_roles(self) -> dict[str, Role]:
        """Worker id -> active role, in pools with a role plan."""
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
        """Raise OtherModelError for a worker with another model than the bound one."""
        here, its_own = self.model_fingerprint, registration.model_fingerprint
        if not here or its_own in (b"", here):
            return
        settings = self.pools.all_settings().get(registration.pool)
        model = registration.model if settings is None else settings.model.label
        raise OtherModelError(
            f"worker {registration.worker_id} loaded {model}: its weights or configuration differ "
            f"from the model that serves here: fingerprint {its_own.hex()}, not {here.hex()}. Pin "
            "`model_revision`, set one engine.quantization for all pools, or start a new cluster "
            "for another model"
        )

    # --- states ---------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Note that a worker was added, removed or changed its state."""
        self._num_changes += 1
        if self._workers and all(w.state is WorkerState.GONE for w in self._workers.values()):
            self.model_fingerprint = b""  # no worker is left, so any model may come next
        self._count_live()

    def _count_live(self) -> None:
        live = [each for each in self._workers.values() if each.state is WorkerState.LIVE]
        self.pools.set_live(Counter(each.registration.pool for each in live))

    def _heard_on(self, stream: Stream) -> _Worker | None:
        worker = self._workers.get(stream.worker_id)
        if worker is None or worker.stream != stream or worker.state is WorkerState.GONE:
            return None
        return worker

    def _update_state(self, worker: _Worker) -> None:
        state = self._state_of(worker)
        if state is not worker.state:
            self._enter(worker, state)

    def _enter(self, worker: _Worker, state: WorkerState) -> None:
        if state is WorkerState.LIVE:
            self.pools.clear_failure(worker.registration.worker_id)
        self._heard.add(worker.registration.worker_id)
        worker.state = state
        worker.state_since = self._clock()
        self._changed()

    def _state_of(self, worker: _Worker) -> WorkerState:
        if worker.state is WorkerState.GONE:
            return WorkerState.GONE
        silent_s = self._clock() - worker.heard_at
        if silent_s >= self.config.gone_after_s:
            return WorkerState.GONE
        if silent_s >= self.config.silent_after_s or self._stuck(worker):
            return WorkerState.SUSPECT
        if worker.drain_asked:
            return WorkerState.DRAINING
        return WorkerState.STARTING if worker.progress is None else WorkerState.LIVE

    def _stuck(self, worker: _Worker) -> bool:
        return worker.progress is not None and worker.progress.is_stuck(self.config)
