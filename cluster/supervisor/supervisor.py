"""Keeps every pool at its desired size: one detached, named Ray actor that is also the registry.

Each slot of a pool has a `SlotSupervisor`. If one fails, its error is reported by name and it runs
again: no replica's failure ends the supervisor. A shrinking pool drops slots that do not serve
first, then the highest. kill -9 of this process stops nothing: Ray starts it again, it listens on
the same port, adopts what runs, and the workers register again. It chooses who leaves a pool only
once all adopted workers have registered or count as hung, because one of them may be leaving.

Each pool has its own settings, from the cluster's file or from AddPool. The run directory holds
what must survive a restart (`run_dir`).
"""

from __future__ import annotations

import asyncio
import contextlib
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
from typing import Any, Self, TypeVar

import ray
import uvloop
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from baton.config.cluster import ClusterConfig
from baton.config.internal import InternalConfig
from baton.errors import ConfigError, UnavailableError
from baton.identity.identity import open_identity
from baton.process.log import LogSettings, set_up_logging
from cluster.errors import one_line
from cluster.pools.pool_settings import PoolSettings, choose_auto_settings, common_dtype, num_ranks
from cluster.registry.control_service import Changes, serve
from cluster.registry.pool_changes import PoolBacking
from cluster.registry.registry import Registry
from cluster.supervisor.bundles import check_room
from cluster.supervisor.replica import (
    NAMESPACE,
    RankWatch,
    RayReplicas,
    Replica,
    ReplicaName,
    Replicas,
)
from cluster.supervisor.run_dir import SupervisorState, state_file
from cluster.supervisor.slot_supervisor import LOOK_S, SlotContext, SlotSupervisor
from cluster.worker.config import WorkerConfig, num_threads_of, worker_config

log = logging.getLogger(__name__)

NAME = "baton-supervisor"
_ANSWER_WITHIN_S = 30.0
_ASK_AGAIN_S = 0.2
# Only the head's node has this resource. Without a head the supervisor waits for the next one. In a
# worker's pod it would end with that pod, and no client would find its control service.
_HEAD = {"node:__internal_head__": 0.001}

T = TypeVar("T")

_Key = tuple[str, int]  # a pool's name and a slot's index


