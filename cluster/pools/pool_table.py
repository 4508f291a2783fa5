"""The pools: their settings, sizes, slots and failures. Pure.

A pool has *slots* `<pool>-<index>`, one per worker. The supervisor opens and closes them here. A
slot waits for a pod or has one, and keeps the failures of its replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from baton.config.engine import DTYPES
from baton.errors import AlreadyExistsError, InUseError, InvalidRequestError, NotFoundError
from cluster.pools.pool_settings import ModelSource, PoolSettings, common_dtype
from cluster.pools.role_plan import Role, RolePlan

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
    """A pool's status."""

    name: str
    role: Role
    desired_replicas: int
    max_replicas: int
    live_replicas: int = 0
    last_error: str = ""
    """The newest error of a replica whose worker is not live again; empty: none."""
    num_failed_starts: int = 0
    """Failed starts in a row, of the worst slot."""
    role_plan: RolePlan = field(default_factory=RolePlan)
    """Set for a mixed pool."""
    settings_digest: bytes = b""
    slots: tuple[Slot, ...] = ()
    comes_back_for: tuple[Role, ...] = ()
    """Its roles that are away, while its workers start again."""

    @property
    def pending_replicas(self) -> int:
        """Number of slots that wait for a pod."""
        return sum(slot.is_pending for slot in self.slots)


@dataclass(frozen=True)
class _Entry:
    settings: PoolSettings
    desired_replicas: int
    role_plan: RolePlan = field(default_factory=RolePlan)
    is_found: bool = False


