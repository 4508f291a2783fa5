"""The pools: their settings, sizes, slots and failures. Pure.

A pool has *slots* `<pool>-<index>`, one per worker. The supervisor opens and closes them here. A
slot waits for a pod or has one, and keeps the failures of its replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from baton.config.engine import DTYPES
from baton.errors import AlreadyExistsError, InUseError, InvalidRequestError, NotFoundError
from baton.fleet import Role
from cluster.pools.pool_settings import ModelSource, PoolSettings, common_dtype
from cluster.role_plan import RolePlan

_ROLES = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True)
class Failure:
    """How a slot's replicas have failed since its worker was last live."""

    pool: str
    error: str
    """The newest error."""
    num_failed_starts: int
    """Failed starts in a row; 0: the replica served before it failed."""


@dataclass(frozen=True)
class Slot:
    """One slot of a pool, which one worker fills."""

    worker_id: str
    pool: str
    pod_name: str | None = None
    """The pod of its ranks; None outside Kubernetes, and while no pod has room."""
    is_pending: bool = False
    """It waits for a pod."""
    is_adopted: bool = False
    """Its worker served under a previous supervisor and still runs."""
    is_leaving: bool = False
    """It is no longer wanted, and closes when its worker has left."""

    @property
    def index(self) -> int:
        """Index within the pool, from 0."""
        return int(self.worker_id.rpartition("-")[2])


@dataclass(frozen=True)
class Pool:
    """A pool: what was set, and its status."""

    settings: PoolSettings
    desired_replicas: int
    role_plan: RolePlan = field(default_factory=RolePlan)
    """Set for a mixed pool."""
    is_found: bool = False
    """Every replica that a previous supervisor left has a slot."""
    live_replicas: int = 0
    last_error: str = ""
    """The newest error of a replica whose worker is not live again; empty: none."""
    num_failed_starts: int = 0
    """Failed starts in a row, of the worst slot."""
    slots: tuple[Slot, ...] = ()
    comes_back_for: tuple[Role, ...] = ()
    """Its roles that are away, while its workers start again."""

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def pending_replicas(self) -> int:
        """Number of slots that wait for a pod."""
        return sum(slot.is_pending for slot in self.slots)


