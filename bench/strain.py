"""What one client's load costs the others at the router: `python -m bench.strain`.

1. Two tenants: one asks one thing at a time, alone and beside a tenant that keeps 128 requests
   waiting. Workers are fake engines with the times of real ones, so prompts wait for each other.
2. 2,000 streams whose clients do not read: the router's memory as their answers grow.
3. Prompts of 100,000 tokens: gaps between the tokens of 16 other streams, with and without them.
4. Two router processes on one port: CPU of each, beside one process with the same load.
5. Requests of 3 MB that hold as many values as they can: how long others wait meanwhile for a
   `/health`, that is how long the loop is held, and how much the router grows.
6. Floods of what serves no call, 4 MB/s a connection: the worst gap between the tokens of 16 other
   streams, and the longest that a new client waits for the router's first bytes.

2 to 6 use workers that compute nothing, as bench.router does. Rounds alternate; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
import numpy as np
import psutil
import uvloop

from baton.config.cluster import ClusterConfig, ControlConfig, PoolConfig
from baton.config.engine import EngineConfig, FakeEngineConfig
from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.fleet import Role
from baton.process.interpreter import share_interpreter
from baton.v1 import router_pb2, router_pb2_grpc
from bench.clients import GrpcClient, Load, run
from bench.floods import FLOODS
from bench.report import describe, markdown, progress
from bench.servers import BatonRouter, FreeWorkers
from cluster.local import bring_up as local
from cluster.worker.rank import free_port
from tests.router.grpc_served import RawClient
from tests.router.scripted_worker import MODEL

NUM_ASKED, FLOOD_AT_ONCE, PROMPT_TOKENS, ANSWER_TOKENS = 60, 128, 256, 16
NUM_SLOW, SLOW_CHANNELS, SLOW_STEP_MS, SLOW_TOKENS = 2000, 20, 250, 100
LONG_PROMPT, NUM_LONG, NUM_OTHERS, OTHERS_TOKENS, STEP_MS = 100_000, 10, 16, 400, 20
AT_ONCE, SHORT = 64, 64
BODY_BYTES = 3_000_000
FLOODERS, FLOOD_S = (0, 1, 20, 50), 4.0

Stub = router_pb2_grpc.RouterServiceStub


def quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share))


# --- 1. two tenants -------------------------------------------------------------------------------


async def ttft_ms(stub: Stub, request: router_pb2.GenerateRequest) -> float:
    start, first = time.perf_counter(), 0.0
    async for response in stub.Generate(request):
        if response.HasField("tokens") and not first:
            first = time.perf_counter() - start
    return first * 1e3


def asked_by(tenant: str, rng: np.random.Generator) -> router_pb2.GenerateRequest:
    """Make a request with a prompt that nobody has asked before."""
    request = router_pb2.GenerateRequest(tenant=tenant)
    request.token_ids.ids.extend(rng.integers(10, 2000, PROMPT_TOKENS).tolist())
    request.sampling.max_tokens = ANSWER_TOKENS
    return request


async def two_tenants(address: str, rounds: int) -> list[list[str]]:
    rng = np.random.default_rng(0)
    taken: dict[str, list[float]] = {"alone": [], "beside the flood": [], "the flood's own": []}

    async def flood(stub: Stub) -> None:
        while True:
            taken["the flood's own"].append(await ttft_ms(stub, asked_by("flood", rng)))

    async with grpc.aio.insecure_channel(address) as channel:
        stub = Stub(channel)
        for number in range(1, rounds + 1):
            progress(f"two tenants, round {number} of {rounds}")
            for name in ("alone", "beside the flood"):
                floods = [
                    asyncio.create_task(flood(stub))
                    for _ in range(FLOOD_AT_ONCE if name != "alone" else 0)
                ]
                for _ in range(NUM_ASKED // 2):
                    taken[name].append(await ttft_ms(stub, asked_by("quiet", rng)))
                for task in floods:
                    task.cancel()
                await asyncio.gather(*floods, return_exceptions=True)
    alone = quantile(taken["alone"], 0.99)
    return [
        [name, *(f"{quantile(ms, share):.0f}" for share in (0.5, 0.99)),
         f"{quantile(ms, 0.99) / alone:.2f}"]
        for name, ms in taken.items()
    ]  # fmt: skip


def tenants_cluster() -> ClusterConfig:
    fake = FakeEngineConfig(prefill_token_s=0.0005, decode_step_s=0.01)
    return ClusterConfig(
        model="models/demo",
        pools={
            "prefill": PoolConfig(role=Role.PREFILL, replicas=4),
            "decode": PoolConfig(role=Role.DECODE, replicas=2),
        },
        engine=EngineConfig(backend="fake", fake=fake, max_num_seqs=32, num_blocks=4096),
        router=changed(
            RouterConfig(), port=0, http={"port": None}, placement={"local_prefill": "never"}
        ),
        control=ControlConfig(port=0),
    )


# --- 2. to 4. -------------------------------------------------------------------------------------


@asynccontextmanager
async def routers(count: int = 1) -> AsyncIterator[list[BatonRouter]]:
    async with AsyncExitStack() as stack:
        workers = FreeWorkers()
        stack.push_async_callback(workers.stop)
        await workers.start()
        port = free_port("127.0.0.1") if count > 1 else 0
        started = []
        for _ in range(count):
            router = BatonRouter(workers, shared_port=port)
            stack.push_async_callback(router.stop)
            await router.start()
            started.append(router)
        yield started


def text_request(length: int, num_tokens: int, step_ms: int) -> router_pb2.GenerateRequest:
    request = router_pb2.GenerateRequest(model=MODEL, seed=step_ms, text="a" * length)
    request.sampling.max_tokens = num_tokens
    return request


async def slow_streams() -> list[list[str]]:
    rows: list[list[str]] = []
    async with routers() as (router,), AsyncExitStack() as stack:
        process = psutil.Process(router.tree[0].pid)
        options = (("grpc.use_local_subchannel_pool", 1),)
        stubs = [
            Stub(
                await stack.enter_async_context(grpc.aio.insecure_channel(router.address, options))
            )
            for _ in range(SLOW_CHANNELS)
        ]

        def add(what: str) -> None:
            progress(what)
            rss = process.memory_info().rss
            grown = f"{(rss - before) / NUM_SLOW / 1024:.1f}" if rows else "-"
            rows.append([what, f"{rss / (1 << 20):.0f}", grown])

        before = process.memory_info().rss
        add("no stream yet")
        request = text_request(100, SLOW_TOKENS, SLOW_STEP_MS)
        calls = [stubs[number % SLOW_CHANNELS].Generate(request) for number in range(NUM_SLOW)]
        for call in calls:
            await call.initial_metadata()
        add(f"{NUM_SLOW:,} streams begun")
        for share in (0.25, 0.5, 1.0):
            await asyncio.sleep(SLOW_STEP_MS / 1e3 * SLOW_TOKENS * (share - rows_share(rows)))
            add(f"after {share * SLOW_TOKENS:.0f} tokens each")
        received = 0
        for call in calls:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for response in call:
                    received += len(response.tokens.ids)
        add("all read")
        rows[-1][0] += f" ({received / NUM_SLOW:.0f} tokens each)"
    return rows


def rows_share(rows: Sequence[Sequence[str]]) -> float:
    """How much of the answers the streams have when so many rows are written."""
    return {2: 0.0, 3: 0.25, 4: 0.5}[len(rows)]


async def follow(stub: Stub, into: list[float]) -> None:
    """Note the gaps between a stream's tokens, in ms."""
    last = 0.0
    try:
        async for response in stub.Generate(text_request(100, OTHERS_TOKENS, STEP_MS)):
            if response.HasField("tokens"):
                now = time.perf_counter()
                if last:
                    into.append((now - last) * 1e3)
                last = now
    finally:  # cut off while it stands still, say
        into.append((time.perf_counter() - (last or time.perf_counter())) * 1e3)