class PoolTable:
    """Own the pools, their slots and the model that they all name."""

    def __init__(self) -> None:
        self._model: ModelSource | None = None  # None: no pool has named one
        self._entries: dict[str, _Entry] = {}
        self._slots: dict[str, Slot] = {}  # by worker id
        self._failures: dict[str, Failure] = {}  # by worker id, oldest first; none for live workers
        self._live: Mapping[str, int] = {}  # pool -> number of live workers
        self._away = frozenset(_ROLES)  # no worker has started yet
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
        self._enter(_Entry(settings, replicas))

    def knows(self, settings: PoolSettings) -> bool:
        """Whether the pool exists. Raises AlreadyExistsError if it has other settings, and
        ConfigError if it names another model than the cluster's."""
        known = self._entries.get(settings.name)
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
        entry = self._entry(name)
        if entry.desired_replicas:
            raise InUseError(
                f"pool {name} has {entry.desired_replicas} replicas: set its size to 0 first",
                field="pool",
            )
        there = sorted({slot.worker_id for slot in self.slots_of(name)} | {*workers})
        if there:
            raise InUseError(f"pool {name} still has workers: {', '.join(there)}", field="pool")
        del self._entries[name]
        self._failures = {w: f for w, f in self._failures.items() if f.pool != name}
        self.version += 1

    def settings(self, name: str) -> PoolSettings:
        """A pool's settings. Raises NotFoundError."""
        return self._entry(name).settings

    def all_settings(self) -> dict[str, PoolSettings]:
        return {name: entry.settings for name, entry in self._entries.items()}

    def set_replicas(self, name: str, replicas: int) -> int:
        """Set a pool's desired size and return the previous one. Raises what `check_size`
        raises."""
        former = self.check_size(name, replicas)
        self._enter(replace(self._entries[name], desired_replicas=replicas))
        self._note_away()
        return former

    def check_size(self, name: str, replicas: int) -> int:
        """Check a new size and return the current one.

        Raises NotFoundError, and InvalidRequestError for a size above `max_replicas`.
        """
        entry = self._entry(name)
        _check_size(entry.settings, replicas)
        return entry.desired_replicas

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
        self._enter(replace(self._entries[name], role_plan=plan))

    def agree_dtype(self, name: str, proposed: str) -> str:
        """The dtype of the pool's workers: its own setting, else another pool's, else `proposed`.

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
        for entry in list(self._entries.values()):
            self._enter(replace(entry, settings=entry.settings.with_dtype(dtype)))
        return dtype

    def role_plans(self) -> dict[str, RolePlan]:
        return {name: entry.role_plan for name, entry in self._entries.items()}

    def desired_replicas(self) -> dict[str, int]:
        return {name: entry.desired_replicas for name, entry in self._entries.items()}

    # --- slots and their failures ---------------------------------------------------------------

    def open_slot(
        self, pool: str, worker_id: str, pod_name: str | None = None, is_adopted: bool = False
    ) -> None:
        """Open a slot. `pod_name`: the pod of an adopted replica."""
        self.mark_found(pool)
        self._book(Slot(worker_id, pool, pod_name, is_adopted=is_adopted))

    def mark_found(self, pool: str) -> None:
        """Every replica of the pool that a previous supervisor left now has a slot."""
        self._enter(replace(self._entry(pool), is_found=True))

    def is_found(self, pool: str) -> bool:
        return self._entry(pool).is_found

    def set_leaving(self, worker_id: str) -> None:
        """The slot is no longer wanted."""
        self._book(replace(self._slots[worker_id], is_leaving=True))

    def close_slot(self, worker_id: str) -> None:
        """Remove a slot that is empty and no longer wanted."""
        del self._slots[worker_id]
        self.version += 1

    def set_pending(self, worker_id: str) -> bool:
        """The slot waits for a pod. True: it did not before."""
        slot = self._slots[worker_id]
        return self._book(replace(slot, pod_name=None, is_pending=True, is_adopted=False))

    def set_pod(self, worker_id: str, pod_name: str | None) -> bool:
        """New ranks start in this pod (None: no pod). True: the slot changed."""
        slot = self._slots[worker_id]
        return self._book(replace(slot, pod_name=pod_name, is_pending=False, is_adopted=False))

    def set_ending(self, worker_id: str) -> bool:
        """The slot's replica is being ended. True: the slot changed."""
        return self._book(replace(self._slots[worker_id], is_adopted=False))

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
        return tuple(map(self._shown, self._entries.values()))

    def _note_away(self) -> None:
        self._away = frozenset(role for role in _ROLES if self._is_away(role))

    def _is_away(self, role: Role) -> bool:
        own = [each for each in self._entries.values() if role in each.settings.roles]
        if own and not any(each.desired_replicas for each in own):
            return True
        names = {each.settings.name for each in own}
        has_started = any(self._live.get(name) for name in names) or any(
            each.pool in names and each.num_failed_starts for each in self._failures.values()
        )
        return role in self._away and not has_started

    def _shown(self, entry: _Entry) -> Pool:
        settings, wanted = entry.settings, entry.desired_replicas
        failures = [f for f in self._failures.values() if f.pool == settings.name]
        coming = [role for role in settings.roles if wanted and role in self._away]
        return Pool(
            settings.name,
            settings.role,
            wanted,
            settings.shape.max_replicas,
            self._live.get(settings.name, 0),
            last_error=failures[-1].error if failures else "",
            num_failed_starts=max((f.num_failed_starts for f in failures), default=0),
            role_plan=entry.role_plan,
            settings_digest=settings.digest,
            slots=self.slots_of(settings.name),
            comes_back_for=tuple(coming),
        )

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            there_are = ", ".join(sorted(self._entries)) or "none"
            raise NotFoundError(f"no pool {name!r}; there are: {there_are}", field="pool")
        return entry

    def _enter(self, entry: _Entry) -> None:
        name = entry.settings.name
        self.version += self._entries.get(name) != entry
        self._entries[name] = entry

    def _book(self, slot: Slot) -> bool:
        is_news = self._slots.get(slot.worker_id) != slot
        self._slots[slot.worker_id] = slot
        self.version += is_news
        return is_news


def _check_size(settings: PoolSettings, replicas: int) -> None:
    largest = settings.shape.max_replicas
    if not 0 <= replicas <= largest:
        raise InvalidRequestError(
            f"replicas must be between 0 and {largest}, "
            f"the max_replicas of pool {settings.name}, not {replicas}",
            field="replicas",
        )
