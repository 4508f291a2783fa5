"""A worker's command line, port and metrics."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.config.workers import WorkerSettings
from cluster.pools.role_plan import Role
from cluster.worker.rank import free_port
from engine.api import Engine
from engine.wire import read_spec
from kv_transfer.layout import NULL_BLOCK


async def test_a_worker_listens_at_the_port_of_its_settings_and_so_does_the_next_at_once(
    kit: Any,
) -> None:
    port = free_port("127.0.0.1")
    settings = WorkerSettings(heartbeat_s=0.05, port=port, metrics_port=None)
    for _ in range(2):
        async with kit.running_worker("decode-0", Role.DECODE, settings=settings) as worker:
            assert worker.address == f"127.0.0.1:{port}"
            async with grpc.aio.insecure_channel(worker.address) as channel:
                request = health_pb2.HealthCheckRequest()
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


WITH_METRICS = WorkerSettings(heartbeat_s=0.05)


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        return str(answer.read(), "utf-8")


async def test_metrics_are_served_with_the_workers_labels(kit: Any) -> None:
    async with kit.running_worker("decode-7", Role.DECODE, settings=WITH_METRICS) as worker:
        text = await asyncio.to_thread(scrape, worker.metrics_address)
    assert 'baton_worker_num_orphans{pool="decode",worker="decode-7"} 0.0' in text
    assert "baton_worker_steps_total" in text


async def test_quarantined_memory_is_a_metric_in_bytes(kit: Any) -> None:
    async with kit.running_worker("decode-7", Role.DECODE, settings=WITH_METRICS) as worker:

        async def tell(num_bytes: int) -> None:
            line = f'baton_kv_quarantined_bytes{{pool="decode",worker="decode-7"}} {num_bytes}.0'
            async with asyncio.timeout(10):
                while line not in await asyncio.to_thread(scrape, worker.metrics_address):
                    await worker._load_now()  # no registrar asks for it here

        async def ask(command: Callable[[Engine], Any]) -> Any:
            return await asyncio.wrap_future(worker.engine.call(command))

        spec = read_spec(kit.make_spec("held", 100))
        reserved = await ask(lambda engine: engine.reserve(spec))
        layout = worker.rank.model.layout
        counts = [sum(block != NULL_BLOCK for block in ids) for ids in reserved.block_ids]
        assert counts == [13, 4]  # all of the prompt; its last window
        num_bytes = sum(n * layout.rank_block_bytes(g, 0, 1) for g, n in enumerate(counts))
        await tell(0)
        await ask(lambda engine: engine.release(spec.request_id, quarantine=True))
        await tell(num_bytes)
        await ask(lambda engine: engine.unquarantine(spec.request_id))
        await tell(0)