async def long_prompts(rounds: int) -> list[list[str]]:
    gaps_ms: dict[str, list[float]] = {"without": [], "with": []}
    async with routers() as (router,), grpc.aio.insecure_channel(router.address) as channel:
        stub = Stub(channel)

        for number in range(1, rounds + 1):
            progress(f"long prompts, round {number} of {rounds}")
            for name, into in gaps_ms.items():
                others = [asyncio.create_task(follow(stub, into)) for _ in range(NUM_OTHERS)]
                for _ in range(NUM_LONG if name == "with" else 0):
                    await ttft_ms(stub, text_request(LONG_PROMPT, 1, STEP_MS))
                await asyncio.gather(*others)
    return [
        [name, *(f"{quantile(ms, share):.1f}" for share in (0.5, 0.99, 0.999, 1.0))]
        for name, ms in gaps_ms.items()
    ]


async def shared_port(rounds: int) -> list[list[str]]:
    cpu_ms: dict[int, list[list[float]]] = {1: [], 2: []}
    async with routers(1) as one, routers(2) as two:
        for number in range(1, rounds + 1):
            progress(f"shared port, round {number} of {rounds}")
            for servers in (one, two):
                client = GrpcClient(servers[0].address, AT_ONCE, None)
                before = [server.cpu_s() for server in servers]
                await run(client, Load(4 * AT_ONCE, AT_ONCE, SHORT, STEP_MS))
                await client.close()
                taken = [
                    (server.cpu_s() - was) / (4 * AT_ONCE) * 1e3
                    for server, was in zip(servers, before, strict=True)
                ]
                cpu_ms[len(servers)].append(taken)
    alone = float(np.median(cpu_ms[1]))
    return [
        [f"{count} at one port", " and ".join(f"{ms:.2f}" for ms in medians),
         " and ".join(f"{ms / alone:.2f}" for ms in medians)]
        for count, taken in cpu_ms.items()
        for medians in [np.median(np.array(taken), axis=0)]
    ]  # fmt: skip


# --- 5. bodies ------------------------------------------------------------------------------------


def full(before: str, item: str, after: str = "]}") -> bytes:
    return f"{before}{','.join([item] * (BODY_BYTES // (len(item) + 1)))}{after}".encode()


