"""A client at either door of a router: gRPC's, and OpenAI's API through the official `openai`.

Both ask the same, raise LostError where the client is to come again, and can come again.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import openai

from baton.v1 import router_pb2
from router.text import TextModel
from tests.router.answers import Answer, Client

DOORS = ("grpc", "http")
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

_HERE_ALONE = ("prompt", "text", "token_ids", "sampling", "model", "resume_from_index")


class LostError(Exception):
    """The answer ended before its end, or there is none: the client is to come again."""


@contextlib.contextmanager
def _lost(kind: type[Exception]) -> Iterator[None]:
    """`kind`: errors of which some mean that."""
    try:
        yield
    except kind as error:
        if isinstance(error, openai.APIStatusError) and error.status_code < 500:
            raise
        if isinstance(error, grpc.aio.AioRpcError) and error.code() is not UNAVAILABLE:
            raise
        raise LostError(str(error)) from error


class GrpcCaller:
    """As `Client`."""

    def __init__(self, address: str) -> None:
        self.client = Client(address)

    async def close(self) -> None:
        await self.client.channel.close()

    async def ask(
        self,
        request: router_pb2.GenerateRequest,
        until: Callable[[Answer], bool] = lambda answer: False,
    ) -> Answer:
        with _lost(grpc.aio.AioRpcError):
            return await self.client.ask(request, until)

    async def come_again(self, request: router_pb2.GenerateRequest, seen: Answer) -> Answer:
        """The rest, after what was seen."""
        again = router_pb2.GenerateRequest()
        again.CopyFrom(request)
        again.resume_from_index = len(seen.ids)
        again.seed = seen.routed[0].seed
        answer = await self.ask(again)
        answer.from_index, answer.ids = 0, seen.ids + answer.ids
        answer.text = seen.text + answer.text
        return answer


@dataclass
class HttpAnswer:
    """What a client saw; every piece is checked to follow the one before it."""

    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    """One for each token."""
    reason: str | None = None
    usage: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.logprobs)

    @property
    def num_cached_tokens(self) -> int:
        return int(self.usage.prompt_tokens_details.cached_tokens)

    def take(self, chunk: Any) -> None:
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            assert self.reason is None, f"{choice} after the end"
            if (tokens := choice.logprobs) is not None:
                assert tokens.text_offset[0] == len(self.text), "a gap or a repetition"
                self.logprobs += tokens.token_logprobs
            self.text += choice.text
            self.reason = choice.finish_reason

    def assert_says(self, model: TextModel, ids: Sequence[int]) -> None:
        """These tokens, once and in order, and an end."""
        assert self.text == model.decode(ids)
        assert self.reason == "length"
        assert self.num_tokens == self.usage.completion_tokens == len(ids)


class HttpCaller:
    """It never asks twice of its own accord."""

    def __init__(self, address: str) -> None:
        self.url = f"http://{address}/v1"
        self._client = openai.AsyncOpenAI(
            base_url=self.url, api_key="any", max_retries=0, timeout=60
        )

    async def close(self) -> None:
        await self._client.close()

    async def ask(
        self,
        request: router_pb2.GenerateRequest,
        until: Callable[[HttpAnswer], bool] = lambda answer: False,
    ) -> HttpAnswer:
        answer = HttpAnswer()
        with _lost(openai.APIError):
            async with contextlib.aclosing(self._chunks(request)) as chunks:
                async for chunk in chunks:
                    answer.take(chunk)
                    if until(answer):
                        return answer
        return answer

    async def come_again(self, request: router_pb2.GenerateRequest, seen: HttpAnswer) -> HttpAnswer:
        """The whole: HTTP knows no resuming."""
        answer = await self.ask(request)
        assert answer.text.startswith(seen.text)
        return answer

    async def _chunks(self, request: router_pb2.GenerateRequest) -> AsyncIterator[Any]:
        """Log-probabilities are asked for: they show where a token ends."""
        fields = {
            named.name: value
            for named, value in (*request.sampling.ListFields(), *request.ListFields())
            if named.name not in _HERE_ALONE
        }
        prompt: Any = request.text or list(request.token_ids.ids)
        stream = await self._client.completions.create(
            model=request.model,
            prompt=prompt,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"logprobs": 0, **fields},
        )
        async with stream:
            async for chunk in stream:
                yield chunk


Caller = GrpcCaller | HttpCaller


def caller_at(door: str, grpc_address: str, http_address: str | None) -> Caller:
    if door == "grpc":
        return GrpcCaller(grpc_address)
    assert http_address is not None
    return HttpCaller(http_address)