class PoolTable:
    """Own the pools, their slots and the model that they all name."""

    def __init__(self) -> None:
        self._model: ModelSource | None = None  # None: no pool has named one
        self._pools: dict[str, Pool] = {}
        self._slots: dict[str, Slot] = {}  # by worker id
        self._failures: dict[str, Failure] = {}  # by worker id, oldest first; none for live workers
        self._live: Mapping[str, int] = {}  # pool -> number of live workers
        self._away = frozenset(_ROLES)  # no worker has started yet
        self._closed_pods = frozenset[str]()
        self.version = 0
        """Increases with every change."""

    # --- pools ----------------------------------------------------------------------------------

    def bind_model(self, model: ModelSource) -> None:
        """Require this model of all pools. Without this call it is the first pool's model."""
        self._model = model

    def add(self, settings: PoolSettings, replicas: int) -> None:
        """Add a pool; a known pool with the same settings stays as it is.

        Raises what `knows` raises, and InvalidRequestError for the size.
        """
        if self.knows(settings):
            return
        _check_size(settings, replicas)
        self._model = self._model or settings.model
        self._enter(Pool(settings, replicas))

    def knows(self, settings: PoolSettings) -> bool:
        """Whether the pool exists. Raises AlreadyExistsError if it has other settings, and
        ConfigError if it names another model than the cluster's."""
        known = self._pools.get(settings.name)
        if known is None:
            if self._model is not None:
                self._model.check_same(settings.model, f"pool {settings.name}")
            return False
        if not settings.digest or known.settings.digest != settings.digest:
            raise AlreadyExistsError(
                f"pool {settings.name} exists with other settings: a pool's settings never "
                "change, so add another pool",
                field="pool",
            )
        return True

    def remove(self, name: str, workers: Collection[str] = ()) -> None:
        """Forget a pool. `workers`: ids of its workers that are not gone.

        Raises NotFoundError, and InUseError while it has a size, a slot or a worker.
        """
        pool = self._pool(name)
        if pool.desired_replicas:
            raise InUseError(
                f"pool {name} has {pool.desired_replicas} replicas: set its size to 0 first",
                field="pool",
            )
        there = sorted({slot.worker_id for slot in self.slots_of(name)} | {*workers})
        if there:
            raise InUseError(f"pool {name} still has workers: {', '.join(there)}", field="pool")
        del self._pools[name]
        self._failures = {w: f for w, f in self._failures.items() if f.pool != name}
        self.version += 1

    def settings(self, name: str) -> PoolSettings:
        """A pool's settings. Raises NotFoundError."""
        return self._pool(name).settings

    def all_settings(self) -> dict[str, PoolSettings]:
        return {name: pool.settings for name, pool in self._pools.items()}

    def set_replicas(self, name: str, replicas: int) -> int:
        """Set a pool's desired size and return the previous one. Raises what `check_size`
        raises."""
        former = self.check_size(name, replicas)
        self._enter(replace(self._pools[name], desired_replicas=replicas))
        self._note_away()
        return former

    def check_size(self, name: str, replicas: int) -> int:
        """Check a new size and return the current one.

        Raises NotFoundError, and InvalidRequestError for a size above `max_replicas`.
        """
        pool = self._pool(name)
        _check_size(pool.settings, replicas)
        return pool.desired_replicas

    def set_role_plan(self, name: str, plan: RolePlan) -> None:
        """Split a mixed pool's workers into roles. Running requests end where they are.

        Raises NotFoundError, and InvalidRequestError for a pool of one role or too many workers.
        """
        self.check_size(name, plan.prefill + plan.decode)
        role = self.settings(name).role
        if role is not Role.MIXED and plan != RolePlan():
            raise InvalidRequestError(
                f"pool {name} has role {role.value}: only a mixed pool can be split", field="pool"
            )
        self._enter(replace(self._pools[name], role_plan=plan))

    def agree_dtype(self, name: str, proposed: str) -> str:
        """Agree on the pool's dtype: its own setting, else another pool's, else `proposed`.

        The result applies to all pools with `dtype: auto`. Raises NotFoundError, and
        InvalidRequestError for an unknown dtype.
        """
        settings = self.settings(name)
        if proposed not in DTYPES:
            listed = ", ".join(DTYPES)
            raise InvalidRequestError(
                f"dtype must be one of {listed}, not {proposed!r}", field="dtype"
            )
        if settings.dtype is not None:
            return settings.dtype
        dtype = common_dtype(self.all_settings().values()) or proposed
        for pool in list(self._pools.values()):
            self._enter(replace(pool, settings=pool.settings.with_dtype(dtype)))
        return dtype

    def role_plans(self) -> dict[str, RolePlan]:
        return {name: pool.role_plan for name, pool in self._pools.items()}

    def desired_replicas(self) -> dict[str, int]:
        return {name: pool.desired_replicas for name, pool in self._pools.items()}

    @property
    def closed_pods(self) -> frozenset[str]:
        """The pods on which nothing is placed any more."""
        return self._closed_pods

    def close_pods(self, names: Collection[str]) -> None:
        """Close these pods, and open all others."""
        self.version += self._closed_pods != set(names)
        self._closed_pods = frozenset(names)

    # --- slots and their failures ---------------------------------------------------------------

    def open_slot(
        self, pool: str, worker_id: str, pod_name: str | None = None, is_adopted: bool = False
    ) -> None:
        """Open a slot. `pod_name`: the pod of an adopted replica."""
        self.mark_found(pool)
        self._put(Slot(worker_id, pool, pod_name, is_adopted=is_adopted))

    def mark_found(self, pool: str) -> None:
        """Every replica of the pool that a previous supervisor left now has a slot."""
        self._enter(replace(self._pool(pool), is_found=True))

    def is_found(self, pool: str) -> bool:
        return self._pool(pool).is_found

    def close_slot(self, worker_id: str) -> None:
        """Remove a slot that is empty and no longer wanted."""
        del self._slots[worker_id]
        self.version += 1

    def update_slot(self, worker_id: str, **changes: Any) -> bool:
        """Change fields of an open slot. Returns whether any is another than before."""
        former = self._slots[worker_id]
        self._put(replace(former, **changes))
        return self._slots[worker_id] != former

    def slots_of(self, pool: str) -> tuple[Slot, ...]:
        return tuple(slot for slot in self._slots.values() if slot.pool == pool)

    def record_failure(self, pool: str, worker_id: str, error: str, served: bool) -> int:
        """Record a replica's failure, after it `served` or before. Returns failed starts in a
        row."""
        former = self._failures.pop(worker_id, None)
        num_before = 0 if former is None else former.num_failed_starts
        failure = Failure(pool, error, 0 if served else num_before + 1)
        self._failures[worker_id] = failure
        self.version += 1
        self._note_away()
        return failure.num_failed_starts

    def clear_failure(self, worker_id: str) -> None:
        """Forget a slot's failure: its worker is live, or no longer wanted."""
        if self._failures.pop(worker_id, None) is not None:
            self.version += 1

    # --- status ---------------------------------------------------------------------------------

    def set_live(self, live_replicas: Mapping[str, int]) -> None:
        """Set how many workers of each pool are live."""
        self._live = dict(live_replicas)
        self._note_away()

    @property
    def away(self) -> frozenset[Role]:
        """The roles that no worker serves on purpose, or that have yet to come back.

        A role is away at first, and from when all pools that can act in it have size 0. It is back
        once one of them has a live worker, or has failed to start one.
        """
        return self._away

    def restore_away_roles(self, roles: Collection[Role]) -> None:
        """Restore the previous supervisor's roles that are away, after its pools."""
        self._away = frozenset(roles)
        self._note_away()

    def status(self) -> tuple[Pool, ...]:
        return tuple(map(self._with_status, self._pools.values()))

    def _note_away(self) -> None:
        self._away = frozenset(role for role in _ROLES if self._is_away(role))

    def _is_away(self, role: Role) -> bool:
        own = [pool for pool in self._pools.values() if role in pool.settings.roles]
        if own and not any(pool.desired_replicas for pool in own):
            return True
        names = {pool.name for pool in own}
        has_started = any(self._live.get(name) for name in names) or any(
            each.pool in names and each.num_failed_starts for each in self._failures.values()
        )
        return role in self._away and not has_started

    def _with_status(self, pool: Pool) -> Pool:
        failures = [f for f in self._failures.values() if f.pool == pool.name]
        is_wanted = pool.desired_replicas > 0
        return replace(
            pool,
            live_replicas=self._live.get(pool.name, 0),
            last_error=failures[-1].error if failures else "",
            num_failed_starts=max((f.num_failed_starts for f in failures), default=0),
            slots=self.slots_of(pool.name),
            comes_back_for=tuple(r for r in pool.settings.roles if is_wanted and r in self._away),
        )

    def _pool(self, name: str) -> Pool:
        pool = self._pools.get(name)
        if pool is None:
            there_are = ", ".join(sorted(self._pools)) or "none"
            raise NotFoundError(f"no pool {name!r}; there are: {there_are}", field="pool")
        return pool

    def _enter(self, pool: Pool) -> None:
        self.version += self._pools.get(pool.name) != pool
        self._pools[pool.name] = pool

    def _put(self, slot: Slot) -> None:
        self.version += self._slots.get(slot.worker_id) != slot
        self._slots[slot.worker_id] = slot


def _check_size(settings: PoolSettings, replicas: int) -> None:
    largest = settings.shape.max_replicas
    if not 0 <= replicas <= largest:
        raise InvalidRequestError(
            f"replicas must be between 0 and {largest}, "
            f"the max_replicas of pool {settings.name}, not {replicas}",
            field="replicas",
        )
