"""Servers to compare the router with, each a program that prints its address.

python -m bench.peers null|http|BACKEND [CERTIFICATE KEY]

- null: a bare grpc.aio server with the router's messages and nothing behind it. What a client and
  gRPC cost by themselves.
- BACKEND: a bare grpc.aio server that passes each message on from a null server at that address.
  The least that a router on grpc.aio can cost.
- http: a worker with OpenAI's API, for routers that need one.

All give the first token at once and each further one a step later, as bench.free_worker does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop

from baton.v1 import common_pb2, router_pb2, router_pb2_grpc
from bench.free_worker import LETTERS, until_next_step

Context = grpc.aio.ServicerContext[Any, Any]
Responses = AsyncIterator[router_pb2.GenerateResponse]
READ_BYTES = 1 << 20


class Null(router_pb2_grpc.RouterServiceServicer):
    """Answers with what the router would, event for event."""

    async def Generate(  # noqa: N802
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> Responses:
        routed = router_pb2.Routed(
            request_id="0" * 32,
            seed=request.seed,
            prefill_worker="p0",
            decode_worker="d0",
            reason="the cheapest of 4: queue 0 ms, prefill 1 ms, move 1 ms, decode 1 ms",
            num_prompt_tokens=400,
            attempt=1,
        )
        yield router_pb2.GenerateResponse(routed=routed)
        yield router_pb2.GenerateResponse(prefilled=router_pb2.Prefilled(ttft_ms=1.0))
        num_tokens = request.sampling.max_tokens
        for index in range(num_tokens):
            letter = LETTERS[index % len(LETTERS)]
            tokens = router_pb2.Tokens(index=index, ids=[letter], text=chr(letter))
            yield router_pb2.GenerateResponse(tokens=tokens)
            if index == 0:
                moved = router_pb2.HandedOff(kv_bytes=400 << 10, put_ms=1.0, exposed_ms=1.0)
                yield router_pb2.GenerateResponse(handed_off=moved)
            if index + 1 < num_tokens:
                await until_next_step(request.seed / 1e3)
        finished = router_pb2.Finished(
            reason=common_pb2.FINISH_REASON_LENGTH,
            usage=router_pb2.Usage(num_prompt_tokens=400, num_output_tokens=num_tokens),
            timings=router_pb2.Timings(queue_ms=1.0, ttft_ms=1.0, itl_ms=1.0, e2e_ms=1.0),
        )
        yield router_pb2.GenerateResponse(finished=finished)


class Proxy(router_pb2_grpc.RouterServiceServicer):
    """Passes every message on."""

    def __init__(self, backend: str) -> None:
        self._stub = router_pb2_grpc.RouterServiceStub(grpc.aio.insecure_channel(backend))

    async def Generate(  # noqa: N802
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> Responses:
        async for response in self._stub.Generate(request):
            yield response


async def serve_grpc(kind: str, certificate: tuple[bytes, ...]) -> None:
    server = grpc.aio.server()
    servicer = Null() if kind == "null" else Proxy(kind)  # type: ignore[abstract]
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server)
    if not certificate:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        chain, key = certificate
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)]))
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


# --- HTTP -----------------------------------------------------------------------------------------


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a connection's requests: a body with `stream` gets tokens, all else a document."""
    with (
        contextlib.suppress(asyncio.IncompleteReadError, ConnectionError),
        contextlib.closing(writer),
    ):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            _, found, rest = head.partition(b"content-length:")
            length = int(rest.split(b"\r\n", 1)[0]) if found else 0
            body = json.loads(await reader.readexactly(length) or b"{}")
            if body.get("stream"):
                await stream(body, writer)
            else:
                text = (
                    b'{"status":"ok","model_path":"tiny","data":[{"id":"tiny","object":"model"}]}'
                )
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\n\r\n%b" % (len(text), text)
                )


async def stream(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Stream OpenAI's completions, or SGLang's `/generate` with its `sampling_params`."""
    num_tokens = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
    step_s = body.get("seed", 1) / 1e3
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    for index in range(num_tokens):
        choice = {"index": 0, "text": chr(LETTERS[index % len(LETTERS)]), "logprobs": None}
        choice["finish_reason"] = "length" if index + 1 == num_tokens else None
        head = {"id": "cmpl-0", "object": "text_completion", "created": 1, "model": "tiny"}
        write_event(json.dumps({**head, "choices": [choice]}), writer)
        await writer.drain()
        if index + 1 < num_tokens:
            await until_next_step(step_s)
    write_event("[DONE]", writer)
    writer.write(b"0\r\n\r\n")


def write_event(data: str, writer: asyncio.StreamWriter) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%b\r\n" % (len(event), event))


async def serve_http() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=READ_BYTES)
    print(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    kind, *files = sys.argv[1:]
    certificate = tuple(Path(file).read_bytes() for file in files)
    uvloop.run(serve_http() if kind == "http" else serve_grpc(kind, certificate))
