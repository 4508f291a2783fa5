"""A client of a router, what it saw of a stream, and what it has to be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from baton.v1 import (
    common_pb2,
    router_pb2,
    router_pb2_grpc,
)
from router.text import TextModel
from router.units.router import Router
from tests.router.scripted_tokens import oracle
from tests.router.scripted_worker import MODEL

PROMPT = "the fox sang to the moon"


@dataclass
class Answer:
    """What a client saw; every index is checked to come once and in order."""

    from_index: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Of each its id and name."""
    arguments: str = ""
    """Of all calls."""
    routed: list[router_pb2.Routed] = field(default_factory=list)
    migrated: list[router_pb2.Migrated] = field(default_factory=list)
    handed_off: list[router_pb2.HandedOff] = field(default_factory=list)
    prefilled: list[router_pb2.Prefilled] = field(default_factory=list)
    finished: router_pb2.Finished | None = None
    num_token_messages: int = 0

    @property
    def reason(self) -> common_pb2.FinishReason.ValueType:
        assert self.finished is not None
        return self.finished.reason

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_cached_tokens(self) -> int:
        assert self.finished is not None
        return self.finished.usage.num_cached_tokens

    def assert_says(self, model: TextModel, ids: Sequence[int]) -> None:
        """These tokens, once and in order, and an end."""
        assert self.ids == list(ids)
        assert self.text == model.decode(ids)
        assert self.reason == common_pb2.FINISH_REASON_LENGTH

    def take(self, response: router_pb2.GenerateResponse) -> None:
        kind = response.WhichOneof("event")
        assert self.finished is None, f"{kind} after the end"
        if kind == "tokens":
            tokens = response.tokens
            assert tokens.index == self.from_index + len(self.ids), "a gap or a repetition"
            self.ids.extend(tokens.ids)
            self.text += tokens.text
            self.reasoning += tokens.reasoning
            self.calls += [(call.id, call.name) for call in tokens.tool_calls if call.id]
            self.arguments += "".join(call.arguments for call in tokens.tool_calls)
            self.num_token_messages += 1
        elif kind == "finished":
            self.finished = response.finished
        else:
            getattr(self, kind).append(getattr(response, kind))


class Client:
    """One router's stub."""

    def __init__(self, address: str, http_address: str | None = None) -> None:
        self.address, self.http_address = address, http_address
        self.channel = grpc.aio.insecure_channel(
            address, options=(("grpc.use_local_subchannel_pool", 1),)
        )
        self.stub = router_pb2_grpc.RouterServiceStub(self.channel)

    async def ask(
        self,
        request: router_pb2.GenerateRequest,
        until: Callable[[Answer], bool] = lambda answer: False,
    ) -> Answer:
        """Read a stream to its end, or until the answer so far is enough, then leave."""
        answer = Answer(request.resume_from_index)
        call = self.stub.Generate(request, timeout=20)
        async for response in call:
            answer.take(response)
            if until(answer):
                call.cancel()
                return answer
        return answer


def ask_for(prompt: str, max_tokens: int = 12, **fields: Any) -> router_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens)
    return router_pb2.GenerateRequest(
        **{"model": MODEL, "text": prompt, "sampling": sampling, "seed": 7, **fields}
    )


def error_reason(error: grpc.aio.AioRpcError) -> str:
    """The ErrorInfo reason of a failed call."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info.reason


def expected(prompt: str, num_tokens: int, seed: int = 7) -> list[int]:
    return oracle(list(prompt.encode()), seed, num_tokens)


def assert_whole(answer: Answer, prompt: str, num_tokens: int = 12, seed: int = 7) -> None:
    """The fault-free tokens and their text, once and in order, and an end."""
    assert answer.ids == expected(prompt, num_tokens, seed)[answer.from_index :]
    assert answer.finished is not None
    assert answer.text == bytes(answer.ids).decode()


async def error_of(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    """The error that a call must end with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def refusal(client: Client, request: router_pb2.GenerateRequest) -> grpc.aio.AioRpcError:
    return await error_of(client.ask(request))


def field_at_fault(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    violations = error_details_pb2.BadRequest()
    assert any(detail.Unpack(violations) for detail in status.details)
    return violations.field_violations[0].field


def failures_of(router: Router) -> dict[str, float]:
    """How often each reason ended an attempt at a worker."""
    return {failure: count.value for (failure,), count in router.metrics.failures.children.items()}
