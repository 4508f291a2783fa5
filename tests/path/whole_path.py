"""Fleets of real processes around a tiny checkpoint, and a client's view of them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import yaml

from baton.client import AsyncClient
from baton.client.events import Finished, HandedOff, Logprobs, Prefilled, Routed, Tokens
from baton.config import settings
from baton.config.engine import EngineConfig
from baton.v1 import (
    common_pb2,
    control_pb2,
    control_pb2_grpc,
    router_pb2,
    worker_pb2,
)
from cluster.worker.rank import free_port
from engine.request import SampledToken, SamplingParams
from engine.run.build import load_lone_engine
from tests.cluster.fleet_processes import Fleet, started
from tests.engine import checkpoints
from tests.engine.greedy import Greedy, run_alone
from tests.link_stub import books_at
from tests.path.oracles import greedy_answer, greedy_tokens, oracle_model
from tests.router.callers import HttpCaller

_REQUEST_S = 60.0
_IDLE_S = 20.0
_LEAVE_S = 20.0
_ROUTER_S = 60.0
_LIVE = control_pb2.WORKER_STATE_LIVE


@dataclass(frozen=True)
class Pool:
    """Workers of one width; `chunk` is what a step may process, in tokens."""

    tp: int = 1
    chunk: int = 64
    replicas: int = 1
    blocks: int = 1024


@dataclass(frozen=True)
class Shape:
    """A fleet: per role a pool of each width. `family` is one of `families.FAMILIES`."""

    family: str
    prefill: tuple[Pool, ...] = (Pool(),)
    decode: tuple[Pool, ...] = (Pool(),)
    block_size: int = 16
    checksum: str = "off"
    overrides: tuple[tuple[str, Any], ...] = ()
    eos: int | None = None

    def __str__(self) -> str:
        widths = "".join(f"-tp{pool.tp}" for pool in self.prefill + self.decode)
        overrides = "".join(f"-{name}={value}" for name, value in self.overrides)
        return f"{self.family}{widths}-{self.decode[0].chunk}{overrides}"

    @property
    def is_narrow(self) -> bool:
        return all(pool.tp == 1 for pool in self.prefill + self.decode)

    @property
    def chunks(self) -> set[int]:
        return {pool.chunk for pool in self.prefill + self.decode}

    def engine(self, chunk: int = 64) -> EngineConfig:
        """Of a lone engine, and what the pools' engines have in common."""
        return EngineConfig(
            block_size=self.block_size,
            num_blocks=1024,
            num_regions=2,
            max_num_seqs=min(32, chunk),
            max_num_batched_tokens=chunk,
            dtype="float32",
            num_threads=1,
        )

    def config(
        self, model: Path, local_prefill: str, http_port: int | None = None
    ) -> dict[str, Any]:
        """What a cluster file says; `name_of` gives the pools their names."""
        return {
            "model": str(model),
            "pools": {
                name_of(role, pool.tp): {
                    "role": role,
                    "replicas": pool.replicas,
                    "tensor_parallel": pool.tp,
                    "engine": {
                        "num_blocks": pool.blocks,
                        "num_regions": num_regions,
                        "max_num_seqs": min(32, pool.chunk),
                        "max_num_batched_tokens": pool.chunk,
                    },
                }
                for role, pools, num_regions in (
                    ("prefill", self.prefill, 2),
                    ("decode", self.decode, 3),
                )
                for pool in pools
            },
            "engine": settings.dump(self.engine(), base=EngineConfig()),
            "transfer": {"checksum": self.checksum},
            "router": {
                "port": 0,
                "http": {"port": http_port},
                "placement": {"local_prefill": local_prefill},
            },
            "control": {"port": 0},
        }

    def save(self, folder: Path) -> None:
        """Write the checkpoint."""
        oracle_model(self.family, self.overrides).save_pretrained(folder)
        checkpoints.save_tokenizer(folder)
        if self.eos is not None:
            checkpoints.set_eos(folder, self.eos)


def name_of(role: str, tp: int) -> str:
    return f"{role}-tp{tp}"


