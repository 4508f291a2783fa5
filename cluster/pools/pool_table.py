"""The pools: their settings, sizes, places and failures.

Pure. A pool of a size has *places*, `<pool>-<index>`, which whoever starts its workers opens and
closes here; a place waits for a pod, or has one, and what failed there is booked with it.
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
    """How a worker's replicas have failed since it was last live."""

    pool: str
    error: str
    """The newest."""
    num_failed_starts: int
    """In a row; 0: it served before it failed."""


@dataclass(frozen=True)
class Place:
    """What one worker of a pool fills, or is to fill."""

    worker_id: str
    pool: str
    pod_name: str | None = None
    """Where its ranks start or run; None outside Kubernetes, and while no pod has room."""
    is_pending: bool = False
    """There is no pod yet that it could start on."""
    is_adopted: bool = False
    """A former supervisor left a worker here that served, and nothing has ended it since."""
    is_leaving: bool = False
    """It is wanted no longer, and closes when its worker has left."""

    @property
    def index(self) -> int:
        """Among its pool's places, from 0."""
        return int(self.worker_id.rpartition("-")[2])


@dataclass(frozen=True)
class Pool:
    """A pool as it stands."""

    name: str
    role: Role
    desired_replicas: int
    max_replicas: int
    live_replicas: int = 0
    last_error: str = ""
    """Why a replica failed that is not live again; empty: none has."""
    num_failed_starts: int = 0
    """Of the worker that failed most often in a row."""
    role_plan: RolePlan = field(default_factory=RolePlan)
    """Of a mixed pool."""
    settings_digest: bytes = b""
    places: tuple[Place, ...] = ()
    comes_back_for: tuple[Role, ...] = ()
    """Its roles that are away, while it is to have workers again."""

    @property
    def pending_replicas(self) -> int:
        """Places for which there is no pod yet."""
        return sum(place.is_pending for place in self.places)


@dataclass(frozen=True)
class _Entry:
    settings: PoolSettings
    desired_replicas: int
    role_plan: RolePlan = field(default_factory=RolePlan)
    is_found: bool = False


