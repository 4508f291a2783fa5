"""Replicas that exist only in memory, and a supervisor over them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path

from baton.config.cluster import ClusterConfig, parse_config
from baton.control.client import ControlClient
from cluster.registry.registry import Registry
from cluster.supervisor.replica import Replica, ReplicaName
from cluster.supervisor.supervisor import Supervision
from cluster.worker.config import WorkerConfig
from kv_transfer.process import ProcessIdentity

MODEL = "models/demo"
POOL = "all"
PROCESS = ProcessIdentity("boot", 1, pid=1, start_time_ticks=1)


def replica_of(pool: str, index: int, serves: bool = True) -> Replica:
    """A replica of a previous supervisor, with one process."""
    return Replica(ReplicaName(pool, index, 1), {}, (process_of(index),), serves)


def process_of(index: int) -> ProcessIdentity:
    return dataclasses.replace(PROCESS, pid=1 + index)


class MemoryReplicas:
    """Implements `Replicas`. Its events hold a method until they are set."""

    def __init__(self, *found: Replica, finds_any: bool = False) -> None:
        """`finds_any`: one serving replica of each pool that is looked for."""
        self._found, self._finds_any = found, finds_any
        self.has_room, self.proves_ends, self.pod_name = True, True, "pod"
        self.may_find, self.may_start = threading.Event(), threading.Semaphore(1 << 20)
        self.may_destroy, self.is_finding = threading.Event(), threading.Event()
        self.may_find.set()
        self.may_destroy.set()
        self.start_errors: list[Exception] = []
        self.destroy_errors: list[Exception] = []
        self.looked_for: list[dict[str, int]] = []
        self.requested: list[ReplicaName] = []
        self.num_begun = 0
        self.started: list[ReplicaName] = []
        self.configs: list[WorkerConfig] = []
        self.destroyed: list[ReplicaName] = []
        self.set_threads: list[str] = []

    def find(self, tp_sizes: Mapping[str, int]) -> list[Replica]:
        self.is_finding.set()
        self.looked_for.append(dict(tp_sizes))
        assert self.may_find.wait(30)
        if self._finds_any:
            return [replica_of(pool, 0) for pool in tp_sizes]
        return [replica for replica in self._found if replica.name.pool in tp_sizes]

    def reserve(
        self, name: ReplicaName, config: WorkerConfig, closed_pods: Collection[str]
    ) -> str | None:
        self.requested.append(name)
        return self.pod_name if self.has_room else None

    def start(self, name: ReplicaName, config: WorkerConfig) -> Replica:
        self.num_begun += 1
        if self.start_errors:
            raise self.start_errors.pop(0)
        assert self.may_start.acquire(timeout=30)
        self.started.append(name)
        self.configs.append(config)
        return Replica(name, {}, (self.process_of(name),))

    def process_of(self, name: ReplicaName) -> ProcessIdentity:
        """The process of a replica that was started here."""
        return process_of(100 + self.started.index(name))

    def set_num_threads(self, replica: Replica, num_threads: int) -> None:
        self.set_threads.append(replica.name.worker_id)

    def destroy(self, replica: Replica) -> bool:
        self.destroyed.append(replica.name)
        assert self.may_destroy.wait(30)
        if self.destroy_errors:
            raise self.destroy_errors.pop(0)
        return self.proves_ends

    def clear(self) -> None:
        """Nothing else is left."""


def cluster_of(replicas: int = 1) -> ClusterConfig:
    pool = {"role": "mixed", "replicas": replicas, "max_replicas": 32}
    return parse_config({"model": MODEL, "pools": {POOL: pool}, "control": {"port": 0}})


@contextlib.asynccontextmanager
async def supervised(
    replicas: MemoryReplicas, cluster: ClusterConfig, run_dir: Path, is_killed: bool = False
) -> AsyncIterator[tuple[Supervision, asyncio.Future[str]]]:
    """A running supervisor and its address. `is_killed`: it ends no replica at the end."""
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    supervision = Supervision(cluster, run_dir, replicas)
    running = asyncio.create_task(supervision.run(address.set_result))
    try:
        yield supervision, address
    finally:
        if is_killed:
            running.cancel()
            await asyncio.wait({running})
        else:
            supervision.stop()
            await asyncio.wait_for(running, 10)


@contextlib.asynccontextmanager
async def controlled(
    replicas: MemoryReplicas, cluster: ClusterConfig, run_dir: Path, is_killed: bool = False
) -> AsyncIterator[tuple[Supervision, ControlClient]]:
    """As `supervised`, with a client of its control service."""
    async with supervised(replicas, cluster, run_dir, is_killed) as (supervision, address):
        with ControlClient(await address) as control:
            yield supervision, control


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that has no event of its own."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def registry_of(supervision: Supervision) -> Registry:
    return supervision._registry  # the wire has no call that registers a worker without a process