@dataclass
class Answer:
    """What a client saw of one request."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprobs] = field(default_factory=list)
    routed: list[Routed] = field(default_factory=list)
    prefilled: Prefilled | None = None
    handed_off: HandedOff | None = None
    finished: Finished | None = None

    @property
    def num_cached_tokens(self) -> int:
        assert self.prefilled is not None
        assert self.finished is not None
        assert self.finished.usage.num_cached_tokens == self.prefilled.num_cached_tokens
        return self.prefilled.num_cached_tokens

    @property
    def greedy(self) -> Greedy:
        """Of a greedy request that asked for log-probabilities."""
        return Greedy(self.ids, [one.logprob for one in self.logprobs])


async def ask(
    router: AsyncClient | HttpCaller,
    prompt: Sequence[int],
    *,
    tries: int | None = 1,
    streams: asyncio.Event | None = None,
    **options: Any,
) -> Answer:
    """One request to its end; greedy, and past any end of sequence, unless `options` differ.

    An option of None is left to the router. `tries` None: as many as it takes. `streams` is set at
    the second token: decoding has begun. Over HTTP neither is known, nor where anything ran.
    """
    asked: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 12,
        "ignore_eos": True,
        "timeout_s": _REQUEST_S,
        **options,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    if isinstance(router, HttpCaller):
        return await _ask_over_http(router, prompt, asked)
    answer = Answer()
    async for event in router.generate(token_ids=prompt, **asked):
        assert answer.finished is None, f"{event} after the end"
        match event:
            case Routed():
                answer.routed.append(event)
            case Prefilled():
                answer.prefilled = event
            case HandedOff():
                answer.handed_off = event
            case Tokens():
                assert not event.ids or event.index == len(answer.ids), "a gap or a repetition"
                answer.ids += event.ids
                answer.text += event.text
                answer.logprobs += event.logprobs
                if streams is not None and len(answer.ids) > 1:
                    streams.set()
            case Finished():
                answer.finished = event
            case _:
                assert tries is None, f"nothing failed, and yet: {event}"
    assert answer.finished is not None
    assert answer.finished.usage.num_prompt_tokens == len(prompt)
    assert answer.finished.usage.num_output_tokens == len(answer.ids)
    assert tries is None or len(answer.routed) == tries, answer.routed
    return answer


async def _ask_over_http(
    router: HttpCaller, prompt: Sequence[int], asked: dict[str, Any]
) -> Answer:
    """Each token of these models is a word: its id."""
    sampling = common_pb2.SamplingParams()
    for name in asked.keys() & sampling.DESCRIPTOR.fields_by_name.keys():
        setattr(sampling, name, asked.pop(name))
    asked["timeout_ms"] = round(1e3 * asked.pop("timeout_s"))
    ids = router_pb2.TokenIds(ids=prompt)
    request = router_pb2.GenerateRequest(token_ids=ids, sampling=sampling, **asked)
    seen = await router.ask(request)
    answer = Answer(text=seen.text, ids=[int(word[1:]) for word in seen.text.split()])
    answer.logprobs = [Logprobs(logprob, 0, ()) for logprob in seen.logprobs]
    assert seen.usage.prompt_tokens == len(prompt)
    assert seen.usage.completion_tokens == len(answer.ids) == seen.num_tokens
    return answer


# --- processes ----------------------------------------------------------------------------------


@dataclass
class WholePath:
    """A running fleet and the routers before it; `folder` holds its checkpoint."""

    shape: Shape
    folder: Path
    fleet: Fleet
    addresses: list[str]
    """Of the three routers below, in their order."""
    far: AsyncClient
    """Every prompt is prefilled in the prefill pool."""
    near: AsyncClient
    """Every prompt is prefilled on the decode worker."""
    far_again: AsyncClient
    """As `far`: another process."""
    far_over_http: HttpCaller
    """As `far`: its other door."""

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What transformers says."""
        return greedy_tokens(self.shape.family, self.shape.overrides, tuple(prompt), num_tokens)

    def greedy_answer(self, prompt: Sequence[int], num_tokens: int) -> Greedy:
        """The same, with how likely it holds each token."""
        return greedy_answer(self.shape.family, self.shape.overrides, tuple(prompt), num_tokens)

    def alone(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        chunk: int = 64,
    ) -> list[list[SampledToken]]:
        """What one engine in this process, with fresh memory, says to all prompts in one batch."""
        config = replace(self.shape.engine(chunk), device="cpu")
        return run_alone(load_lone_engine(str(self.folder), config), prompts, sampling)

    async def holdings(self) -> dict[str, worker_pb2.CheckIntegrityResponse]:
        """What each worker holds now; none of its parts may disagree with another."""
        found = {}
        for worker_id in self.fleet.processes:
            found[worker_id] = await books_at(self.fleet.address(worker_id))
            assert not found[worker_id].problems, (worker_id, found[worker_id])
        return found

    async def until_idle(self) -> None:
        """Wait until no worker holds anything for a request: fences and acks take a moment."""
        held: dict[str, worker_pb2.CheckIntegrityResponse] = {}
        try:
            async with asyncio.timeout(_IDLE_S):
                while not held or any(map(_holds_anything, held.values())):
                    held = await self.holdings()
        except TimeoutError:
            raise AssertionError(f"something is still held: {held}") from None