class Supervision(PoolBacking):
    """The supervisor's work, on its own event loop. Backs the registry's pools."""

    def __init__(
        self, cluster: ClusterConfig, run_dir: Path, replicas: Replicas | None = None
    ) -> None:
        self._cluster = cluster
        self._run_dir = run_dir
        self._state = SupervisorState(run_dir, cluster)
        self._save_problem = ""  # why the newest changes could not be written
        self._registry = Registry(
            cluster.registry,
            time.monotonic,
            keeps_pools=True,
            model_fingerprint=self._state.model_fingerprint,
            units=self._state.units,
        )
        self._state.restore(self._registry.pools)
        self._changes = Changes()
        self._slots: dict[_Key, SlotSupervisor] = {}
        self._tasks: dict[_Key, asyncio.Task[None]] = {}
        self._num_threads: dict[ReplicaName, int] = {}  # last sent to each replica
        self._adopted: dict[_Key, Replica] = {}
        self._slots_opened = asyncio.Event()
        self._stop = asyncio.Event()
        self._control = ""
        # Starts and ends hold the context's threads for long; short calls have their own.
        self._short_calls = ThreadPoolExecutor(4, thread_name_prefix="short-ray-calls")
        self._context = SlotContext(
            self._registry,
            self._changes,
            replicas or RayReplicas(run_dir),
            ThreadPoolExecutor(16, thread_name_prefix="ray-calls"),
            self._worker_config,
        )

    async def run(self, on_address: Callable[[str], None]) -> None:
        """Supervise until `stop`, which leaves no replica behind. `on_address` gets the address
        that workers and routers connect to."""
        identity = open_identity(self._cluster.internal, "operator")
        listen = self._state.listen
        async with serve(self._registry, self._changes, listen, identity, self) as address:
            host, port = self._cluster.control.announced_host, address.rpartition(":")[2]
            self._control = address if host is None else f"{host}:{port}"
            self._state.keep(address, self._registry)
            on_address(self._control)  # before adopting, which waits for ranks that do not answer
            await self._adopt(self._registry.pools.all_settings().values())
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(self._watch_ends())
                await self._reconcile()
                watcher.cancel()
            await self._end_all()  # not after an error: the next supervisor adopts what runs

    def stop(self) -> None:
        self._stop.set()
        self._changes.announce()

    # --- PoolBacking ----------------------------------------------------------------------------

    async def check_room(self, pool: PoolSettings, replicas: Mapping[str, int]) -> None:
        """Check that there are GPUs for these sizes. Raises NoCapacityError."""
        pools = self._registry.pools.all_settings() | {pool.name: pool}
        await self._short_call(partial(check_room, pool.name, pools, replicas))

    async def complete(self, settings: PoolSettings) -> PoolSettings:
        """Check that the pool fits, and resolve `auto`. Raises ConfigError, UnavailableError."""
        config, own = settings.config, self._cluster
        same = (
            ("runs_on", own.runs_on, config.runs_on),
            # What names a file or a library is not taken from whoever calls. Neither is the model
            # (`ModelSource`).
            ("transfer.ucx_library", own.transfer.ucx_library, config.transfer.ucx_library),
        )
        for key, here, named in same:
            if named != here:
                raise ConfigError(
                    f"{key}: must be {here}, as the cluster's own, not {named}", field=key
                )
        if config.internal not in (InternalConfig(), own.internal):
            raise ConfigError(
                "internal: must be left out, as the cluster's counts", field="internal"
            )
        config = dataclasses.replace(config, internal=own.internal)
        settings = dataclasses.replace(settings, config=config)
        if dtype := common_dtype(self._registry.pools.all_settings().values()):
            config = settings.with_dtype(dtype).config
        config, choices = await asyncio.to_thread(choose_auto_settings, config)
        for choice in choices:
            log.info("%s: %s", settings.name, choice)
        settings = dataclasses.replace(settings, config=config)
        await self._adopt([settings])  # if this supervisor lost its state, the pool may run already
        return settings

    def pool_added(self, pool: str) -> None:
        """Mark the pool as found, unless some of its replicas were: they open their slots first."""
        if all(name != pool for name, _ in self._adopted):
            self._registry.pools.mark_found(pool)

    async def slots_known(self) -> None:
        await self._slots_opened.wait()

    def save(self) -> None:
        self._state.keep(self._state.listen, self._registry)

    # --- slots ----------------------------------------------------------------------------------

    async def _adopt(self, pools: Iterable[PoolSettings]) -> None:
        """Find the replicas that a previous supervisor left in these pools."""
        tp_sizes = {settings.name: settings.shape.tensor_parallel for settings in pools}
        for found in await self._context.ray(partial(self._context.replicas.find, tp_sizes)):
            self._adopted[(found.name.pool, found.name.index)] = found
            log.info("adopted %s", found.name)

    async def _reconcile(self) -> None:
        """Open a slot for every wanted worker and drain the others, until `stop`."""
        while not self._stop.is_set():
            known = self._registry.pools.all_settings()
            for key in self._adopted.keys() - self._slots.keys():
                if key[0] in known:
                    self._open(key)
            for pool in known:
                self._registry.pools.mark_found(pool)
            wanted = self._wanted()
            for key in wanted - set(self._slots):
                self._open(key)
            self._slots_opened.set()
            for key in sorted(set(self._slots) - wanted):
                if not self._registry.awaits_adopted(key[0]):
                    self._slots[key].drain()
            for key in [key for key, task in self._tasks.items() if task.done()]:
                self._run_ended(key)
            self._save_changes()
            await self._divide_cores()
            await self._changes.wait(LOOK_S)

    def _wanted(self) -> set[_Key]:
        """Choose each pool's slots, up to its size: those that stay, then the lowest other indices.
        A wanted slot that is leaving is filled again once it is empty."""
        wanted: set[_Key] = set()
        for pool, size in self._registry.pools.desired_replicas().items():
            staying = [slot.index for slot in self._registry.staying(pool)]
            others = (index for index in count() if index not in staying)
            wanted |= {(pool, index) for index in islice(chain(staying, others), size)}
        return wanted

    def _open(self, key: _Key) -> None:
        """Open a slot and keep it filled."""
        adopted = self._adopted.pop(key, None)
        slot = SlotSupervisor(*key, self._context, adopted)
        pod_name, serves = (None, False) if adopted is None else (adopted.pod_name, adopted.serves)
        self._registry.pools.open_slot(slot.pool, slot.worker_id, pod_name, serves)
        self._slots[key] = slot
        self._tasks[key] = asyncio.create_task(slot.run())

    def _run_ended(self, key: _Key) -> None:
        """Close a slot that is no longer wanted. Run it again after a while if it failed."""
        slot, error = self._slots[key], self._tasks.pop(key).exception()
        if error is None:
            del self._slots[key]
            self._registry.pools.close_slot(slot.worker_id)
            return
        log.error("the supervisor of %s failed", slot.worker_id, exc_info=error)
        slot.report(f"its supervisor failed: {error!r}")

        async def again() -> None:
            await slot.back_off()
            await slot.run()

        self._tasks[key] = asyncio.create_task(again())

    def _save_changes(self) -> None:
        """Save what workers have changed: the roles that are away and the model's fingerprint.
        A repeated error is logged once."""
        problem, registry, state = "", self._registry, self._state
        if (registry.pools.away, registry.model_fingerprint) != (
            state.away,
            state.model_fingerprint,
        ):
            try:
                self.save()
            except OSError as error:
                problem = str(error)
        if problem and problem != self._save_problem:
            log.error("the supervisor's state is not saved, trying again: %s", problem)
        self._save_problem = problem

    async def _watch_ends(self) -> None:
        """Pass on the ends of ranks."""
        watch = RankWatch()
        while True:
            watched = [slot.watched for slot in self._slots.values() if slot.watched is not None]
            for end in await self._short_call(partial(watch.wait, watched, LOOK_S)):
                for slot in self._slots.values():
                    slot.rank_ended(end)

    async def _end_all(self) -> None:
        """End every replica at once: the cluster shuts down."""
        for slot in self._slots.values():
            slot.end_now()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        replicas = self._context.replicas
        # Slots whose run failed, and replicas that no slot has adopted yet.
        left = [*self._running(), *self._adopted.values()]
        await asyncio.gather(*(self._context.ray(partial(replicas.destroy, r)) for r in left))
        await self._context.ray(replicas.clear)  # replicas of pools that were not added again

    # --- replicas -------------------------------------------------------------------------------

    async def _short_call(self, call: Callable[[], T]) -> T:
        """Call Ray for something that returns soon, without waiting for longer calls."""
        return await asyncio.get_running_loop().run_in_executor(self._short_calls, call)

    def _running(self) -> list[Replica]:
        return [slot.replica for slot in self._slots.values() if slot.replica is not None]

    def _worker_config(self, name: ReplicaName) -> WorkerConfig:
        cluster = self._registry.pools.settings(name.pool).config
        config = worker_config(cluster, name.pool, name.worker_id, self._control)
        if config.in_pod:  # it has all of the pod's cores, and the pod's log
            return config
        engine = dataclasses.replace(config.engine, num_threads=self._threads_of(name.pool))
        return dataclasses.replace(config, engine=engine, log_dir=str(self._run_dir))

    def _threads_of(self, pool: str) -> int:
        """Compute threads of a rank, with a replica in every slot."""
        pools, slots = self._registry.pools.all_settings(), Counter(p for p, _ in self._slots)
        engine = pools[pool].config.pool_engine(pool)
        return num_threads_of(engine, num_ranks(pools, slots))

    async def _divide_cores(self) -> None:
        """Send every replica its share of the cores, if slots have come or gone."""
        if self._cluster.runs_on == "pods":
            return
        running = self._running()
        threads = {replica.name: self._threads_of(replica.name.pool) for replica in running}
        for replica in running:
            num_threads = threads[replica.name]
            if self._num_threads.get(replica.name) != num_threads:
                await self._short_call(
                    partial(self._context.replicas.set_num_threads, replica, num_threads)
                )
        self._num_threads = threads


