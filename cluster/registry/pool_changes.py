"""Changes of pools while the cluster runs: checked, then booked, then kept for a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from baton.errors import BatonError
from baton.v1 import control_pb2
from cluster.pools.pool_settings import PoolSettings, added_settings
from cluster.pools.role_plan import RolePlan
from cluster.registry.registry import Registry, WorkerState

log = logging.getLogger(__name__)

_Added = tuple[str, bytes]  # a pool's name and its settings' digest


class PoolBacking(Protocol):
    """Whoever starts the workers of the registry's pools."""

    async def check_room(self, pool: PoolSettings, replicas: Mapping[str, int]) -> None:
        """`pool` is to grow: `replicas` is every pool's size then. Raises BatonError."""

    async def settled(self, told: PoolSettings) -> PoolSettings:
        """With what is decided once for all workers of the pool, which may run here.

        Raises BatonError."""

    def added(self, pool: str) -> None:
        """The pool that was settled is booked."""

    async def places_known(self) -> None:
        """Return once every place of a pool in which something runs has been opened."""

    def booked(self) -> None:
        """Pools or units have changed: keep that before it is acknowledged."""


class Unbacked:
    """Of a registry by itself: whoever starts its workers finds room for them."""

    async def check_room(self, pool: PoolSettings, replicas: Mapping[str, int]) -> None:
        """There is any."""

    async def settled(self, told: PoolSettings) -> PoolSettings:
        return told

    def added(self, pool: str) -> None:
        """Nothing is left of it."""

    async def places_known(self) -> None:
        """None is opened."""

    def booked(self) -> None:
        """It is forgotten with the registry."""


class PoolChanges:
    """Every method raises the BatonError of what it refuses, and has changed nothing then.

    A pool that is being added goes on to be when its caller leaves: what looks for its replicas on
    a thread cannot be ended, and a second look beside it would find the same ones.
    """

    def __init__(self, registry: Registry, backing: PoolBacking) -> None:
        self._registry = registry
        self._backing = backing
        self._settling = asyncio.Lock()  # it takes memory
        self._additions: dict[_Added, asyncio.Task[None]] = {}

    async def set_replicas(self, pool: str, replicas: int) -> int:
        """The former size."""
        book = self._registry.pools
        if book.check_size(pool, replicas) < replicas:
            sizes = book.desired_replicas() | {pool: replicas}
            await self._backing.check_room(book.settings(pool), sizes)
        former = book.set_replicas(pool, replicas)
        self._backing.booked()
        return former

    async def set_role_plan(self, pool: str, plan: RolePlan) -> None:
        self._registry.pools.set_role_plan(pool, plan)
        self._backing.booked()

    async def add(self, name: str, text: str, replicas: int) -> None:
        """`text` is a cluster file that defines the pool. A repeated call waits for the first."""
        told = added_settings(name, text)
        key = (name, told.digest)
        addition = self._additions.get(key)
        if addition is None:
            addition = asyncio.create_task(self._add(told, replicas))
            self._additions[key] = addition
            addition.add_done_callback(partial(self._ended, key))
        await asyncio.shield(addition)

    async def _add(self, told: PoolSettings, replicas: int) -> None:
        name, book = told.name, self._registry.pools
        async with self._settling:
            if book.knows(told):
                self._backing.booked()  # the first call may have ended before that
                return
            settings = await self._backing.settled(told)
            if replicas:
                sizes = book.desired_replicas() | {name: replicas}
                await self._backing.check_room(settings, sizes)
            book.add(settings, replicas)
            self._backing.added(name)
        self._backing.booked()

    def _ended(self, key: _Added, addition: asyncio.Task[None]) -> None:
        del self._additions[key]
        if not addition.cancelled() and (error := addition.exception()) is not None:
            fault = None if isinstance(error, BatonError) else error
            # Its caller may have left.
            log.warning("pool %s is not added: %s", key[0], error, exc_info=fault)

    def agree_dtype(self, pool: str, proposed: str) -> str:
        """The dtype of the pool's workers. `proposed` is what one of them would choose itself."""
        agreed = self._registry.pools.agree_dtype(pool, self._dtype_in_use() or proposed)
        self._backing.booked()
        return agreed

    def _dtype_in_use(self) -> str:
        """The dtype of a worker that is registered; empty: there is none. A registry that lost its
        state must not agree on another."""
        for worker in self._registry.snapshot().workers:
            info = control_pb2.WorkerInfo.FromString(worker.registration.info)
            if info.dtype and worker.state is not WorkerState.GONE:
                return info.dtype
        return ""

    async def remove(self, pool: str) -> None:
        await self._backing.places_known()
        if additions := [task for (name, *_), task in self._additions.items() if name == pool]:
            await asyncio.wait(additions)
        self._registry.pools.remove(pool, self._registry.workers_of(pool))
        self._backing.booked()