def _holds_anything(held: worker_pb2.CheckIntegrityResponse) -> bool:
    """Cached blocks that nobody uses are free."""
    requests = held.num_waiting + held.num_running + held.num_reserved + held.num_exporting
    moves = held.num_open_leases + held.num_open_handoffs
    return bool(requests + moves + held.num_blocks_in_use + held.num_quarantined_blocks)


@contextlib.asynccontextmanager
async def another_router(path: WholePath, local_prefill: str) -> AsyncIterator[AsyncClient]:
    """One more router process, which uses the same workers."""
    config = write_config(path.shape, path.folder.parent, local_prefill)
    async with (
        routers(path.fleet.control, [config]) as addresses,
        AsyncClient(addresses[0]) as client,
    ):
        await until_routed_to(addresses[0], set(path.fleet.processes))
        yield client


async def until_routed_to(address: str, worker_ids: set[str]) -> None:
    """Wait until the router at `address` gives work to these workers and no others."""
    known: set[str] = set()
    async with asyncio.timeout(_ROUTER_S), grpc.aio.insecure_channel(address) as channel:
        stub = control_pb2_grpc.FleetServiceStub(channel)
        async for news in stub.WatchFleet(control_pb2.FleetServiceWatchFleetRequest()):
            known = {w.info.ref.worker_id for w in news.fleet.workers if w.state == _LIVE}
            if known == worker_ids:
                return
    raise AssertionError(f"the router's stream ended; it uses {known}")


@contextlib.asynccontextmanager
async def routers(control: str, configs: Sequence[Path]) -> AsyncIterator[list[str]]:
    """A router process for each file, started together; their addresses."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router", "--control", control, "--config", str(config)),
            *("--listen", "127.0.0.1:0", "--log-level", "warning"),
            stdout=asyncio.subprocess.PIPE,
        )
        for config in configs
    ]
    try:
        addresses = []
        for process in processes:
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), _ROUTER_S)).decode()
            assert line.startswith("router listening on "), line
            addresses.append(line.split()[-1])
        yield addresses
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            assert await asyncio.wait_for(process.wait(), _LEAVE_S) == 0
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _drain_all(fleet: Fleet) -> None:
    """Let every worker leave in good order: it checks its pools and tables as the last thing."""
    for process in fleet.processes.values():
        process.send_signal(signal.SIGTERM)
    for worker_id, process in fleet.processes.items():
        assert await asyncio.wait_for(process.wait(), _LEAVE_S) == 0, worker_id
    fleet.processes.clear()


def write_config(
    shape: Shape, folder: Path, local_prefill: str, http_port: int | None = None
) -> Path:
    path = folder / f"{local_prefill}-{http_port}.yaml"
    path.write_text(yaml.safe_dump(shape.config(folder / "model", local_prefill, http_port)))
    return path


@contextlib.asynccontextmanager
async def whole_path(shape: Shape, folder: Path) -> AsyncIterator[WholePath]:
    """All processes of a fleet, ready; at the end every pool is whole and nothing is left."""
    shape.save(folder / "model")
    far, near = (write_config(shape, folder, mode) for mode in ("never", "always"))
    http_port = free_port("127.0.0.1")
    both_doors = write_config(shape, folder, "never", http_port)
    async with started(far) as fleet:
        async with contextlib.AsyncExitStack() as stack:
            configs = (both_doors, near, far)
            addresses = await stack.enter_async_context(routers(fleet.control, configs))
            clients = [await stack.enter_async_context(AsyncClient(a)) for a in addresses]
            caller = HttpCaller(f"127.0.0.1:{http_port}")
            stack.push_async_callback(caller.close)
            path = WholePath(shape, folder / "model", fleet, addresses, *clients, caller)
            await asyncio.gather(*(until_routed_to(a, set(fleet.processes)) for a in addresses))
            yield path
            await path.until_idle()
        await _drain_all(fleet)
