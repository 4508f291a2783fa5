"""Bad requests amid running streams: each is refused by name, and no stream notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.errors import AlreadyExistsError
from baton.v1 import router_pb2
from engine.request import SamplingParams
from tests.engine import families
from tests.engine.driving import random_prompt
from tests.path.oracles import ids_of
from tests.path.whole_path import Shape, WholePath, ask, whole_path

CONTEXT = 2048
NUM_TOKENS = 600
INVALID, UNKNOWN = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND

Request = router_pb2.GenerateRequest


def request(**fields: Any) -> Request:
    return Request(**({"token_ids": {"ids": [1, 2, 3]}} | fields))


def sampling(**values: float) -> Request:
    return request(sampling=values)


TEXT = bytes([3 << 3 | 2])  # GenerateRequest.text
BAD: dict[str, tuple[Request | bytes, grpc.StatusCode, str]] = {
    "no prompt": (Request(), INVALID, "prompt"),
    "no tokens": (request(token_ids={"ids": []}), INVALID, "empty"),
    "no text": (Request(text=""), INVALID, "text"),
    "no messages": (Request(chat=router_pb2.ChatMessages()), INVALID, "chat"),
    "longer than the context": (request(token_ids={"ids": [1] * CONTEXT}), INVALID, "2048"),
    "an answer longer than the context": (sampling(max_tokens=CONTEXT), INVALID, "max_tokens"),
    "an id outside the vocabulary": (
        request(token_ids={"ids": [1, families.VOCAB]}),
        INVALID,
        "vocabulary",
    ),
    "the largest id": (request(token_ids={"ids": [2**32 - 1]}), INVALID, "vocabulary"),
    "an unknown model": (request(model="another"), UNKNOWN, "another"),
    "a negative temperature": (sampling(temperature=-1.0), INVALID, "temperature"),
    "no temperature at all": (sampling(temperature=float("nan")), INVALID, "temperature"),
    "a temperature without end": (sampling(temperature=float("inf")), INVALID, "temperature"),
    "top_p of 0": (sampling(top_p=0.0), INVALID, "top_p"),
    "min_p above 1": (sampling(min_p=1.5), INVALID, "min_p"),
    "a penalty of 0": (sampling(repetition_penalty=0.0), INVALID, "repetition_penalty"),
    "no token wanted": (sampling(max_tokens=0), INVALID, "max_tokens"),
    "too many log-probabilities": (sampling(logprobs=1000), INVALID, "logprobs"),
    "text that is not UTF-8": (TEXT + b"\x02\xff\xfe", INVALID, "unreadable"),
    "a message that is cut off": (TEXT + b"\x7fabc", INVALID, "unreadable"),
    "no protobuf": (b"no protobuf at all", INVALID, "unreadable"),
    "an oversized message": (
        TEXT + b"\x80\x80\x80\x14" + b"x" * (40 << 20),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "larger than max",
    ),
}


async def answered(call: Any, name: str) -> None:
    async for event in call:
        raise AssertionError(f"{name}: {event!r}")


async def refused(
    generate: Callable[[bytes], Any], name: str, message: Request | bytes
) -> grpc.aio.AioRpcError:
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answered(generate(raw), name)
    return caught.value


async def refuse_all(address: str) -> None:
    """Every bad request at once, through one router; over raw bytes, which say anything."""
    options = [("grpc.max_send_message_length", 64 << 20)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        generate: Any = channel.unary_stream("/baton.v1.RouterService/Generate")
        errors = await asyncio.gather(
            *(refused(generate, name, message) for name, (message, _, _) in BAD.items())
        )
    for (name, (_, code, part)), error in zip(BAD.items(), errors):
        assert error.code() is code, (name, error)
        assert part in (error.details() or ""), (name, error)


async def check_reused_id(path: WholePath, prompt: list[int], expected: list[int]) -> None:
    """The id of a running request: the same body attaches to it, another body is refused."""
    asked: dict[str, Any] = {"request_id": "mine", "max_tokens": NUM_TOKENS}
    again = asyncio.create_task(ask(path.far, prompt, seed=0, **asked))
    with pytest.raises(AlreadyExistsError):
        await ask(path.far, prompt[1:], seed=0, **asked)
    with pytest.raises(AlreadyExistsError):
        await ask(path.far, prompt, seed=1, **asked)
    assert (await again).ids == expected


async def test_bad_requests_amid_running_streams_are_refused_and_change_no_stream(
    tmp_path: Path,
) -> None:
    async with whole_path(Shape("qwen3"), tmp_path) as path:
        prompts = [random_prompt(20 + 9 * n, families.VOCAB, n) for n in range(8)]
        asked: list[dict[str, Any]] = [
            {"temperature": float(n % 2), "seed": n, "max_tokens": NUM_TOKENS} for n in range(8)
        ]
        params = [SamplingParams(ignore_eos=True, **options) for options in asked]
        expected = [*map(ids_of, path.alone(prompts, params))]
        assert expected[0][:100] == path.greedy(prompts[0], 100)
        began = [asyncio.Event() for _ in prompts]
        asked[0]["request_id"] = "mine"
        async with asyncio.TaskGroup() as group:
            streams = [
                group.create_task(ask(router, prompts[n], streams=began[n], **asked[n]))
                for n, router in enumerate((path.far, path.far, path.near, path.near) * 2)
            ]
            await asyncio.gather(*(event.wait() for event in began))
            before = await path.holdings()
            group.create_task(check_reused_id(path, prompts[0], expected[0]))
            await asyncio.gather(*map(refuse_all, path.addresses))
            assert not all(stream.done() for stream in streams), "no stream was running"
        assert [stream.result().ids for stream in streams] == expected
        await path.until_idle()
        after = await path.holdings()
        first = sum(after[w].num_first_tokens - before[w].num_first_tokens for w in after)
        assert first == 0, "a bad request reached an engine"
