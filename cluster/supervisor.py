"""Keeps every pool at its desired size: one detached, named Ray actor that is also the registry.

Life of one place `<pool>-<index>` in a pool, its keeper:

1. Adopt the replica that a former supervisor left here, or start one, whole.
2. Watch: a rank's end, however it came, or the registry's word that the worker has been a suspect
   for `fence_after_s`, ends the replica.
3. Destroy it, by Ray and by pid, until no process is left: only then could its memory be gone.
4. Begin again while the place is wanted, with back-off when replicas die young.

Scaling in drains the highest places first. kill -9 of this process stops nothing: Ray starts it
again, it listens on the same port, adopts, and the workers register anew.

What must survive a restart (port and desired sizes) lies in the run directory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import uvloop

from baton.config import ClusterConfig
from cluster import replica as replicas
from cluster.control_service import Changes, serve
from cluster.registry import Registry, RegistryConfig, Role, WorkerState
from cluster.replica import Replica, ReplicaError, ReplicaName
from cluster.worker_config import worker_config
from cluster.worker_process import set_up_logging

log = logging.getLogger(__name__)

T = TypeVar("T")

NAME = "baton-supervisor"
_RECONCILE_S = 0.5
_LONGEST_BACKOFF_S = 10.0
_YOUNG_S = 30.0


@dataclass(frozen=True)
class SupervisorConfig:
    fence_after_s: float = 10.0
    """A worker that has been a suspect for this long is killed and recreated."""
    start_timeout_s: float = 600.0
    """A replica that has not registered by then is killed and recreated."""
    drain_timeout_s: float = 60.0


@dataclass
class _Place:
    """One place in a pool and what fills it."""

    worker_id: str
    keeper: asyncio.Task[None]
    replica: Replica | None = None
    leaving: bool = False
    last_gone: int = 0
    """Newest incarnation whose processes are known to be over: what is told of it is history."""


class Supervision:
    """The supervisor's work, on an event loop of its own. Ray is called on other threads only."""

    def __init__(
        self, cluster: ClusterConfig, run_dir: Path, config: SupervisorConfig | None = None
    ) -> None:
        self._cluster = cluster
        self._config = config or SupervisorConfig()
        self._state = _State(run_dir / "supervisor.json", cluster)
        self._registry = Registry(RegistryConfig(), time.monotonic)
        self._changes = Changes()
        self._places: dict[tuple[str, int], _Place] = {}
        self._ended: dict[ReplicaName, asyncio.Event] = {}
        self._adopted: dict[tuple[str, int], Replica] = {}
        self._executor = ThreadPoolExecutor(16, thread_name_prefix="ray-calls")
        self._stop = asyncio.Event()
        self._control = ""

    async def run(self, on_address: Callable[[str], None]) -> None:
        """Supervise until `stop`, which leaves no replica behind."""
        for name, pool in self._cluster.pools.items():
            self._registry.add_pool(name, Role(pool.role), self._state.desired[name])
        async with serve(self._registry, self._changes, self._state.listen) as address:
            self._control = address
            self._state.keep_address(address)
            await self._adopt()
            on_address(address)
            watcher = asyncio.create_task(self._watch_ends())
            try:
                await self._reconcile()
            finally:
                watcher.cancel()
                await self._leave()

    def stop(self) -> None:
        self._stop.set()
        self._changes.announce()

    async def _adopt(self) -> None:
        sizes = {name: pool.tensor_parallel for name, pool in self._cluster.pools.items()}
        for found in await self._ray(lambda: replicas.find_replicas(sizes)):
            self._adopted[(found.name.pool, found.name.index)] = found
            log.info("adopted %s", found.name)

    async def _reconcile(self) -> None:
        """Give every wanted place a keeper; have the others leave."""
        while not self._stop.is_set():
            desired = self._registry.desired_replicas()
            self._state.keep_desired(desired)
            wanted = {(pool, index) for pool, count in desired.items() for index in range(count)}
            for key in (wanted | set(self._adopted)) - set(self._places):
                pool, index = key
                keeper = asyncio.create_task(self._keep(key))
                self._places[key] = _Place(f"{pool}-{index}", keeper)
            for key in sorted(set(self._places) - wanted):
                self._let_go(self._places[key])
            for key in [k for k, place in self._places.items() if place.keeper.done()]:
                self._places.pop(key).keeper.result()
            await self._changes.wait(_RECONCILE_S)

    def _let_go(self, place: _Place) -> None:
        """Scale-in: the worker drains and leaves, then its keeper finds it gone."""
        if place.leaving:
            return
        place.leaving = True
        try:
            self._registry.ask_drain(place.worker_id)
            self._changes.announce()
        except KeyError:  # it has not registered: nothing runs there
            if place.replica is not None:
                self._end_of(place.replica.name).set()

    # --- one place ------------------------------------------------------------------------------

    async def _keep(self, key: tuple[str, int]) -> None:
        backoff_s = 0.0
        while True:
            started_at = time.monotonic()
            await self._fill_once(key)
            if self._places[key].leaving or self._stop.is_set():
                return
            young = time.monotonic() - started_at < _YOUNG_S
            backoff_s = min(_LONGEST_BACKOFF_S, 2 * backoff_s + 0.5) if young else 0.0
            await asyncio.sleep(backoff_s)

    async def _fill_once(self, key: tuple[str, int]) -> None:
        """One replica's life, from its start (or adoption) to the end of its last process."""
        place = self._places[key]
        replica = self._adopted.pop(key, None)
        if replica is None:
            name = replicas.new_name(*key)
            config = worker_config(self._cluster, name.pool, name.worker_id, self._control)
            try:
                replica = await self._ray(lambda: replicas.start_replica(name, config))
            except ReplicaError as error:
                log.error("%s", error)
                return
        place.replica = replica
        ended = self._end_of(replica.name)
        try:
            reason = await self._until_over(place, ended)
            log.info("%s: %s", replica.name, reason)
        finally:
            place.replica = None
            del self._ended[replica.name]
        await self._ray(lambda: replicas.destroy_replica(replica))
        for entry in self._registry.snapshot().workers:
            if entry.registration.worker_id == place.worker_id:
                place.last_gone = entry.registration.incarnation
                self._registry.gone(place.worker_id, place.last_gone)
        self._changes.announce()

    async def _until_over(self, place: _Place, ended: asyncio.Event) -> str:
        """Wait for a reason to end a replica, and name it."""
        began_at = time.monotonic()
        leave_by: float | None = None
        while not ended.is_set():
            now = time.monotonic()
            if place.leaving:
                leave_by = leave_by or now + self._config.drain_timeout_s
                if now > leave_by:
                    return "did not drain in time"
            suspect_s = self._suspect_s(place, now)
            if suspect_s is None and now - began_at > self._config.start_timeout_s:
                return "did not register in time"
            if suspect_s is not None and suspect_s > self._config.fence_after_s:
                return f"silent or stuck for {suspect_s:.0f} s"
            try:
                await asyncio.wait_for(ended.wait(), _RECONCILE_S)
            except TimeoutError:
                continue
        return "a rank has ended"

    def _suspect_s(self, place: _Place, now: float) -> float | None:
        """Seconds a worker has been a suspect, 0 for a good one; None: not registered."""
        for entry in self._registry.snapshot().workers:
            incarnation = entry.registration.incarnation
            if entry.registration.worker_id != place.worker_id or incarnation <= place.last_gone:
                continue
            if entry.state is WorkerState.GONE:
                return float("inf")
            return 0.0 if entry.suspect_since is None else now - entry.suspect_since
        return None

    def _end_of(self, name: ReplicaName) -> asyncio.Event:
        return self._ended.setdefault(name, asyncio.Event())

    async def _watch_ends(self) -> None:
        """Hear of ranks that end, by Ray; one waiting call for all replicas."""
        while True:
            running = [p.replica for p in self._places.values() if p.replica is not None]
            watched = [r for r in running if not self._end_of(r.name).is_set()]
            wait = partial(replicas.wait_for_end, watched, _RECONCILE_S)
            for over in await self._ray(wait):
                if over.name in self._ended:
                    self._ended[over.name].set()

    async def _leave(self) -> None:
        """The cluster is being shut down: end every replica at once."""
        for place in self._places.values():
            place.leaving = True
            if place.replica is not None:
                self._end_of(place.replica.name).set()
        if self._places:
            await asyncio.wait({place.keeper for place in self._places.values()})

    async def _ray(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)


