"""Where a worker listens: on pods at a port that network policies name."""

from __future__ import annotations

from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.config.workers import WorkerSettings
from cluster.pools.role_plan import Role
from cluster.worker.rank import free_port


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
