"""Fleets of real processes around a tiny checkpoint, a client's view of them, and two oracles."""

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
import numpy as np
import transformers
import yaml

from baton.client import AsyncClient
from baton.config import load_config
from baton.events import Finished, HandedOff, Logprobs, Prefilled, Routed, Tokens
from baton.v1 import worker_pb2, worker_pb2_grpc
from engine.build import build_engine, build_runner, load_model_spec, region_layout
from engine.config import EngineConfig
from engine.local_memory import LocalKvMemory, LocalSink
from engine.request import RequestId, RequestSpec, SampledToken, SamplingParams, TokenEvent
from tests.cluster.fleet_processes import Fleet, started
from tests.engine import checkpoints

_REQUEST_S = 60.0
_IDLE_S = 20.0
_LEAVE_S = 20.0


@dataclass(frozen=True)
class Shape:
    """A fleet of one prefill and one decode pool. `family` is one of `checkpoints.FAMILIES`."""

    family: str
    prefill_tp: int = 1
    decode_tp: int = 1
    chunk: int = 64
    decode_chunk: int | None = None
    """None: as `chunk`."""
    block_size: int = 16
    replicas: int = 1
    decode_blocks: int = 1024
    checksum: str = "off"
    overrides: tuple[tuple[str, Any], ...] = ()
    eos: int | None = None

    def engine(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
            "num_blocks": 1024,
            "num_regions": 2,
            "max_num_seqs": 32,
            "max_num_batched_tokens": self.chunk,
            "dtype": "float32",
            "num_threads": 1,
        }

    def config(self, model: Path, local_prefill: str) -> dict[str, Any]:
        """What a cluster file says; the engine settings are the prefill pool's."""
        decode = {
            "num_blocks": self.decode_blocks,
            "num_regions": 3,
            "max_num_batched_tokens": self.decode_chunk or self.chunk,
        }
        return {
            "model": str(model),
            "pools": {
                "prefill": {
                    "role": "prefill",
                    "replicas": self.replicas,
                    "tensor_parallel": self.prefill_tp,
                },
                "decode": {
                    "role": "decode",
                    "replicas": self.replicas,
                    "tensor_parallel": self.decode_tp,
                    "engine": decode,
                },
            },
            "engine": self.engine(),
            "transfer": {"checksum": self.checksum},
            "router": {"local_prefill": local_prefill, "port": 0},
            "control": {"port": 0},
        }

    def save(self, folder: Path) -> transformers.PreTrainedModel:
        """Write the checkpoint; the model in memory, which knows no end of sequence, is given."""
        model = checkpoints.save(self.family, folder, **dict(self.overrides))
        if self.eos is not None:
            checkpoints.set_eos(folder, self.eos)
        return model


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


async def ask(
    router: AsyncClient, prompt: Sequence[int], *, tries: int | None = 1, **options: Any
) -> Answer:
    """One request to its end; greedy, and past any end of sequence, unless `options` differ.

    An option of None is left to the router. `tries` None: as many as it takes.
    """
    asked: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 12,
        "ignore_eos": True,
        "timeout_s": _REQUEST_S,
        **options,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
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
            case Finished():
                answer.finished = event
            case _:
                assert tries is None, f"nothing failed, and yet: {event}"
    assert answer.finished is not None
    assert answer.finished.usage.num_prompt_tokens == len(prompt)
    assert answer.finished.usage.num_output_tokens == len(answer.ids)
    assert tries is None or len(answer.routed) == tries, answer.routed
    return answer


# --- processes ----------------------------------------------------------------------------------


