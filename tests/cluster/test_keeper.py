"""A keeper over a real registry; what it would have Ray do is written down instead."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from cluster.config import RegistryConfig, SupervisorConfig
from cluster.control_service import Changes
from cluster.keeper import Ground, Keeper
from cluster.rank_ends import RankEnd
from cluster.registry import Progress, Registration, Registry, Role
from cluster.replica import Replica, ReplicaName, Replicas

ADOPTED = Replica(ReplicaName("decode", 1, generation=1), {}, ())


class WrittenDown:
    """Replicas of which only the end is asked for."""

    def __init__(self) -> None:
        self.destroyed: list[ReplicaName] = []

    def destroy(self, replica: Replica) -> bool:
        self.destroyed.append(replica.name)
        return True


async def test_a_drain_goes_on_when_the_supervisor_is_back_before_its_worker_registers() -> None:
    registry, replicas = Registry(RegistryConfig(), time.monotonic), WrittenDown()
    registry.add_pool("decode", Role.DECODE, 1, max_replicas=2)
    config: Any = None  # of replicas to start: there are none
    with ThreadPoolExecutor(1) as executor:
        ground = Ground(
            SupervisorConfig(), registry, Changes(), cast(Replicas, replicas), executor, config
        )
        keeper = Keeper("decode", 1, ground, ADOPTED)
        running = asyncio.create_task(keeper.run())
        keeper.let_go()
        await asyncio.wait({running}, timeout=0.1)
        assert replicas.destroyed == []  # it drains: only the registry has not heard of it yet

        stream = registry.register(Registration("decode-1", 7, "decode", b""))
        assert stream is not None
        registry.heartbeat(stream, Progress(5, True, 0.0, 0.01), b"", draining=False)
        async with asyncio.timeout(10):
            while True:
                if registry.drain_asked(stream):
                    break
                await asyncio.sleep(0.01)
        assert replicas.destroyed == []

        keeper.ended(RankEnd(ADOPTED.name, 0, None))
        await asyncio.wait_for(running, 10)
        assert replicas.destroyed == [ADOPTED.name]