class _State:
    """What a restarted supervisor must know, in a file that is replaced as a whole."""

    def __init__(self, path: Path, cluster: ClusterConfig) -> None:
        self._path = path
        self.desired = {name: pool.replicas for name, pool in cluster.pools.items()}
        self.listen = f"{cluster.control.host}:{cluster.control.port}"
        if path.exists():
            kept = json.loads(path.read_text())
            self.listen = kept["listen"]
            self.desired |= kept["desired"]

    def keep_address(self, address: str) -> None:
        self.listen = address
        self._write()

    def keep_desired(self, desired: dict[str, int]) -> None:
        if desired != self.desired:
            self.desired = dict(desired)
            self._write()

    def _write(self) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({"listen": self.listen, "desired": self.desired}))
        os.replace(fresh, self._path)


class SupervisorActor:
    """The Ray actor: a thread with the supervision's event loop, and calls into it."""

    def __init__(self, cluster: ClusterConfig, run_dir: str) -> None:
        set_up_logging(cluster.log_level)
        self._address: Future[str] = Future()
        self._supervision: Supervision | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(
            target=self._run, args=(cluster, Path(run_dir)), name="supervisor", daemon=True
        )
        self._thread.start()

    def address(self) -> str:
        """host:port of the control service, once it serves. Raises what kept it from serving."""
        return self._address.result()

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        """End all replicas; returns when none of their processes is left."""
        if self._loop is not None and self._supervision is not None:
            self._loop.call_soon_threadsafe(self._supervision.stop)
        self._thread.join()

    def _run(self, cluster: ClusterConfig, run_dir: Path) -> None:
        try:
            uvloop.run(self._supervise(cluster, run_dir))
        except Exception as error:
            log.exception("the supervisor ends")
            if not self._address.done():
                self._address.set_exception(error)  # it never served: tell who started it
                return
            logging.shutdown()
            os._exit(1)  # Ray starts it again, and it adopts

    async def _supervise(self, cluster: ClusterConfig, run_dir: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._supervision = Supervision(cluster, run_dir)
        await self._supervision.run(self._address.set_result)
