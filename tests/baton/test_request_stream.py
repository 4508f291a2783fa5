"""A client's request before it is sent, and the stream of its answers as a value."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest
from google.protobuf import text_format

from baton import status
from baton.client.events import Logprobs, Tokens, ToolCallDelta, from_response
from baton.client.request_stream import RequestStream, build_request
from baton.errors import (
    AlreadyExistsError,
    BatonError,
    InvalidRequestError,
    OverloadedError,
)
from baton.v1 import common_pb2
from baton.v1.router_pb2 import ChatMessages, GenerateResponse, Routed
from baton.v1.router_pb2 import Tokens as TokensMessage

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLING = {"role": "assistant", "content": None, "audio": None, "tool_calls": [CALL]}
CHAT = """
messages {role: "assistant" reasoning_content: "hm"
  tool_calls {id: "c1" name: "f" arguments: '{"a": 1}'}}
messages {role: "tool" tool_call_id: "c1" name: "f" content: "42"}
messages {role: "user" parts {text: "and now?"}}
tools {name: "f" parameters: '{"type": "object"}'} tool_choice {name: "f"}
"""


def test_a_chat_keeps_every_field_of_its_messages() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "42"}
    asked = {"role": "user", "content": [{"type": "text", "text": "and now?"}]}
    chat, named = [{**CALLING, "reasoning": "hm"}, result, asked], {"function": {"name": "f"}}
    request = build_request(chat=chat, tools=[TOOL], tool_choice=named, itl_target_ms=20)
    assert request.chat == text_format.Parse(CHAT, ChatMessages())
    assert request.itl_target_ms == 20
    forced = build_request(chat=[asked], tools=[TOOL], tool_choice="required")
    assert forced.chat.HasField("tool_choice")
    assert not build_request(chat=[asked], tools=[TOOL], tool_choice="none").chat.tools
    more: Any = {"template_arguments": {"a": 1}, "json_schema": {"type": "object"}}
    once = build_request(chat=[asked], tool_choice="required", parallel_tool_calls=False, **more)
    assert once.chat.tool_choice.is_single
    assert (once.chat.template_arguments, once.json_schema) == ('{"a": 1}', '{"type": "object"}')


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "token_ids": [1]}, "prompt"),
        ({"token_ids": [-1]}, "prompt"),
        ({"chat": [{"role": "user"}]}, "chat[0]"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a", "top_k": -1}, "top_k"),
        ({"prompt": "a", "stop": 3}, "stop"),
        ({"prompt": "a", "temprature": 1.0}, "temprature"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "timeout_s": "5"}, "timeout_s"),
        ({"prompt": "a", "timeout_s": True}, "timeout_s"),
        ({"prompt": "a", "timeout_s": 0}, "timeout_s"),
        ({"prompt": "a", "timeout_s": float("nan")}, "timeout_s"),
        ({"prompt": "a", "timeout_s": 1e9}, "timeout_s"),
        ({"prompt": "a", "sampling": {}}, "sampling"),
        ({"prompt": "a", "resume_from_index": 1}, "resume_from_index"),
        ({"prompt": "a", "stop": "END"}, "stop"),
        ({"prompt": "a", "temperature": None}, "temperature"),
        ({"prompt": "a", "chat": ["x"]}, "prompt"),
        ({"chat": 3}, "chat"),
        ({"chat": [{"role": "user", "content": None}]}, "chat[0]"),
        ({"chat": [{"role": "user", "content": [IMAGE]}]}, "chat[0].content"),
        ({"chat": [{"role": 5, "content": "a"}]}, "chat[0].role"),
        ({"chat": [{"role": "user", "content": "a", "audio": {"id": "1"}}]}, "chat[0].audio"),
        ({"chat": [CALLING], "tools": 5}, "tools"),
        ({"chat": [CALLING], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"chat": [CALLING], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"prompt": "a", "template_arguments": {"x": 1}}, "template_arguments"),
        ({"prompt": "a", "json_schema": {"x": {1}}}, "json_schema"),
        ({"chat": [CALLING], "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"chat": [CALLING], "tool_choice": "any"}, "tool_choice"),
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_before_it_is_sent(
    arguments: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build_request(**arguments)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert not re.search("object has no|Message type|Failed to parse", caught.value.message)


def tokens(index: int, ids: list[int], text: str) -> GenerateResponse:
    return GenerateResponse(tokens=TokensMessage(index=index, ids=ids, text=text))


def test_a_gap_in_the_stream_is_an_error_and_what_was_seen_is_dropped() -> None:
    stream = RequestStream(build_request("a"), ["nowhere"])
    assert stream.absorb(tokens(0, [5, 6], "ab")) == Tokens(0, (5, 6), "ab")
    assert stream.absorb(tokens(0, [5, 6], "ab")) is None
    assert stream.absorb(tokens(2, [], "tail")) == Tokens(2, (), "tail")
    assert stream.absorb(tokens(2, [], "tail")) is None
    with pytest.raises(BatonError, match="tokens 2 to 2 "):
        stream.absorb(tokens(3, [7], "c"))
    stream = RequestStream(build_request("a"), ["nowhere"])
    call = {"index": 0, "id": "c1", "name": "f", "arguments": "{}"}
    said = GenerateResponse(tokens=TokensMessage(reasoning="hm", tool_calls=[call]))
    expected = Tokens(0, (), "", reasoning="hm", tool_calls=(ToolCallDelta(**call),))
    assert stream.absorb(said) == expected
    assert stream.absorb(said) is None


def test_a_reconnect_brings_back_seed_and_unit_as_the_last_router_named_them() -> None:
    stream = RequestStream(build_request("a"), ["nowhere"])
    assert not stream.request().HasField("seed")
    assert not stream.request().unit
    for seed, unit in ((5, "a/01"), (6, "b/02")):
        stream.absorb(GenerateResponse(routed=Routed(seed=seed, unit=unit)))
        assert (stream.request().seed, stream.request().unit) == (seed, unit)


class Refused:
    """A call that a router ended with this error."""

    def __init__(self, error: BatonError) -> None:
        self._error = error

    def code(self) -> grpc.StatusCode:
        return status.status_code(self._error)

    def details(self) -> str:
        return self._error.message

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return status.status_metadata(self._error)


def test_a_busy_router_ends_no_stream_that_has_put_out_tokens() -> None:
    busy = Refused(OverloadedError("the line is full", retry_after_s=1.5))
    stream = RequestStream(build_request("a"), ["nowhere"])
    with pytest.raises(OverloadedError):
        stream.lost(busy)
    assert stream.is_finished
    stream = RequestStream(build_request("a"), ["nowhere"], reconnect_within_s=5.0)
    stream.absorb(tokens(0, [5], "a"))
    assert 1.5 <= stream.lost(busy) <= 2.25
    assert stream.request().resume_from_index == 1


def test_a_router_too_busy_to_look_for_a_request_does_not_end_it() -> None:
    stream = RequestStream(build_request("a"), ["nowhere"])
    stream.absorb(GenerateResponse(routed=Routed(seed=5)))
    with pytest.raises(OverloadedError):
        stream.lost(Refused(OverloadedError("the line is full", retry_after_s=1.5)))
    assert not stream.is_finished  # it may run yet: its caller aborts it


def test_clients_that_were_sent_away_at_once_come_back_one_by_one() -> None:
    busy = Refused(OverloadedError("the line is full", retry_after_s=1.0))
    pauses_s = []
    for _ in range(64):
        stream = RequestStream(build_request("a"), ["nowhere"], reconnect_within_s=1.3)
        stream.absorb(tokens(0, [5], "a"))
        pauses_s.append(stream.lost(busy))
    assert min(pauses_s) >= 1.0
    assert max(pauses_s) <= 1.3  # later nobody would come back
    assert max(pauses_s) - min(pauses_s) > 0.1
    assert len(set(pauses_s)) == len(pauses_s)


@pytest.mark.parametrize(("timeout_ms", "reconnect_within_s"), [(600_000, 5.0), (3000, 60.0)])
def test_nobody_waits_for_a_busy_router_beyond_the_time_that_the_request_has(
    timeout_ms: int, reconnect_within_s: float
) -> None:
    request = build_request("a")
    request.timeout_ms = timeout_ms
    stream = RequestStream(request, ["nowhere"], reconnect_within_s=reconnect_within_s)
    stream.absorb(tokens(0, [5], "a"))
    with pytest.raises(OverloadedError, match="the line is full"):
        stream.lost(Refused(OverloadedError("the line is full", retry_after_s=295.0)))


def test_a_new_request_whose_id_is_taken_is_refused_at_once() -> None:
    stream = RequestStream(build_request("a"), ["nowhere"])
    with pytest.raises(AlreadyExistsError):
        stream.lost(Refused(AlreadyExistsError("sent before with another body")))
    assert stream.is_finished


def test_a_token_of_which_no_logprobs_are_known_has_none() -> None:
    known = common_pb2.Logprobs(
        logprob=-0.5, rank=1, top=[common_pb2.TokenLogprob(id=7, logprob=-0.5)]
    )
    message = TokensMessage(index=3, ids=[7, 8], logprobs=[known, common_pb2.Logprobs()])
    event = from_response(GenerateResponse(tokens=message))
    assert isinstance(event, Tokens)
    assert event.logprobs == (Logprobs(-0.5, 1, ((7, -0.5),)), None)
