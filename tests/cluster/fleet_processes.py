"""Worker processes without Ray and the registry they stand in."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from baton.config.cluster import load_config
from baton.config.workers import RegistryConfig
from baton.v1 import common_pb2, control_pb2
from cluster.pools.pool_settings import own_settings
from cluster.registry.control_service import Changes, fleet_message, serve
from cluster.registry.registry import Registry
from tests.cluster.worker_process import ROOT, command
from tests.identities import OPERATOR

Happened = Callable[[control_pb2.WatchFleetResponse], bool]


@dataclass
class Fleet:
    registry: Registry
    control: str
    config: Path
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def start(self, pool: str, index: int) -> None:
        worker_id = f"{pool}-{index}"
        self.processes[worker_id] = await asyncio.create_subprocess_exec(
            *command(self.config, pool, self.control, worker_id), cwd=ROOT
        )

    def worker(self, worker_id: str) -> control_pb2.FleetWorker:
        fleet = fleet_message(self.registry)
        return next(w for w in fleet.workers if w.info.ref.worker_id == worker_id)

    def address(self, worker_id: str) -> str:
        return self.worker(worker_id).info.address

    def ref(self, worker_id: str) -> common_pb2.WorkerRef:
        return self.worker(worker_id).info.ref

    async def until(self, happened: Happened, timeout_s: float = 60) -> None:
        """Poll the registry: what it knows comes from other processes."""
        give_up_at = time.monotonic() + timeout_s
        while not happened(fleet_message(self.registry)):
            assert time.monotonic() < give_up_at, fleet_message(self.registry)
            for worker_id, process in self.processes.items():
                assert process.returncode in (None, 0, -signal.SIGKILL), worker_id
            await asyncio.sleep(0.05)

    async def kill(self, worker_id: str) -> None:
        """Returns once its process is over."""
        self.processes[worker_id].send_signal(signal.SIGKILL)
        await asyncio.wait_for(self.processes[worker_id].wait(), 15)

    async def end(self) -> None:
        """SIGINT, so that rank 0 takes its other ranks along; whoever lingers is killed."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        for process in self.processes.values():
            try:
                await asyncio.wait_for(process.wait(), 15)
            except TimeoutError:
                process.kill()
                await process.wait()


@contextlib.asynccontextmanager
async def started(config: Path) -> AsyncIterator[Fleet]:
    """All workers of a cluster file, live."""
    cluster = load_config(config)
    pools, registry = cluster.pools, Registry(RegistryConfig(), time.monotonic)
    for settings in own_settings(cluster).values():
        registry.pools.add(settings, settings.shape.replicas)
    async with serve(registry, Changes(), "127.0.0.1:0", OPERATOR) as control:
        fleet = Fleet(registry, control, config)
        try:
            places = [(name, i) for name, pool in pools.items() for i in range(pool.replicas)]
            await asyncio.gather(*(fleet.start(*place) for place in places))
            await fleet.until(
                lambda seen: all(p.live_replicas == p.desired_replicas for p in seen.pools)
            )
            yield fleet
        finally:
            await fleet.end()
