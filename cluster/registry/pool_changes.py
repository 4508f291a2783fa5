"""Changes of pools while the cluster runs: checked, then applied, then saved for a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping

from baton.errors import BatonError
from baton.fleet import WorkerState
from cluster.pools.pool_settings import PoolSettings, added_settings
from cluster.registry.registry import Registry
from cluster.role_plan import RolePlan

log = logging.getLogger(__name__)


class PoolBacking:
    """What starts the workers of the registry's pools. This one starts none: someone else does."""

    async def check_room(self, pool: PoolSettings, replicas: Mapping[str, int]) -> None:
        """Check that `pool` can grow. `replicas`: every pool's size afterwards. Raises
        BatonError."""

    async def complete(self, settings: PoolSettings) -> PoolSettings:
        """The settings with `auto` resolved for all workers of the pool. Checks that the pool may
        run here. Raises BatonError."""
        return settings

    def pool_added(self, pool: str) -> None:
        """The completed pool was added to the table."""

    async def slots_known(self) -> None:
        """Return once every running replica has a slot."""

    def save(self) -> None:
        """Pools or units have changed: save that before the change is acknowledged."""


class PoolChanges:
    """Changes the registry's pools. A method that raises a BatonError has changed nothing.

    AddPool continues when its caller leaves. The search for the pool's replicas runs on a thread
    that cannot be stopped, and a second search beside it would find the same replicas.
    """

    def __init__(self, registry: Registry, backing: PoolBacking) -> None:
        self._registry = registry
        self._backing = backing
        self._adding = asyncio.Lock()  # one at a time: choosing `auto` settings takes memory
        self._additions: set[asyncio.Task[None]] = set()

    async def set_replicas(self, pool: str, replicas: int) -> int:
        """Set a pool's size and return the previous one."""
        pools = self._registry.pools
        if pools.check_size(pool, replicas) < replicas:
            sizes = pools.desired_replicas() | {pool: replicas}
            await self._backing.check_room(pools.settings(pool), sizes)
        former = pools.set_replicas(pool, replicas)
        self._backing.save()
        return former

    def set_role_plan(self, pool: str, plan: RolePlan) -> None:
        self._registry.pools.set_role_plan(pool, plan)
        self._backing.save()

    def close_pods(self, names: Collection[str]) -> None:
        self._registry.pools.close_pods(names)
        self._backing.save()

    async def add(self, name: str, text: str, replicas: int) -> None:
        """Add a pool. `text`: a cluster file that defines it. A repeated call waits for the
        first."""
        addition = asyncio.create_task(self._add(added_settings(name, text), replicas), name=name)
        self._additions.add(addition)
        addition.add_done_callback(self._ended)
        await asyncio.shield(addition)

    async def _add(self, settings: PoolSettings, replicas: int) -> None:
        name, pools = settings.name, self._registry.pools
        async with self._adding:
            if pools.knows(settings):
                self._backing.save()  # the first call may have ended before that
                return
            completed = await self._backing.complete(settings)
            if replicas:
                sizes = pools.desired_replicas() | {name: replicas}
                await self._backing.check_room(completed, sizes)
            pools.add(completed, replicas)
            self._backing.pool_added(name)
        self._backing.save()

    def _ended(self, addition: asyncio.Task[None]) -> None:
        self._additions.remove(addition)
        if not addition.cancelled() and (error := addition.exception()) is not None:
            fault = None if isinstance(error, BatonError) else error
            # Logged here because the caller may have left.
            log.warning("pool %s was not added: %s", addition.get_name(), error, exc_info=fault)

    def agree_dtype(self, pool: str, proposed: str) -> str:
        """The dtype of the pool's workers. `proposed`: what the calling worker would choose."""
        agreed = self._registry.pools.agree_dtype(pool, self._dtype_in_use() or proposed)
        self._backing.save()
        return agreed

    def _dtype_in_use(self) -> str:
        """The dtype of a registered worker; empty: none is registered. A registry that lost its
        state must not agree on another dtype."""
        for worker in self._registry.workers():
            if worker.registration.dtype and worker.state is not WorkerState.GONE:
                return worker.registration.dtype
        return ""

    async def remove(self, pool: str) -> None:
        await self._backing.slots_known()
        async with self._adding:  # the pool itself may be being added
            self._registry.pools.remove(pool, self._registry.workers_of(pool))
            self._backing.save()
