"""Keeps every pool at its desired size: one detached, named Ray actor that is also the registry.

Each place of a pool has a `SlotSupervisor`. A keeper that fails is reported by name and set to work
again: no replica's failure ends the supervisor. Scaling in gives up places that do not serve, then
drains the highest. kill -9 of this process stops nothing: Ray starts it again, it listens on the
same port, adopts, and the workers register anew; who leaves a pool is chosen once all of it have,
or are taken for hung, for one of them may be leaving already.

Each pool has settings of its own, from the cluster's file or from AddPool. The run directory holds
what must survive a restart: port, added pools, sizes, role plans, roles that are away or on their
way back, the model's fingerprint, the units that routers are told of.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import TypeVar

import uvloop

from baton.config.cluster import ClusterConfig
from baton.errors import ConfigError
from cluster.pools.pool_settings import PoolSettings, choose_auto_settings, common_dtype, num_ranks
from cluster.registry.control_service import Changes, serve
from cluster.registry.registry import Registry
from cluster.supervisor.bundles import check_room
from cluster.supervisor.replica import RankWatch, RayReplicas, Replica, ReplicaName, Replicas
from cluster.supervisor.slot_supervisor import LOOK_S, SlotContext, SlotSupervisor
from cluster.supervisor.state import SupervisorState, state_file
from cluster.worker.config import WorkerConfig, num_threads_of, worker_config
from cluster.worker.process import LoopDoor, set_up_logging

log = logging.getLogger(__name__)

NAME = "baton-supervisor"

T = TypeVar("T")

_Key = tuple[str, int]


class Supervision:
    """The supervisor's work, on an event loop of its own."""

    def __init__(
        self, cluster: ClusterConfig, run_dir: Path, replicas: Replicas | None = None
    ) -> None:
        self._cluster = cluster
        self._run_dir = run_dir
        self._state = SupervisorState(run_dir, cluster)
        self._not_kept = ""  # why what follows from workers could not be written
        self._registry = Registry(
            cluster.registry,
            time.monotonic,
            keeps_pools=True,
            model_fingerprint=self._state.model_fingerprint,
            units=self._state.units,
        )
        self._state.restore(self._registry.pools)
        self._changes = Changes()
        self._keepers: dict[_Key, SlotSupervisor] = {}
        self._tasks: dict[_Key, asyncio.Task[None]] = {}
        self._num_threads: dict[ReplicaName, int] = {}  # what replicas were told to compute with
        self._adopted: dict[_Key, Replica] = {}
        self._places_opened = asyncio.Event()
        self._stop = asyncio.Event()
        self._control = ""
        # Starts and ends take up the ground's threads for as long as they last.
        self._soon = ThreadPoolExecutor(4, thread_name_prefix="soon-ray-calls")
        self._ground = SlotContext(
            self._registry,
            self._changes,
            replicas or RayReplicas(run_dir),
            ThreadPoolExecutor(16, thread_name_prefix="ray-calls"),
            self._worker_config,
        )

    async def run(self, on_address: Callable[[str], None]) -> None:
        """Supervise until `stop`, which leaves no replica behind."""
        async with serve(self._registry, self._changes, self._state.listen, self) as address:
            self._control = self._announced(address)
            self._keep_state(address)
            on_address(self._control)  # a rank that does not answer is waited for below
            await self._adopt(self._registry.pools.all_settings().values())
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(self._watch_ends())
                await self._reconcile()
                watcher.cancel()
            await self._leave()  # not after an error: the next supervisor adopts what runs

    def stop(self) -> None:
        self._stop.set()
        self._changes.announce()

    def _announced(self, address: str) -> str:
        """What workers and routers connect to."""
        host, port = self._cluster.control.announced_host, address.rpartition(":")[2]
        return address if host is None else f"{host}:{port}"

    # --- what stands behind the registry's pools ------------------------------------------------

    async def check_room(self, pool: PoolSettings, replicas: Mapping[str, int]) -> None:
        """Raises NoCapacityError."""
        pools = self._registry.pools.all_settings() | {pool.name: pool}
        await self._ray_soon(partial(check_room, pool.name, pools, replicas))

    async def complete(self, told: PoolSettings) -> PoolSettings:
        """Raises ConfigError, UnavailableError."""
        config, here = told.config, self._cluster.runs_on
        if config.runs_on != here:
            raise ConfigError(
                f"runs_on: must be {here}, as the cluster's own, not {config.runs_on}",
                field="runs_on",
            )
        if dtype := common_dtype(self._registry.pools.all_settings().values()):
            config = told.with_dtype(dtype).config
        config, choices = await asyncio.to_thread(choose_auto_settings, config)
        for choice in choices:
            log.info("%s: %s", told.name, choice)
        settings = dataclasses.replace(told, config=config)
        await self._adopt([settings])  # a supervisor that lost its state is told of pools that run
        return settings

    def pool_added(self, pool: str) -> None:
        """Unless something was left of it, nobody is to think that it had yet to register."""
        if all(name != pool for name, _ in self._adopted):
            self._registry.pools.mark_found(pool)

    async def slots_known(self) -> None:
        await self._places_opened.wait()

    def save(self) -> None:
        self._keep_state(self._state.listen)

    def _keep_state(self, listen: str) -> None:
        self._state.keep(listen, self._registry)

    # --- replicas -------------------------------------------------------------------------------

    async def _ray_soon(self, call: Callable[[], T]) -> T:
        """A call of Ray that returns soon, and so must not wait for others that do not."""
        return await asyncio.get_running_loop().run_in_executor(self._soon, call)

    def _worker_config(self, name: ReplicaName) -> WorkerConfig:
        cluster = self._registry.pools.settings(name.pool).config
        config = worker_config(cluster, name.pool, name.worker_id, self._control)
        if config.in_pod:  # it has that to itself, and logs where Ray's workers do
            return config
        engine = dataclasses.replace(config.engine, num_threads=self._share_of(name.pool))
        return dataclasses.replace(config, engine=engine, log_dir=str(self._run_dir))

    def _share_of(self, pool: str) -> int:
        """Compute threads of a rank, with as many replicas as there are places now."""
        pools, places = self._registry.pools.all_settings(), Counter(p for p, _ in self._keepers)
        engine = pools[pool].config.pool_engine(pool)
        return num_threads_of(engine, num_ranks(pools, places))

    async def _divide_cores(self) -> None:
        """Places have come or gone: tell every replica its share of the cores, if that changed."""
        if self._cluster.runs_on == "pods":
            return
        running = [k.replica for k in self._keepers.values() if k.replica is not None]
        share = {pool: self._share_of(pool) for pool in {r.name.pool for r in running}}
        for replica in running:
            num_threads = share[replica.name.pool]
            if self._num_threads.get(replica.name) != num_threads:
                tell = partial(self._ground.replicas.set_num_threads, replica, num_threads)
                await self._ray_soon(tell)
        self._num_threads = {replica.name: share[replica.name.pool] for replica in running}

    async def _adopt(self, pools: Iterable[PoolSettings]) -> None:
        """Find what a former supervisor left in them."""
        tp_sizes = {settings.name: settings.shape.tensor_parallel for settings in pools}
        for found in await self._ground.ray(partial(self._ground.replicas.find, tp_sizes)):
            self._adopted[(found.name.pool, found.name.index)] = found
            log.info("adopted %s", found.name)

    async def _reconcile(self) -> None:
        """Give every wanted place a keeper; have the others leave."""
        while not self._stop.is_set():
            known = self._registry.pools.all_settings()
            for key in self._adopted.keys() - self._keepers.keys():
                if key[0] in known:
                    self._keep(key)
            for pool in known:
                self._registry.pools.mark_found(pool)
            wanted = self._wanted()
            for key in wanted - set(self._keepers):
                self._keep(key)
            self._places_opened.set()
            for key in sorted(set(self._keepers) - wanted):
                if not self._registry.awaits_adopted(key[0]):
                    self._keepers[key].drain()
            for key in [key for key, task in self._tasks.items() if task.done()]:
                self._keeper_ended(key)
            self._keep_news()
            await self._divide_cores()
            await self._changes.wait(LOOK_S)

    def _keep_news(self) -> None:
        """Write what workers have changed: the roles that are away and the model's fingerprint.
        An error that keeps it from being written is logged once."""
        problem, registry, state = "", self._registry, self._state
        news = registry.pools.away, registry.model_fingerprint
        if news != (state.away, state.model_fingerprint):
            try:
                self.save()
            except OSError as error:
                problem = str(error)
        if problem and problem != self._not_kept:
            log.error("what a next supervisor must know is kept later: %s", problem)
        self._not_kept = problem

    def _wanted(self) -> set[_Key]:
        """Of each pool as many places as its size says: those that stay, and the lowest others; one
        of these that is leaving is filled again after that."""
        wanted: set[_Key] = set()
        for pool, size in self._registry.pools.desired_replicas().items():
            there = [place.index for place in self._registry.staying(pool)]
            free = (index for index in count() if index not in there)
            wanted |= {(pool, index) for index in islice(chain(there, free), size)}
        return wanted

    def _keep(self, key: _Key) -> None:
        """Open a place and have it filled."""
        adopted = self._adopted.pop(key, None)
        keeper = SlotSupervisor(*key, self._ground, adopted)
        if adopted is None:
            self._registry.pools.open_slot(keeper.pool, keeper.worker_id)
        else:
            self._registry.pools.open_slot(
                keeper.pool, keeper.worker_id, adopted.pod_name, adopted.serves
            )
        self._keepers[key] = keeper
        self._tasks[key] = asyncio.create_task(keeper.run())

    def _keeper_ended(self, key: _Key) -> None:
        """Its place was given up; or it failed, and goes on where it was after a while."""
        keeper, error = self._keepers[key], self._tasks.pop(key).exception()
        if error is None:
            del self._keepers[key]
            self._registry.pools.close_slot(keeper.worker_id)
            return
        log.error("the keeper of %s failed", keeper.worker_id, exc_info=error)
        keeper.report(f"its keeper failed: {error!r}")

        async def again() -> None:
            await keeper.back_off()
            await keeper.run()

        self._tasks[key] = asyncio.create_task(again())

    async def _watch_ends(self) -> None:
        """Hear of ranks that end, by Ray."""
        watch = RankWatch()
        while True:
            watched = [k.watched for k in self._keepers.values() if k.watched is not None]
            for end in await self._ray_soon(partial(watch.wait, watched, LOOK_S)):
                for keeper in self._keepers.values():
                    keeper.rank_ended(end)

    async def _leave(self) -> None:
        """The cluster is being shut down: end every replica at once."""
        for keeper in self._keepers.values():
            keeper.end_now()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        failed_over = [k.replica for k in self._keepers.values() if k.replica is not None]
        unkept = self._adopted.values()  # stopped before they were given keepers
        destroy = self._ground.replicas.destroy
        await asyncio.gather(
            *(self._ground.ray(partial(destroy, replica)) for replica in (*failed_over, *unkept))
        )
        await self._ground.ray(self._ground.replicas.clear)  # of pools that nobody told of again


class SupervisorActor:
    """The Ray actor: a thread with the supervision's event loop, and calls into it."""

    def __init__(self, cluster: ClusterConfig, run_dir: str) -> None:
        set_up_logging(cluster.log_level, Path(run_dir) / "supervisor.log")
        self._address: Future[str] = Future()
        self._supervision: Supervision | None = None
        self._is_successor = state_file(Path(run_dir)).exists()
        self._door = LoopDoor()
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
        if self._supervision is not None:
            self._door.call(self._supervision.stop)
        self._thread.join()

    def _run(self, cluster: ClusterConfig, run_dir: Path) -> None:
        try:
            uvloop.run(self._supervise(cluster, run_dir))
        except Exception as error:
            log.exception("the supervisor ends")
            if not self._address.done() and not self._is_successor:
                self._address.set_exception(error)  # it never served: tell who started it
                return
            logging.shutdown()
            os._exit(1)  # Ray starts it again, and it adopts

    async def _supervise(self, cluster: ClusterConfig, run_dir: Path) -> None:
        with self._door.open():
            self._supervision = Supervision(cluster, run_dir)
            await self._supervision.run(self._address.set_result)