@dataclass
class WholePath:
    """A running fleet and the routers before it; `model` is the oracle, `folder` its checkpoint."""

    shape: Shape
    folder: Path
    model: transformers.PreTrainedModel
    fleet: Fleet
    far: AsyncClient
    """Every prompt is prefilled in the prefill pool."""
    near: AsyncClient
    """Every prompt is prefilled on the decode worker."""
    far_again: AsyncClient
    """As `far`: another process."""

    @property
    def windows(self) -> list[int]:
        """Of the layer groups that have one."""
        spec = load_model_spec(str(self.folder), EngineConfig(**self.shape.engine()))
        return [group.window for group in spec.layout.groups if group.window is not None]

    async def books(self) -> dict[str, worker_pb2.CheckIntegrityResponse]:
        """What each worker holds now; none of its parts may disagree with another."""
        found = {}
        for worker_id in self.fleet.processes:
            async with grpc.aio.insecure_channel(self.fleet.address(worker_id)) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                request = worker_pb2.CheckIntegrityRequest()
                found[worker_id] = await stub.CheckIntegrity(request, timeout=10)
            assert not found[worker_id].problems, (worker_id, found[worker_id])
        return found

    async def until_idle(self) -> None:
        """Wait until no worker holds anything for a request: fences and acks take a moment."""
        books: dict[str, worker_pb2.CheckIntegrityResponse] = {}
        try:
            async with asyncio.timeout(_IDLE_S):
                while not books or any(map(_holds_anything, books.values())):
                    books = await self.books()
        except TimeoutError:
            raise AssertionError(f"something is still held: {books}") from None


def _holds_anything(book: worker_pb2.CheckIntegrityResponse) -> bool:
    """Cached blocks that nobody uses are free."""
    requests = book.num_waiting + book.num_running + book.num_reserved + book.num_exporting
    moves = book.num_open_leases + book.num_open_handoffs
    return bool(requests + moves + book.num_blocks_in_use + book.num_quarantined_blocks)


@contextlib.asynccontextmanager
async def _router(control: str, config: Path) -> AsyncIterator[AsyncClient]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--control", control, "--config", str(config)),
        *("--listen", "127.0.0.1:0", "--log-level", "warning"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        assert line.startswith("router listening on "), line
        async with AsyncClient(line.split()[-1]) as client:
            yield client
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), _LEAVE_S) == 0
    finally:
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


def write_config(shape: Shape, folder: Path, local_prefill: str) -> Path:
    path = folder / f"{local_prefill}.yaml"
    path.write_text(yaml.safe_dump(shape.config(folder / "model", local_prefill)))
    return path


@contextlib.asynccontextmanager
async def whole_path(shape: Shape, folder: Path) -> AsyncIterator[WholePath]:
    """All processes of a fleet, ready; at the end every pool is whole and nothing is left."""
    model = shape.save(folder / "model")
    far, near = (write_config(shape, folder, mode) for mode in ("never", "always"))
    async with started(far) as fleet:
        async with contextlib.AsyncExitStack() as stack:
            routers = [
                await stack.enter_async_context(_router(fleet.control, config))
                for config in (far, near, far)
            ]
            path = WholePath(shape, folder / "model", model, fleet, *routers)
            yield path
            await path.until_idle()
        await _drain_all(fleet)


# --- oracles ------------------------------------------------------------------------------------


def engine_config(config: Path, pool: str = "prefill") -> EngineConfig:
    return load_config(config).pool_engine(pool)


def engine_alone(
    folder: Path,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
) -> list[list[SampledToken]]:
    """What one engine in this process, with fresh memory, says to all prompts in one batch."""
    if isinstance(sampling, SamplingParams):
        sampling = [sampling] * len(prompts)
    spec = load_model_spec(str(folder), config)
    memory = LocalKvMemory.of(region_layout(spec, config, 0, 1), config.num_regions)
    memory.buffer[:] = 0xFF  # NaN, so that a stray read shows
    sink = LocalSink()
    engine = build_engine(config, build_runner(str(folder), config, spec, memory, sink, None), sink)
    found: list[list[SampledToken]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        name, token_ids = RequestId(str(number)), np.array(prompt, np.uint32)
        engine.add(RequestSpec(name, token_ids, len(prompt), sampling[number]))
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokenEvent):
                found[int(event.request_id)].append(event.token)
    engine.check_integrity()
    return found


def greedy_alone(
    path: WholePath, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    config = replace(EngineConfig(**path.shape.engine()), max_num_batched_tokens=path.shape.chunk)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    found = engine_alone(path.folder, config, prompts, sampling)
    return [[token.token_id for token in tokens] for tokens in found]
