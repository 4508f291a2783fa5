"""What the router itself costs: a router process between a client and workers that cost nothing.

Client, router and workers are three processes on loopback. A worker answers at once and computes
nothing: a reservation, a first token, a handoff that moves nothing, and every `STEP_S` one message
with one token for each of its requests. So the time to first token is the router's and gRPC's; the
same three calls made by the client itself (`direct`) are the part of it that no router can save.
Placement is timed apart: one request's way through the queue of an idle router, index look-ups and
booking included, for fleets of several sizes.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import numpy as np
import psutil
import uvloop

from baton.clock import LoopClock
from baton.config.router import RouterConfig
from baton.errors import BatonError
from baton.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2
from bench.report import markdown
from kv_transfer.block_hash import SHARED_BY_ALL, BlockHash
from router.fleet.fleet import Fleet, WorkerState
from router.fleet.worker_facts import WorkerFacts
from router.placement.admission import Admission
from router.placement.native_index import make_index
from router.placement.prefix_index import PrefixIndex
from router.placement.ticket import Placed, PromptBlocks
from tests.link_stub import LinkStub, StubCall
from tests.router.scripted_worker import FINGERPRINT, MODEL

NUM_PROMPT_TOKENS = 400
NUM_TOKENS = 64
NUM_TOKENS_ALONE = 4
CONCURRENCY = 64
NUM_ALONE = 200
NUM_TOGETHER = 500
FLEETS = (10, 100, 1000)
NUM_PLACEMENTS = 300


# --- processes ------------------------------------------------------------------------------------


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[tuple[list[str], psutil.Process]]:
    """A Python process and the words of its first line."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert started.stdout is not None
        words = (await started.stdout.readline()).decode().split()
        yield words, psutil.Process(started.pid)
    finally:
        started.terminate()
        await started.wait()


def router_arguments(folder: Path, control: str) -> tuple[str, ...]:
    config = folder / "cluster.yaml"
    config.write_text(f"served_model_name: {MODEL}\nrouter:\n  local_prefill: never\n")
    where = ("--control", control, "--config", str(config), "--listen", "127.0.0.1:0")
    return ("-m", "router", *where, "--log-level", "warning")


# --- through the router ---------------------------------------------------------------------------


@dataclass
class Run:
    """What a number of requests took; seconds."""

    ttft_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    router_cpu_s: float = 0.0
    num_tokens: int = 0


def prompts(count: int) -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(count):
        yield "".join(rng.choices("abcdefghij ", k=NUM_PROMPT_TOKENS))


async def ask(
    stub: router_pb2_grpc.RouterServiceStub, prompt: str, num_tokens: int, run: Run
) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=num_tokens)
    request = router_pb2.GenerateRequest(model=MODEL, text=prompt, sampling=sampling, seed=1)
    start, ids = time.perf_counter(), 0
    async for response in stub.Generate(request):
        if response.HasField("tokens"):
            if not ids:
                run.ttft_s.append(time.perf_counter() - start)
            ids += len(response.tokens.ids)
    assert ids == num_tokens, ids
    run.num_tokens += ids


async def many(
    stub: router_pb2_grpc.RouterServiceStub, router: psutil.Process, count: int, at_once: int
) -> Run:
    """`count` requests, `at_once` of them at any time; short ones if they come one by one."""
    num_tokens = NUM_TOKENS_ALONE if at_once == 1 else NUM_TOKENS
    run, todo = Run(), prompts(count)

    async def client() -> None:
        for prompt in todo:
            await ask(stub, prompt, num_tokens, run)

    cpu, start = router.cpu_times(), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(at_once)))
    run.wall_s = time.perf_counter() - start
    after = router.cpu_times()
    run.router_cpu_s = after.user + after.system - cpu.user - cpu.system
    return run


async def read_lease(session: StubCall) -> worker_pb2.Lease:
    while True:
        response = await session.read()
        assert isinstance(response, worker_pb2.SessionResponse), "the session has ended"
        if response.reserved:
            return response.reserved[0].lease


async def direct(prefill: str, decode: str) -> list[float]:
    """Time to a first token when the client talks to the workers itself, seconds."""
    took = []
    p, d = LinkStub(prefill), LinkStub(decode)
    session = d.session()
    await session.write(worker_pb2.SessionRequest(open=worker_pb2.OpenSession(router_id="bench")))
    for number in range(NUM_ALONE):
        spec = worker_pb2.RequestSpec(
            request_id=str(number), attempt=1, token_ids=bytes(4 * NUM_PROMPT_TOKENS)
        )
        reserve = worker_pb2.Reserve(spec=spec, writer=common_pb2.WorkerRef(worker_id="p0"))
        start = time.perf_counter()
        await session.write(worker_pb2.SessionRequest(reserve=reserve))
        lease = await read_lease(session)
        call = await p.prefill(worker_pb2.PrefillRequest(spec=spec, lease=lease))
        await call.read()
        took.append(time.perf_counter() - start)
        call.cancel()
        cancel = worker_pb2.Cancel(request_id=str(number), attempt=1)
        await session.write(worker_pb2.SessionRequest(cancel=cancel))
    for stub in (p, d):
        await stub.close()
    return took