class SupervisorActor:
    """The Ray actor: runs the supervision in a thread and answers calls about it."""

    def __init__(self, cluster: ClusterConfig, run_dir: str) -> None:
        file = Path(run_dir) / "supervisor.log"
        set_up_logging(LogSettings.of(cluster), os.environ, file, model=cluster.model_name)
        self._address: Future[str] = Future()
        self._supervision: Supervision | None = None
        self._is_successor = state_file(Path(run_dir)).exists()
        self._loop: asyncio.AbstractEventLoop  # once there is a supervision
        self._thread = threading.Thread(
            target=self._run, args=(cluster, Path(run_dir)), name="supervisor", daemon=True
        )
        self._thread.start()

    def address(self) -> str:
        """host:port of the control service, once it serves. Raises what kept it from serving."""
        return self._address.result()

    def stop(self) -> None:
        """End all replicas; returns when none of their processes is left."""
        if self._supervision is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._supervision.stop)
        self._thread.join()

    def _run(self, cluster: ClusterConfig, run_dir: Path) -> None:
        try:
            uvloop.run(self._supervise(cluster, run_dir))
        except Exception as error:
            log.exception("the supervisor ends")
            if not self._address.done() and not self._is_successor:
                self._address.set_exception(error)  # it never served: report to its starter
                return
            logging.shutdown()
            os._exit(1)  # Ray starts it again, and it adopts

    async def _supervise(self, cluster: ClusterConfig, run_dir: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._supervision = Supervision(cluster, run_dir)
        await self._supervision.run(self._address.set_result)


class SupervisorHandle:
    """Starts, finds and stops the supervisor: a named Ray actor that outlives the caller. Every
    method blocks on Ray, to which this process must be connected."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def start(cls, config: ClusterConfig, run_dir: Path) -> Self:
        """Have Ray start it, and restart it for ever. An existing one stays as it is."""
        options = ray.remote(SupervisorActor).options(
            name=NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=4,
            num_cpus=0,
            resources=_HEAD,
        )
        return cls(options.remote(config, str(run_dir)))

    @classmethod
    def find(cls) -> Self | None:
        try:
            return cls(ray.get_actor(NAME, namespace=NAMESPACE))
        except ValueError:
            return None

    def address(self, within_s: float = _ANSWER_WITHIN_S) -> str:
        """The announced address of its control service. Raises UnavailableError."""
        give_up_at = time.monotonic() + within_s
        while True:
            try:
                left_s = max(0.0, give_up_at - time.monotonic())
                address: str = ray.get(self._actor.address.remote(), timeout=left_s)
                return address
            except ActorUnavailableError as error:  # Ray is restarting it
                if time.monotonic() > give_up_at:
                    raise _not_there(error) from error
                time.sleep(_ASK_AGAIN_S)
            except RayError as error:
                raise _not_there(error) from error

    def stop(self, within_s: float = _ANSWER_WITHIN_S) -> bool:
        """End every replica, then the supervisor. True: it confirmed that no replica is left."""
        try:
            ray.get(self._actor.stop.remote(), timeout=within_s)
        except RayError:  # dead, or no answer: the end of Ray ends the rest
            return False
        self._actor.__ray_terminate__.remote()
        return True


def _not_there(error: RayError) -> UnavailableError:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return UnavailableError(f"the supervisor does not start: {one_line(cause)}")