BODIES = {
    "nothing": b"",
    "prompt: [{},": full('{"prompt": [', "{}"),
    "prompt: [[],": full('{"prompt": [', "[]"),
    "prompt: 375,000 ids": full('{"prompt": [', "1234567"),
    "prompt: 273,000 ids": full('{"prompt": [', "1234567   "),
    "stop: 36,000 strings": full('{"prompt": "", "stop": [', f'"{"a" * 80}"'),
    "prompt: escapes": full('{"prompt": "', "\\n" * 500, '"}'),
    "messages: [1,": full('{"messages": [', "1"),
    "template's variables": full('{"messages": [], "chat_template_kwargs": {"a": [', "[]", "]}}"),
    "32 KB of lists": full('{"prompt": [', "[]")[:32_000],
    "protobuf: messages": b"\x22\xc0\x8d\xb7\x01" + b"\x0a\x00" * (BODY_BYTES // 2),
}


async def bodies(rounds: int) -> list[list[str]]:
    rows = []
    async with routers() as (router,), grpc.aio.insecure_channel(router.address) as channel:
        generate: Any = channel.unary_stream("/baton.v1.RouterService/Generate")
        process = psutil.Process(router.tree[0].pid)

        def call(body: bytes) -> None:
            path = "/v1/chat/completions" if b"messages" in body[:20] else "/v1/completions"
            connection = http.client.HTTPConnection(router.http_address, timeout=120)
            sent = ("POST", path, body, {"Content-Type": "application/json"})
            connection.request(*(sent if body else ("GET", "/health")))
            connection.getresponse().read()

        async def send(body: bytes) -> None:
            if body[:1] in (b"", b"{"):
                return await asyncio.to_thread(call, body)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await generate(body).read()

        for name, body in BODIES.items():
            progress(f"bodies: {name}")
            waits_ms, before, most = list[float](), process.memory_info().rss, 0
            for _ in range(3 * rounds):
                sending = asyncio.create_task(send(body))
                while not sending.done():
                    start = time.perf_counter()
                    await asyncio.to_thread(call, b"")
                    waits_ms.append((time.perf_counter() - start) * 1e3)
                    most = max(most, process.memory_info().rss)
            grown, spread = (most - before) / (1 << 20), (0.5, 1.0)
            rows.append([name, *(f"{quantile(waits_ms, q):.0f}" for q in spread), f"{grown:.0f}"])
    return rows


# --- 6. floods ------------------------------------------------------------------------------------


async def flooded(router: BatonRouter, kind: str, count: int) -> str:
    progress(f"flood: {kind}, {count}")
    gaps_ms, waits_ms = [0.0], [0.0]

    async def connect() -> None:
        while True:
            began_s = time.perf_counter()
            try:
                with contextlib.suppress(AssertionError, OSError, TimeoutError):
                    async with RawClient.to(router.address):
                        pass
            finally:
                waits_ms.append((time.perf_counter() - began_s) * 1e3)
            await asyncio.sleep(0.05)

    async with grpc.aio.insecure_channel(router.address) as channel:
        others = [asyncio.create_task(follow(Stub(channel), gaps_ms)) for _ in range(NUM_OTHERS)]
        await asyncio.sleep(1.0)
        addresses = (router.address, router.http_address)
        command = (sys.executable, "-m", "bench.floods", kind, str(count), *addresses)
        with subprocess.Popen(command) as flood:  # noqa: ASYNC220  for ms
            others.append(asyncio.create_task(connect()))
            await asyncio.sleep(FLOOD_S)
            flood.kill()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    return f"{max(gaps_ms):.0f}, {max(waits_ms):.0f}"


async def floods() -> list[list[str]]:
    async with routers() as (router,):
        return [
            [kind, *[await flooded(router, kind, count) for count in FLOODERS]] for kind in FLOODS
        ]


# --- the report -----------------------------------------------------------------------------------


async def report(rounds: int) -> str:
    return "\n\n".join(
        (
            markdown(("streams not read", "router MiB", "KiB a stream"), await slow_streams()),
            markdown(
                (f"prompts of {LONG_PROMPT:,} tokens", "gap p50 ms", "p99", "p99.9", "most"),
                await long_prompts(rounds),
            ),
            markdown(
                ("router processes", f"CPU ms a request of {SHORT} tokens, each", "of one alone"),
                await shared_port(rounds),
            ),
            markdown(
                ("a request of 3 MB", "/health p50 ms", "most", "router grows by MiB"),
                await bodies(rounds),
            ),
            markdown(
                ("worst gap, connecting, ms", *(f"{count} flooders" for count in FLOODERS)),
                await floods(),
            ),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.strain")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    share_interpreter()  # else the clients' own threads make each other wait
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    head = describe(f"python -m bench.strain --rounds {rounds}")
    with local.up(tenants_cluster(), on_progress=progress) as cluster:
        rows = uvloop.run(two_tenants(cluster.router_address, rounds))
    tenants = markdown(("TTFT of", "p50 ms", "p99 ms", "of alone"), rows)
    print(f"{head}\n\n{__doc__}\n{tenants}\n\n{uvloop.run(report(rounds))}")


if __name__ == "__main__":
    main()
