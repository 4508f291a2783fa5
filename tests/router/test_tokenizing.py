"""The line before the tokenizer: bounded, with a deadline, and left without a trace."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import grpc
import grpc.aio
import pytest

from baton.config.router import AdmissionConfig, AuthConfig
from baton.model_folder import find_text_files
from baton.status import from_rpc_error
from baton.v1 import common_pb2, router_pb2
from router.door.api import api
from router.door.api.tokenizer_line import TokenizerLine
from router.placement.fairness import FairLine
from router.text import Conversation, TextModel
from tests.router.answers import PROMPT, ask_for, assert_whole, error_of
from tests.router.deployment import Deployment, byte_model, deployment, left_behind
from tests.router.scripted_worker import MODEL


class SlowModel(TextModel):
    """Encodes when it is let."""

    gate: threading.Event
    num_encoding = num_encoded = 0

    def encode(self, text: str, is_bare: bool = False) -> list[int]:
        self.num_encoding += 1
        assert self.gate.wait(30)
        self.num_encoded += 1
        return super().encode(text)


@pytest.fixture
def slow_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowModel]:
    monkeypatch.setattr(api, "TEXT_AT_ONCE_BYTES", 0)
    byte_model(tmp_path)
    model = SlowModel(tmp_path.iterdir())
    model.gate = threading.Event()
    yield model
    model.gate.set()


@asynccontextmanager
async def one_in_hand(
    slow_model: SlowModel, **changes: Any
) -> AsyncIterator[tuple[Deployment, asyncio.Task[None]]]:
    """A deployment whose only tokenizer thread is at work on a request."""
    async with deployment(text_model=slow_model, **changes) as d:
        first = asyncio.create_task(whole(d, PROMPT))
        await d.until(lambda: slow_model.num_encoding == 1)
        yield d, first
        slow_model.gate.set()
        await d.check_empty()
        assert tokenizing(d).num_requests == tokenizing(d).num_bytes == 0


async def whole(d: Deployment, prompt: str) -> None:
    assert_whole(await d.client.ask(ask_for(prompt)), prompt)


def tokenizing(d: Deployment) -> FairLine:
    return d.servers[0].api.tokenizer.line


async def refused(d: Deployment, request: router_pb2.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(d.client.ask(request), 5)
    return caught.value


async def test_requests_beyond_the_line_s_length_are_shed_with_the_time_to_wait(
    slow_model: SlowModel,
) -> None:
    async with one_in_hand(slow_model, admission={"max_tokenizing": 3}) as (d, first):
        waiting = [asyncio.create_task(whole(d, f"{PROMPT} {n}")) for n in range(2)]
        await d.until(lambda: tokenizing(d).num_requests == 3)
        error = await refused(d, ask_for("one too many"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_rpc_error(error).retry_after_s == 1.0
        assert (
            await error_of(d.client.stub.Tokenize(router_pb2.TokenizeRequest(text="a"), timeout=5))
        ).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        slow_model.gate.set()
        await asyncio.gather(first, *waiting)


async def test_bytes_beyond_the_line_s_are_shed_but_a_message_alone_is_taken(
    slow_model: SlowModel,
) -> None:
    large = "x" * 400
    async with one_in_hand(slow_model, admission={"max_tokenizing_bytes": 300}) as (d, first):
        error = await refused(d, ask_for(large))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        small = asyncio.create_task(whole(d, "small"))
        await d.until(lambda: tokenizing(d).num_requests == 2)
        slow_model.gate.set()
        await asyncio.gather(first, small)
        await whole(d, large)


async def test_a_tenant_s_flood_sheds_its_own_newest_and_nobody_else(
    slow_model: SlowModel,
) -> None:
    prompt = "x" * 100
    size = ask_for(prompt, tenant="flood").ByteSize()
    async with one_in_hand(slow_model, admission={"max_tokenizing_bytes": 6 * size}) as (d, first):
        room = (6 * size - tokenizing(d).num_bytes) // size
        flood = [
            asyncio.create_task(d.client.ask(ask_for(prompt, tenant="flood"))) for _ in range(room)
        ]
        await d.until(lambda: tokenizing(d).num_requests == 1 + room)
        error = await refused(d, ask_for(prompt, tenant="flood"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        others = [
            asyncio.create_task(d.client.ask(ask_for(prompt, tenant=f"other-{n}")))
            for n in range(2)
        ]
        await d.until(lambda: sum(task.done() for task in flood) == 2)
        shed, kept = [t for t in flood if t.done()], [t for t in flood if not t.done()]
        for task in shed:
            error = await error_of(task)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert from_rpc_error(error).retry_after_s == 1.0
        assert tokenizing(d).num_bytes <= 6 * size
        slow_model.gate.set()
        for answer in await asyncio.gather(*kept, *others):
            assert_whole(answer, prompt)
        await first


async def tokenize(d: Deployment, text: str, token: str) -> list[int]:
    answer = await d.client.stub.Tokenize(
        router_pb2.TokenizeRequest(text=text),
        metadata=(("authorization", f"Bearer {token}"),),
        timeout=5,
    )
    return list(answer.ids)


async def test_calls_to_tokenize_take_their_caller_s_share_of_the_line(
    slow_model: SlowModel, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("red: red-token\nblue: blue-token\n")
    async with deployment(
        text_model=slow_model, admission={"max_tokenizing": 3}, auth=AuthConfig(str(tokens))
    ) as d:
        first = asyncio.create_task(tokenize(d, "a", "red-token"))
        await d.until(lambda: slow_model.num_encoding == 1)
        red = [asyncio.create_task(tokenize(d, "b", "red-token")) for _ in range(2)]
        await d.until(lambda: tokenizing(d).num_requests == 3)
        assert (
            await error_of(tokenize(d, "c", "red-token"))
        ).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        blue = asyncio.create_task(tokenize(d, "d", "blue-token"))
        await d.until(lambda: any(call.done() for call in (*red, blue)))
        slow_model.gate.set()
        assert [await first, await blue] == [[97], [100]]
        answers = await asyncio.gather(*red, return_exceptions=True)
        shed = [one for one in answers if isinstance(one, grpc.aio.AioRpcError)]
        assert [error.code() for error in shed] == [grpc.StatusCode.RESOURCE_EXHAUSTED]


async def tokenized_order(requests: list[tuple[str, int]]) -> list[str]:
    """Tenants in the order their (tenant, bytes) requests, all in line at once, are worked on."""
    tokenizing = TokenizerLine(AdmissionConfig())
    gate = threading.Event()
    order: list[str] = []
    begun = asyncio.create_task(tokenizing.run(lambda: gate.wait(30), "", 1, 30.0))
    waiting = [
        asyncio.create_task(tokenizing.run(lambda t=tenant: order.append(t), tenant, size, 30.0))  # type: ignore[misc]
        for tenant, size in requests
    ]
    await asyncio.sleep(0)  # all are in line before the first leaves it
    gate.set()
    await asyncio.gather(begun, *waiting)
    assert tokenizing.line.num_requests == tokenizing.line.num_bytes == 0
    tokenizing.close()
    return order


class RenderingModel(TextModel):
    """Knows which threads render its chats."""

    threads: ClassVar[set[str]] = set()

    def encode_chat(self, conversation: Conversation) -> list[int]:
        self.threads.add(threading.current_thread().name)
        return self.encode(str(conversation.messages[0]["content"]))


async def test_no_chat_is_rendered_on_the_event_loop_however_short(tmp_path: Path) -> None:
    byte_model(tmp_path)
    request = ask_for("")
    request.chat.messages.add(role="user", content=PROMPT)
    async with deployment(text_model=RenderingModel(find_text_files(tmp_path))) as d:
        chat = router_pb2.TokenizeRequest(chat=request.chat)
        await d.client.stub.Tokenize(chat, timeout=30)
        assert_whole(await d.client.ask(request), PROMPT)
    assert RenderingModel.threads == {"tokenizer_0"}


async def test_tenants_are_tokenized_by_turns_in_equal_parts_of_bytes() -> None:
    order = await tokenized_order([("many", 1000)] * 8 + [("few", 1000)] * 2)
    assert order[:4].count("few") == 2
    order = await tokenized_order([("huge", 10_000)] * 3 + [("small", 1000)] * 12)
    assert order[:12].count("small") >= 10
    assert order.count("huge") == 3


async def test_a_request_s_deadline_holds_while_it_waits_to_be_tokenized(
    slow_model: SlowModel,
) -> None:
    async with one_in_hand(slow_model) as (d, first):
        error = await refused(d, ask_for("late", timeout_ms=100))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert from_rpc_error(error).reason == "DEADLINE"
        slow_model.gate.set()
        await first
        assert slow_model.num_encoded == 1  # nobody computed for a client that had its answer


@pytest.mark.parametrize("request_id", ["", "mine"])
async def test_a_client_that_leaves_the_line_leaves_nothing(
    slow_model: SlowModel, request_id: str
) -> None:
    async with one_in_hand(slow_model) as (d, first):
        call = d.client.stub.Generate(ask_for("gone", request_id=request_id))
        await d.until(lambda: tokenizing(d).num_requests == 2)
        call.cancel()
        await d.until(lambda: tokenizing(d).num_requests == 1)
        assert len(d.router.runs) == 0
        slow_model.gate.set()
        await first
        assert slow_model.num_encoded == 1


@pytest.mark.parametrize("in_hand", [True, False])
async def test_an_abort_ends_a_request_that_is_tokenized_or_waits_for_it(
    slow_model: SlowModel, in_hand: bool
) -> None:
    async with deployment(text_model=slow_model) as d:
        others = [] if in_hand else [asyncio.create_task(whole(d, PROMPT))]
        await d.until(lambda: slow_model.num_encoding == len(others))
        asked = asyncio.create_task(d.client.ask(ask_for("gone", request_id="mine", tenant="a")))
        await d.until(lambda: tokenizing(d).num_requests == len(others) + 1)
        for tenant in ("", "b"):  # another tenant's id
            assert (await error_of(abort(d, tenant))).code() is grpc.StatusCode.NOT_FOUND
        await abort(d, "a")
        answer = await asyncio.wait_for(asked, 5)
        assert answer.reason == common_pb2.FINISH_REASON_ABORTED
        assert answer.ids == answer.routed == []
        slow_model.gate.set()
        await asyncio.gather(*others)
        await whole(d, PROMPT)  # the thread was not lost
        assert d.worker("d0").num_reserves == len(others) + 1
        assert not len(d.servers[0].api.pending)


async def test_an_abort_while_it_is_tokenized_again_ends_a_request_that_another_router_began(
    slow_model: SlowModel,
) -> None:
    async with deployment(text_model=slow_model) as d:
        slow_model.gate.set()
        await d.add_router()
        await d.connected(2, d.routers[1])
        request = ask_for(PROMPT, request_id="mine", tenant="a")
        await left_behind(d, 1, "d0", request)
        slow_model.gate.clear()
        request.resume_from_index = 0
        asked = asyncio.create_task(d.client.ask(request))
        await d.until(lambda: tokenizing(d).num_requests == 1)
        assert d.worker("d0").runs
        await abort(d, "a")
        await d.until(lambda: not d.worker("d0").runs)
        answer = await asyncio.wait_for(asked, 5)
        assert answer.reason == common_pb2.FINISH_REASON_ABORTED
        slow_model.gate.set()


async def abort(d: Deployment, tenant: str) -> None:
    await d.client.stub.Abort(router_pb2.AbortRequest(request_id="mine", tenant=tenant), timeout=5)


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_leaves_nothing(
    slow_model: SlowModel,
) -> None:
    async with deployment(text_model=slow_model) as d:
        call = d.client.stub.Generate(ask_for("gone"))
        await d.until(lambda: slow_model.num_encoding == 1)
        call.cancel()
        next_one = asyncio.create_task(whole(d, PROMPT))
        slow_model.gate.set()
        await next_one  # the thread was not lost
        await d.until(lambda: tokenizing(d).num_requests == 0)
        assert d.worker("d0").num_reserves == 1


async def test_a_prompt_far_beyond_the_context_is_refused_unread(slow_model: SlowModel) -> None:
    async with deployment(text_model=slow_model) as d:
        error = await refused(d, ask_for("x" * (2 << 20)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(error).field == "text"
        assert slow_model.num_encoding == 0


async def test_a_mistake_is_reported_in_a_bounded_message() -> None:
    """gRPC drops an answer whose trailing metadata exceed 8 KiB or so."""
    async with deployment() as d:
        error = await refused(d, ask_for(PROMPT, model=MODEL * 10_000))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert from_rpc_error(error).field == "model"
        error = await refused(d, ask_for(PROMPT, model="🦊" * 10_000))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert from_rpc_error(error).field == "model"