class PoolBook:
    """Own the pools, their places and the model that they all name."""

    def __init__(self) -> None:
        self._model: ModelSource | None = None  # None: no pool has named one
        self._entries: dict[str, _Entry] = {}
        self._places: dict[str, Place] = {}  # by worker id
        self._failures: dict[str, Failure] = {}  # by worker id, oldest first; not while it is live
        self._live: Mapping[str, int] = {}  # workers by pool
        self._away = frozenset(_ROLES)  # or on their way back: no worker has started yet
        self.version = 0
        """Rises with every change."""

    # --- pools ----------------------------------------------------------------------------------

    def bind_model(self, model: ModelSource) -> None:
        """All pools must name this model; without this call, the first pool's."""
        self._model = model

    def add(self, settings: PoolSettings, replicas: int) -> None:
        """Add a pool; a known pool with the same settings stays as it is.

        Raises what `knows` does, and InvalidRequestError for the size.
        """
        if self.knows(settings):
            return
        _check_size(settings, replicas)
        self._model = self._model or settings.model
        self._enter(_Entry(settings, replicas))

    def knows(self, settings: PoolSettings) -> bool:
        """Raises AlreadyExistsError where the pool is known with other settings, and ConfigError
        where it names another model than the cluster's."""
        known = self._entries.get(settings.name)
        if known is None:
            if self._model is not None:
                self._model.check_same(settings.model, f"pool {settings.name}")
            return False
        if not settings.digest or known.settings.digest != settings.digest:
            raise AlreadyExistsError(
                f"pool {settings.name} is there with other settings: a pool's settings never "
                "change, add another one",
                field="pool",
            )
        return True

    def remove(self, name: str, workers: Collection[str] = ()) -> None:
        """Forget a pool. `workers`: those of it that are still there.

        Raises NotFoundError, and InUseError while it has a size, a place or a worker.
        """
        entry = self._entry(name)
        if entry.desired_replicas:
            raise InUseError(
                f"pool {name} has {entry.desired_replicas} replicas: set its size to 0 first",
                field="pool",
            )
        there = sorted({place.worker_id for place in self.places_of(name)} | {*workers})
        if there:
            raise InUseError(f"pool {name} still has places: {', '.join(there)}", field="pool")
        del self._entries[name]
        self._failures = {w: f for w, f in self._failures.items() if f.pool != name}
        self.version += 1

    def settings(self, name: str) -> PoolSettings:
        """Raises NotFoundError."""
        return self._entry(name).settings

    def all_settings(self) -> dict[str, PoolSettings]:
        return {name: entry.settings for name, entry in self._entries.items()}

    def set_replicas(self, name: str, replicas: int) -> int:
        """Change a pool's desired size and return the former one. Raises what `check_size` does."""
        former = self.check_size(name, replicas)
        self._enter(replace(self._entries[name], desired_replicas=replicas))
        self._note_away()
        return former

    def check_size(self, name: str, replicas: int) -> int:
        """The pool's size, which may become this one.

        Raises NotFoundError, and InvalidRequestError beyond the pool's `max_replicas`.
        """
        entry = self._entry(name)
        _check_size(entry.settings, replicas)
        return entry.desired_replicas

    def set_role_plan(self, name: str, plan: RolePlan) -> None:
        """Split a mixed pool's workers into roles; what runs ends where it is.

        Raises NotFoundError, and InvalidRequestError for another pool or more than it may have.
        """
        self.check_size(name, plan.prefill + plan.decode)
        role = self.settings(name).role
        if role is not Role.MIXED and plan != RolePlan():
            raise InvalidRequestError(
                f"pool {name} has one role, {role.value}: only a mixed one is split", field="pool"
            )
        self._enter(replace(self._entries[name], role_plan=plan))

    def agree_dtype(self, name: str, proposed: str) -> str:
        """The dtype of the pool's workers: that of its settings, else of another pool's, else the
        proposed one. This decides for all pools that leave it open.

        Raises NotFoundError, and InvalidRequestError for an unknown dtype.
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

    # --- places, and what failed there ----------------------------------------------------------

    def open_place(
        self, pool: str, worker_id: str, pod_name: str | None = None, is_adopted: bool = False
    ) -> None:
        """`pod_name`: where what a former supervisor left there runs."""
        self.found(pool)
        self._book(Place(worker_id, pool, pod_name, is_adopted=is_adopted))

    def found(self, pool: str) -> None:
        """Whatever a former supervisor left of the pool has its place."""
        self._enter(replace(self._entry(pool), is_found=True))

    def is_found(self, pool: str) -> bool:
        return self._entry(pool).is_found

    def leaves(self, worker_id: str) -> None:
        """It is wanted no longer."""
        self._book(replace(self._places[worker_id], is_leaving=True))

    def close_place(self, worker_id: str) -> None:
        """Nothing is left there, and nothing is wanted."""
        del self._places[worker_id]
        self.version += 1

    def waits(self, worker_id: str) -> bool:
        """There is no pod yet that the worker could start on; whether that is news."""
        place = self._places[worker_id]
        return self._book(replace(place, pod_name=None, is_pending=True, is_adopted=False))

    def placed(self, worker_id: str, pod_name: str | None) -> bool:
        """It waits no more: new ranks have this pod, if it is one; whether that is news."""
        place = self._places[worker_id]
        return self._book(replace(place, pod_name=pod_name, is_pending=False, is_adopted=False))

    def ends(self, worker_id: str) -> bool:
        """What runs there is being ended; whether that is news."""
        return self._book(replace(self._places[worker_id], is_adopted=False))

    def places_of(self, pool: str) -> tuple[Place, ...]:
        return tuple(place for place in self._places.values() if place.pool == pool)

    def failed(self, pool: str, worker_id: str, error: str, served: bool) -> int:
        """Book that a replica failed, after it `served` or before; failed starts in a row."""
        former = self._failures.pop(worker_id, None)
        num_before = 0 if former is None else former.num_failed_starts
        failure = Failure(pool, error, 0 if served else num_before + 1)
        self._failures[worker_id] = failure
        self.version += 1
        self._note_away()
        return failure.num_failed_starts

    def forgive(self, worker_id: str) -> None:
        """The worker is live, or no longer wanted."""
        if self._failures.pop(worker_id, None) is not None:
            self.version += 1

    # --- as they stand --------------------------------------------------------------------------

    def see_live(self, live_replicas: Mapping[str, int]) -> None:
        """Book how many workers of each pool are live."""
        self._live = dict(live_replicas)
        self._note_away()

    @property
    def away(self) -> frozenset[Role]:
        """The roles that no pool is to have workers for, or that have yet to come back.

        A role is away at first, and from when all pools that can do it have size 0. It is back once
        one of them has a live worker, or has failed to start one.
        """
        return self._away

    def restore_away(self, roles: Collection[Role]) -> None:
        """Take over the roles that the last supervisor's book had, once the pools are here."""
        self._away = frozenset(roles)
        self._note_away()

    def shown(self) -> tuple[Pool, ...]:
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
            places=self.places_of(settings.name),
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

    def _book(self, place: Place) -> bool:
        is_news = self._places.get(place.worker_id) != place
        self._places[place.worker_id] = place
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
