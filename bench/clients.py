"""What asks the servers of bench.router: over the workers' own link, over gRPC, over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc.aio

from baton.v1 import common_pb2, router_pb2, router_pb2_grpc, worker_pb2
from tests.link_stub import LinkStub, StubCall
from tests.router.scripted_worker import MODEL

Prompt = str | list[int]
NUM_PROMPT_TOKENS = 400
REQUEST_WITHIN_S = 120.0
NEW_EACH = 0  # connections: a new one for each request


@dataclass
class Answer:
    ttft_s: float = 0.0
    num_tokens: int = 0
    num_messages: int = 0  # with tokens

    def take(self, num_tokens: int, start_s: float) -> None:
        if not self.num_tokens:
            self.ttft_s = time.perf_counter() - start_s
        self.num_tokens += num_tokens
        self.num_messages += 1


class Client(Protocol):
    async def ask(self, prompt: Prompt, num_tokens: int, step_ms: int) -> Answer: ...
    async def close(self) -> None: ...


class LinkClient:
    """Asks the workers for a first token as the router does, and nothing more."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill, self._decode = LinkStub(prefill), LinkStub(decode)
        self._session: StubCall | None = None
        self._numbers = itertools.count()

    async def ask(self, prompt: Prompt, num_tokens: int, step_ms: int) -> Answer:
        if self._session is None:
            self._session = self._decode.session()
            opened = worker_pb2.OpenSession(router_id="bench")
            await self._session.write(worker_pb2.SessionRequest(open=opened))
        name, ids = str(next(self._numbers)), bytes(4 * len(prompt))
        spec = worker_pb2.RequestSpec(request_id=name, attempt=1, token_ids=ids, seed=step_ms)
        reserve = worker_pb2.Reserve(spec=spec, writer=common_pb2.WorkerRef(worker_id="p0"))
        answer, start = Answer(), time.perf_counter()
        await self._session.write(worker_pb2.SessionRequest(reserve=reserve))
        lease = await _lease_of(self._session)
        call = await self._prefill.prefill(worker_pb2.PrefillRequest(spec=spec, lease=lease))
        await call.read()
        answer.take(1, start)
        call.cancel()
        cancel = worker_pb2.Cancel(request_id=name, attempt=1)
        await self._session.write(worker_pb2.SessionRequest(cancel=cancel))
        return answer

    async def close(self) -> None:
        for stub in (self._prefill, self._decode):
            await stub.close()


async def _lease_of(session: StubCall) -> worker_pb2.Lease:
    while True:
        response = await session.read()
        assert isinstance(response, worker_pb2.SessionResponse), "the session has ended"
        if response.reserved:
            return response.reserved[0].lease


class GrpcClient:
    """Own a number of channels that take turns."""

    def __init__(self, address: str, num_connections: int, ca: Path | None) -> None:
        self._address, self._ca = address, ca
        self._channels = [self._channel() for _ in range(num_connections)]
        self._stubs = itertools.cycle(map(router_pb2_grpc.RouterServiceStub, self._channels))

    def _channel(self) -> grpc.aio.Channel:
        options = (("grpc.use_local_subchannel_pool", 1),)
        if self._ca is None:
            return grpc.aio.insecure_channel(self._address, options)
        credentials = grpc.ssl_channel_credentials(self._ca.read_bytes())
        return grpc.aio.secure_channel(self._address, credentials, options)

    async def ask(self, prompt: Prompt, num_tokens: int, step_ms: int) -> Answer:
        request = router_pb2.GenerateRequest(model=MODEL, seed=step_ms)
        request.sampling.max_tokens = num_tokens
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        if self._channels:
            return await _stream(next(self._stubs), request)
        start = time.perf_counter()
        async with self._channel() as channel:
            return await _stream(router_pb2_grpc.RouterServiceStub(channel), request, start)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


async def _stream(
    stub: router_pb2_grpc.RouterServiceStub,
    request: router_pb2.GenerateRequest,
    start: float | None = None,
) -> Answer:
    answer, start = Answer(), start or time.perf_counter()
    async for response in stub.Generate(request, timeout=REQUEST_WITHIN_S):
        if response.HasField("tokens"):
            answer.take(len(response.tokens.ids), start)
    return answer


class HttpClient:
    """Own the connections that are free. A request without one opens one."""

    def __init__(self, address: str, ca: Path | None, keeps: bool, ids_path: str) -> None:
        """`keeps`: connections stay open for the next request. `ids_path` is where prompts of
        token ids are taken."""
        self._host, _, port = address.partition(":")
        self._port, self._ids_path, self._keeps = int(port), ids_path, keeps
        self._tls = None if ca is None else ssl.create_default_context(cafile=str(ca))
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, prompt: Prompt, num_tokens: int, step_ms: int) -> Answer:
        async with asyncio.timeout(REQUEST_WITHIN_S):
            return await self._ask(*self._request(prompt, num_tokens, step_ms))

    def _request(self, prompt: Prompt, num_tokens: int, step_ms: int) -> tuple[str, bytes]:
        body: dict[str, Any] = {"model": MODEL, "stream": True}
        path = "/v1/completions" if isinstance(prompt, str) else self._ids_path
        if path == "/generate":  # SGLang's own
            body |= {"input_ids": prompt, "sampling_params": {"max_new_tokens": num_tokens}}
        else:
            body |= {"prompt": prompt, "max_tokens": num_tokens, "seed": step_ms}
        return path, json.dumps(body).encode()

    async def _ask(self, path: str, body: bytes) -> Answer:
        answer, start = Answer(), time.perf_counter()
        if self._free:
            reader, writer = self._free.pop()
        else:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        acknowledge(writer)
        received = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in received, received + await reader.read(1000)
        text = b""
        while size := int(await reader.readline(), 16):
            acknowledge(writer)
            text += (await reader.readexactly(size + 2))[:-2]
            *events, text = text.split(b"\n\n")
            for event in events:
                if num_tokens := _num_tokens(event):
                    answer.take(num_tokens, start)
        await reader.readline()
        if self._keeps:
            self._free.append((reader, writer))
        else:
            writer.close()
        return answer

    async def close(self) -> None:
        for _, writer in self._free:
            writer.close()


def acknowledge(writer: asyncio.StreamWriter) -> None:
    """Acknowledge at once what comes next: Linux goes back to delays by itself."""
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _num_tokens(event: bytes) -> int:
    """Count the workers' tokens, which are letters."""
    data = event.removeprefix(b"data: ")
    return 0 if data == b"[DONE]" else len(json.loads(data)["choices"][0]["text"])


# --- many requests --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Sends requests, `at_once` of them at any time."""

    num_requests: int
    at_once: int
    num_tokens: int
    step_ms: int
    are_ids: bool = False

    def prompts(self, seed: float) -> Iterator[Prompt]:
        rng = random.Random(seed)
        for _ in range(self.num_requests):
            letters = rng.choices("abcdefghij ", k=NUM_PROMPT_TOKENS)
            yield [ord(letter) for letter in letters] if self.are_ids else "".join(letters)


@dataclass
class Run:
    answers: list[Answer] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def num_messages(self) -> int:
        return sum(answer.num_messages for answer in self.answers)


async def run(client: Client, load: Load) -> Run:
    start = time.perf_counter()
    done, todo = Run(), load.prompts(start)

    async def ask_on() -> None:
        for prompt in todo:
            answer = await client.ask(prompt, load.num_tokens, load.step_ms)
            done.answers.append(answer)

    await asyncio.gather(*(ask_on() for _ in range(load.at_once)))
    done.wall_s = time.perf_counter() - start
    return done