async def through_router() -> tuple[list[float], Run, Run]:
    """Direct times, requests one by one, requests at once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with process("-m", "bench.free_worker") as (addresses, _):
            control, prefill, decode = addresses
            before = await direct(prefill, decode)
            arguments = router_arguments(folder, control)
            async with (
                process(*arguments) as (words, router),
                grpc.aio.insecure_channel(words[-1]) as channel,
            ):
                stub = router_pb2_grpc.RouterServiceStub(channel)
                await many(stub, router, 20, 4)  # warms up
                alone = await many(stub, router, NUM_ALONE, 1)
                together = await many(stub, router, NUM_TOGETHER, CONCURRENCY)
    return before, alone, together


# --- placement ------------------------------------------------------------------------------------


def fleet_of(size: int, config: RouterConfig, index: PrefixIndex) -> Fleet:
    """Half prefill and half decode workers, each holding a thousand blocks of its own."""
    fleet = Fleet(config, time.monotonic, lambda: None)
    rng = random.Random(0)
    for number in range(size):
        facts = WorkerFacts(
            worker_id=f"w{number}",
            incarnation=1,
            can_prefill=number % 2 == 0,
            can_decode=number % 2 == 1,
            address="",
            model=MODEL,
            kv_fingerprint=FINGERPRINT,
            block_size=16,
            num_blocks=100_000,
            max_model_len=8192,
            max_request_tokens=0,
            max_held_tokens=0,
            max_num_seqs=256,
            vocab_size=257,
            kv_bytes_per_token=1 << 17,
            ref=common_pb2.WorkerRef(worker_id=f"w{number}"),
        )
        entry = fleet.add(facts)
        fleet.set_state(entry, WorkerState.LIVE)
        fleet.set_connected(entry, True)
        index.store(entry.slot, None, [BlockHash(rng.randbytes(16)) for _ in range(1000)])
    return fleet


async def placement_us(size: int) -> float:
    """Median microseconds from the queue to a booked placement, and back."""
    config, index = RouterConfig(), make_index(200_000)
    fleet = fleet_of(size, config, index)
    admission = Admission(config, fleet, index, LoopClock(), random.Random(0))
    took = []
    rng = np.random.default_rng(0)
    for _ in range(NUM_PLACEMENTS):
        tokens = rng.integers(0, 256, 1024, dtype=np.uint32)
        prompt = PromptBlocks(tokens, SHARED_BY_ALL)
        prompt.hashes(FINGERPRINT, 16)
        start = time.perf_counter()
        answer: asyncio.Future[Placed | BatonError] = asyncio.get_running_loop().create_future()
        admission.enter(admission.ticket(prompt, 64), answer.set_result)
        placed = await answer
        assert isinstance(placed, Placed)
        took.append(time.perf_counter() - start)
        fleet.release(placed.booking)
    fleet.check_integrity()
    return statistics.median(took) * 1e6


# --- the report -----------------------------------------------------------------------------------


def _ms(seconds: list[float], share: float = 0.5) -> str:
    return f"{float(np.quantile(seconds, share)) * 1e3:.2f}"


async def report() -> str:
    before, alone, together = await through_router()
    added = (statistics.median(alone.ttft_s) - statistics.median(before)) * 1e3
    requests = len(together.ttft_s)
    one_by_one = [
        ["TTFT direct, ms", _ms(before), _ms(before, 0.9)],
        ["TTFT through the router, ms", _ms(alone.ttft_s), _ms(alone.ttft_s, 0.9)],
        ["added by the router, ms", f"{added:.2f}", ""],
        [f"TTFT, {CONCURRENCY} at once, ms", _ms(together.ttft_s), _ms(together.ttft_s, 0.9)],
    ]
    rates = [
        ["requests/s", f"{requests / together.wall_s:.0f}"],
        ["tokens/s", f"{together.num_tokens / together.wall_s:.0f}"],
        ["router CPU per request, ms", f"{together.router_cpu_s / requests * 1e3:.2f}"],
        [
            "router CPU per token, us",
            f"{together.router_cpu_s / together.num_tokens * 1e6:.0f}",
        ],
        ["router CPU busy, of one core", f"{together.router_cpu_s / together.wall_s:.2f}"],
    ]
    fleets = [[f"{size} workers", f"{await placement_us(size):.0f}"] for size in FLEETS]
    return "\n\n".join(
        (
            markdown(("one at a time", "median", "p90"), one_by_one),
            markdown((f"{CONCURRENCY} at once, {NUM_TOKENS} tokens each", "value"), rates),
            markdown(("placement", "median us"), fleets),
        )
    )


if __name__ == "__main__":
    print(f"{__doc__}\n{uvloop.run(report())}")
