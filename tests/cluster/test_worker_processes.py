"""Workers as processes without Ray: fake engine, KV over UCX, a registry inside the test."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import common_pb2, control_pb2
from cluster.control_service import Changes, fleet_message, serve
from cluster.registry import Registry, RegistryConfig, Role

CONFIG = """
model: fake
pools:
  prefill: {role: prefill, replicas: 2}
  decode: {role: decode, replicas: 2}
engine:
  backend: fake
  block_size: 8
  num_blocks: 256
  num_regions: 2
  max_num_seqs: 16
  max_num_batched_tokens: 64
  fake: {window: 20, vocab_size: 50000, prefill_token_s: 0.0005, decode_step_s: 0.003}
transfer: {renew_within_s: 2.0, ack_timeout_s: 3.0}
"""


@dataclass
class Fleet:
    """Worker processes and the registry they stand in."""

    registry: Registry
    control: str
    config: Path
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def start(self, pool: str, index: int) -> None:
        worker_id = f"{pool}-{index}"
        self.processes[worker_id] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cluster.worker_process", "--config", str(self.config),
            "--pool", pool, "--control", self.control, "--worker-id", worker_id,
        )  # fmt: skip

    def worker(self, worker_id: str) -> control_pb2.FleetWorker:
        fleet = fleet_message(self.registry.snapshot())
        return next(w for w in fleet.workers if w.info.ref.worker_id == worker_id)

    def address(self, worker_id: str) -> str:
        return self.worker(worker_id).info.address

    def ref(self, worker_id: str) -> common_pb2.WorkerRef:
        return self.worker(worker_id).info.ref

    async def until(self, happened: Any, timeout_s: float = 30) -> None:
        """Poll the registry: what it knows comes from other processes."""
        give_up_at = time.monotonic() + timeout_s
        while not happened(fleet_message(self.registry.snapshot())):
            assert time.monotonic() < give_up_at, fleet_message(self.registry.snapshot())
            await asyncio.sleep(0.05)

    def kill(self, worker_id: str) -> None:
        self.processes[worker_id].send_signal(signal.SIGKILL)

    async def end(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    config = tmp_path / "cluster.yaml"
    config.write_text(CONFIG)
    registry = Registry(RegistryConfig(), time.monotonic)
    for role in (Role.PREFILL, Role.DECODE):
        registry.add_pool(role.value, role, 2)
    async with serve(registry, Changes(), "127.0.0.1:0") as control:
        fleet = Fleet(registry, control, config)
        try:
            await asyncio.gather(
                *(fleet.start(pool, i) for pool in ("prefill", "decode") for i in (0, 1))
            )
            await fleet.until(lambda seen: sum(p.live_replicas for p in seen.pools) == 4)
            yield fleet
        finally:
            await fleet.end()


async def test_two_and_two_workers_hand_off_over_ucx_with_the_oracles_tokens(
    fleet: Fleet, kit: Any
) -> None:
    async def run(number: int) -> None:
        prefill, decode = f"prefill-{number % 2}", f"decode-{number // 2 % 2}"
        link = kit.decode_link(fleet.address(decode), f"router-{number}")
        await link.open()
        router = kit.mini_router(fleet.address(prefill), link)
        spec = kit.make_spec(f"r{number}", 30 + 40 * number)
        assert await router.generate(spec, fleet.ref(prefill)) == kit.oracle.tokens(spec)
        await router.close()
        await link.close()

    await asyncio.gather(*(run(number) for number in range(8)))
    await fleet.until(
        lambda seen: all(
            w.load.num_free_blocks == w.load.num_blocks and w.load.num_running == 0
            for w in seen.workers
        )
    )
