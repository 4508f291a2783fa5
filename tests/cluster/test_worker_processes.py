"""Workers as processes without Ray: fake engine, KV over UCX, a registry inside the test."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from baton.config.workers import RegistryConfig
from baton.v1 import control_pb2
from cluster.registry.control_service import Changes, fleet_message, serve
from cluster.registry.registry import Registry
from tests.cluster.fleet_processes import Fleet, started
from tests.cluster.worker_process import ROOT, command
from tests.identities import OPERATOR

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = """
model: fake
pools:
  prefill: {role: prefill, replicas: 2}
  decode: {role: decode, replicas: 2}
engine:
  backend: fake
  block_size: 8
  num_blocks: 512
  num_regions: 2
  max_num_seqs: 16
  max_num_batched_tokens: 64
  fake: {window: 20, vocab_size: 50000, prefill_token_s: 0.0005, decode_step_s: 0.003}
transfer: {renew_within_s: 2.0, ack_timeout_s: 3.0}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    config = tmp_path_factory.mktemp("fleet") / "cluster.yaml"
    config.write_text(CONFIG)
    async with started(config) as fleet:
        yield fleet


async def test_two_and_two_workers_hand_off_over_ucx_with_the_oracles_tokens(
    fleet: Fleet, kit: Any
) -> None:
    async def run(number: int) -> None:
        prefill, decode = f"prefill-{number % 2}", f"decode-{number // 2 % 2}"
        link = await kit.decode_link(fleet.address(decode), f"router-{number}").open()
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


async def test_a_worker_of_another_model_ends_and_says_why(fleet: Fleet, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(CONFIG.replace("vocab_size: 50000", "vocab_size: 40000"))
    process = await asyncio.create_subprocess_exec(
        *command(other, "decode", fleet.control, "decode-9"),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert "OtherModelError: worker decode-9 loaded fake: its weights or" in said.decode()
    assert len(fleet.registry.workers()) == 4


async def test_workers_serve_on_while_the_registry_is_gone_and_come_back_to_it(
    tmp_path: Path, kit: Any
) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(CONFIG)

    def fresh() -> Registry:
        return Registry(RegistryConfig(), time.monotonic)

    live = control_pb2.WORKER_STATE_LIVE
    registry = fresh()
    async with serve(registry, Changes(), "127.0.0.1:0", OPERATOR) as control:
        fleet = Fleet(registry, control, config)
        await fleet.start("decode", 0)
        await fleet.until(lambda seen: [w.state for w in seen.workers] == [live])
        address = fleet.address("decode-0")
    try:
        link = await kit.decode_link(address, "router-a").open()
        spec = kit.make_spec("alone", 60)
        await link.reserve(spec)
        await link.until(lambda: link.of("alone").finished)
        assert link.of("alone").in_order() == kit.oracle.tokens(spec)
        await link.close()
        fleet.registry = fresh()
        async with serve(fleet.registry, Changes(), control, OPERATOR):
            await fleet.until(lambda seen: [w.state for w in seen.workers] == [live])
    finally:
        await fleet.end()


@pytest.mark.parametrize("registry_is", ["restarted", pytest.param("gone", marks=pytest.mark.full)])
async def test_a_drain_needs_no_registry_what_runs_finishes_and_the_worker_leaves_in_good_order(
    tmp_path: Path, kit: Any, registry_is: str
) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(CONFIG + "worker: {drain_timeout_s: 55}\n")
    draining = [control_pb2.WORKER_STATE_DRAINING]
    starting = [control_pb2.WORKER_STATE_STARTING]  # registered, and not yet heard
    registry = Registry(RegistryConfig(), time.monotonic)
    async with contextlib.AsyncExitStack() as stack:
        async with serve(registry, Changes(), "127.0.0.1:0", OPERATOR) as control:
            fleet = Fleet(registry, control, config)
            stack.push_async_callback(fleet.end)
            await fleet.start("decode", 0)
            await fleet.until(lambda seen: _states(seen) == [control_pb2.WORKER_STATE_LIVE])
            link = await kit.decode_link(fleet.address("decode-0"), "router-a").open()
            stack.push_async_callback(link.close)
            spec = kit.make_spec("last", 60)
            spec.sampling.max_tokens = 1000  # three seconds and more
            await link.reserve(spec)
            await link.until(lambda: link.of("last").tokens)
            if registry_is == "restarted":
                fleet.processes["decode-0"].terminate()
                await fleet.until(lambda seen: _states(seen) == draining)
        if registry_is == "restarted":
            fleet.registry = Registry(RegistryConfig(), time.monotonic)
            await stack.enter_async_context(serve(fleet.registry, Changes(), control, OPERATOR))
            await fleet.until(lambda seen: _states(seen) not in ([], starting))
            assert _states(fleet_message(fleet.registry)) == draining
            assert not link.of("last").finished
        else:
            fleet.processes["decode-0"].terminate()
        await link.until(lambda: link.of("last").finished, 60)
        assert link.of("last").in_order() == kit.oracle.tokens(spec)
        assert await asyncio.wait_for(fleet.processes["decode-0"].wait(), 15) == 0


def _states(seen: control_pb2.WatchFleetResponse) -> list[int]:
    return [worker.state for worker in seen.workers]
