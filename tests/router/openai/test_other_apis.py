"""OpenAI's responses and Anthropic's messages: each as one document, and as a stream."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Any, get_args

import jsonschema
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic_core import from_json

from tests.router.deployment import Deployment
from tests.router.openai.spoken import CHAT, MARKS, TURN, Answer, Http, Speaks, saying

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
SAID = 'hm</think>See: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
THINKS: Any = {"chat_template_kwargs": {"thinks": True}}
SCHEMA = {"type": "object"}
FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA}
RESPONSE: Any = {"input": saying(SAID), "tools": [FUNCTION], **THINKS}
TOOLS: Any = {"tools": [{"name": "f", "input_schema": SCHEMA}], "max_tokens": 99}
MESSAGE = {"messages": [{"role": "user", "content": saying(SAID)}], **TOOLS, **THINKS}
TYPES = """created in_progress output_item.added content_part.added reasoning_text.delta
 reasoning_text.done content_part.done output_item.done output_item.added content_part.added
 output_text.delta output_text.done content_part.done output_item.done output_item.added
 function_call_arguments.delta function_call_arguments.done output_item.done completed"""
CLASSES: Any = get_args(get_args(ResponseStreamEvent)[0])
OFFICIAL = {get_args(each.model_fields["type"].annotation)[0]: each for each in CLASSES}


@pytest.fixture
def template() -> str:
    return MARKS["hermes"] + "{# <think> #}" + CHAT


def events_of(answer: Answer) -> list[Any]:
    pairs = [each.split("\n") for each in answer.text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    for event in events:
        if event["type"].startswith("response."):
            OFFICIAL[event["type"]].model_validate(event)  # strict, unlike the client
    return events


async def test_a_response_has_thoughts_text_and_calls_as_items(http: Http) -> None:
    more = {"instructions": "brief", "metadata": {"k": "v"}, "store": True, "request_id": "r"}
    more |= {"text": {"verbosity": "medium"}, "reasoning": {"effort": "low"}, "user": "me"}
    answer = (await http.post(RESPONSES, RESPONSE | more)).json
    thoughts, message, call = answer["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "See:"
    assert (call["name"], json.loads(call["arguments"])) == ("f", {"a": 1})
    assert (answer["id"], answer["status"], answer["store"]) == ("resp_r", "completed", False)
    assert (answer["instructions"], answer["metadata"]) == ("brief", {"k": "v"})
    assert (answer["reasoning"], answer["user"]) == ({"effort": "low", "summary": None}, "me")
    assert answer["usage"]["output_tokens"] == len(SAID) + 1
    short = {"max_output_tokens": 16.0, "n": 1, "user": "me", "frob": 1}
    said = await http.post(RESPONSES, RESPONSE | short)
    cut, ignored = said.json, said.headers["x-baton-ignored-fields"]
    assert ignored == "frob", "`user` passes, and each is named once"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [each["status"] for each in cut["output"]] == ["completed", "incomplete"]


async def test_a_response_streams_every_change_of_its_items(http: Http) -> None:
    events = events_of(await http.post(RESPONSES, RESPONSE | {"stream": True}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for length in (1, 16, len(SAID) - 14):  # of thoughts, text and a call
        cut = {"stream": True, "max_output_tokens": length}
        *_, item, end = events_of(await http.post(RESPONSES, RESPONSE | cut))
        assert item["item"] == end["response"]["output"][-1]
        assert (item["item"]["status"], end["type"]) == ("incomplete", "response.incomplete")
    types = [event["type"].removeprefix("response.") for event in events]
    assert [name for name, _ in groupby(types)] == TYPES.split()
    for index, item in enumerate(events[-1]["response"]["output"]):
        of_item = [event for event in events if event.get("output_index") == index]
        said = "".join(event.get("delta", "") for event in of_item)
        assert said == (item["content"][0]["text"] if "content" in item else item["arguments"])
        assert of_item[-1]["item"] == item


async def test_a_message_has_thoughts_text_and_calls_as_blocks(http: Http) -> None:
    answer = (await http.post(MESSAGES, MESSAGE)).json
    *blocks, call = answer["content"]
    thoughts = {"type": "thinking", "thinking": "hm", "signature": ""}
    assert blocks == [thoughts, {"type": "text", "text": "See:"}]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"a": 1})
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("tool_use", len(SAID) + 1)
    counted = (await http.post(COUNT, MESSAGE | {"max_tokens": None})).json
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]
    start, *changes, ending, stop = events_of(await http.post(MESSAGES, MESSAGE | {"stream": True}))
    assert start["message"]["usage"]["input_tokens"] == counted["input_tokens"]
    assert (ending["delta"]["stop_reason"], ending["usage"]) == ("tool_use", answer["usage"])
    assert stop == {"type": "message_stop"}
    names = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}
    for index, block in enumerate(answer["content"]):
        name = names[block["type"]]
        first, *deltas, last = (each for each in changes if each["index"] == index)
        kinds = (first["content_block"]["type"], last["type"])
        assert kinds == (block["type"], "content_block_stop")
        said = "".join(each["delta"][name] for each in deltas)
        assert said == (json.dumps(block["input"]) if "input" in block else block[name])


async def test_why_a_message_ended(http: Http) -> None:
    asked: Any = {"messages": [{"role": "user", "content": saying("yes END")}], "max_tokens": 20}
    for more, reason, stop in (
        ({"stop_sequences": ["n", "END"]}, "stop_sequence", "END"),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"max_tokens": 3.0, "n": 1}, "max_tokens", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "end_turn", None),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "end_turn", None),
    ):
        answer = (await http.post(MESSAGES, asked | more)).json
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stop)
    begun = [*asked["messages"], {"role": "assistant", "content": "So" + TURN}]
    answer = (await http.post(MESSAGES, asked | {"messages": begun})).json
    assert answer["content"] == [{"type": "text", "text": "yes END"}], "it goes on with its turn"


async def test_a_call_that_is_cut_off_or_no_json_is_no_one_s_fault(http: Http) -> None:
    said = r'<tool_call>{"name": "f", "arguments": {"a": 1e999, "b": "\ud83d", "c": -Infinity}}'
    message = MESSAGE | {"messages": [{"role": "user", "content": saying(said)}]} | TOOLS
    del message["chat_template_kwargs"]
    (call,) = (await http.post(MESSAGES, message)).json["content"]
    assert call["input"] == {"a": None, "b": "\ufffd", "c": None}
    events = events_of(await http.post(MESSAGES, message | {"stream": True}))
    streamed = "".join(each.get("delta", {}).get("partial_json", "") for each in events)
    assert from_json(streamed)["b"] == "\ufffd"
    cut = (await http.post(MESSAGES, message | {"stop_sequences": ["arguments"]})).json
    assert cut["stop_reason"] == "stop_sequence"
    response = {"input": saying(said), "tools": [FUNCTION], "stop": ["arguments"]}
    whole = (await http.post(RESPONSES, response)).json
    *_, item, end = events_of(await http.post(RESPONSES, response | {"stream": True}))
    for status in (whole["status"], item["item"]["status"], end["response"]["status"]):
        assert status == "incomplete"


async def test_an_answer_goes_back_into_the_same_prompt(speaks: Speaks) -> None:
    thinks = "{# <think> #}{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"
    asked, text = {"role": "user", "content": "q"}, {"type": "text", "text": saying("done")}
    async with speaks(MARKS["hermes"] + thinks + CHAT) as (d, http):
        *items, call = (await http.post(RESPONSES, RESPONSE)).json["output"]
        *blocks, use = (await http.post(MESSAGES, MESSAGE)).json["content"]
        call["call_id"] = use["id"] = "c1"
        result = {"type": "function_call_output", "call_id": "c1", "output": "42"}
        refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "See:"}]}
        assert items.pop()["content"][0]["text"] == "See:"
        said = [asked, *items, refusal, call, result, {"role": "user", "content": [text]}]
        body = {"input": said, "instructions": "brief", "tools": [FUNCTION | {"strict": True}]}
        answers = [await http.post(RESPONSES, body)]
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "42", "cache_control": {}}
        his = {
            "role": "assistant",
            "content": [{"type": "redacted_thinking", "data": "x"}, *blocks, use],
        }
        turns = [asked, his, {"role": "user", "content": [result, text]}]
        answers += [await http.post(MESSAGES, {"messages": turns, "system": "brief", **TOOLS})]
        assert not any("x-baton-ignored-fields" in answer.headers for answer in answers)
        *_, one, other = d.worker("d0").finished.values()
        assert one.tokens[: one.num_prompt] == other.tokens[: other.num_prompt]
        prompt = bytes(one.tokens[: one.num_prompt]).decode()
        function = {"name": "f", "arguments": {"a": 1}}
        calls = json.dumps([{"id": "c1", "type": "function", "function": function}])
        begin = f"hm<system>brief<user>q<assistant>See:{calls}<tool>42[c1 of f]<user>"
        assert prompt.startswith(begin + saying("done"))


PICTURE = {"role": "user", "content": [{"type": "input_image"}]}
POEM, ACTS = {"format": {"type": "poem"}}, [{"type": "mcp"}]
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": ["x"]}
SECRET = [{"type": "reasoning", "encrypted_content": "x"}]
SEARCH = ["file_search_call.results"]
REFUSED: Any = {
    RESPONSES: {
        "previous_response_id": "r", "background": True, "conversation.id": {"id": "c"},
        "prompt.id": {"id": "p"}, "truncation": "auto", "include[0]": SEARCH, "tools[0]": ACTS,
        "tools[0].name": [{"type": "function"}], "tool_choice": {"type": "mcp"}, "input": [],
        "max_output_tokens": 0, "text.format": POEM, "input[0].content[0]": [PICTURE],
        "input[0].encrypted_content": SECRET, "input[0]": [{"type": "item_reference"}],
        "reasoning.effort": {"effort": 1}, "max_tokens": 5, "messages": [{}], "input[0].role": [{}],
        "input[1]": [{"role": "user"}, {"type": "input_text", "text": "x"}],
        "text.format.schema": {"format": {"type": "json_object", "schema": {"type": "object"}}},
        "tool_choice.tools": ALLOWED | {"tools": 5}, "tool_choice.tools[0]": ALLOWED,
        "response_format": {"a": 1}, "reasoning_effort": 1, "text.verbosity": {"verbosity": "x"},
        "input[1].output": [{}, {"type": "function_call_output", "output": {"a": 1}}],
    },
    MESSAGES: {
        "max_tokens": None, "messages[0].content[0]": [PICTURE], "tools[0]": ACTS,
        "container": "x", "output_config.effort": {"effort": "low"}, "thinking": {"type": []},
        "output_config.format": POEM, "stop_sequences[0]": [""], "stop": "x",
        "messages[0].role": [{}],
    },
}  # fmt: skip


async def test_what_is_not_served_is_refused_by_name(d: Deployment, http: Http) -> None:
    document = (await http.call("GET", "/openapi.json")).json
    schema = {"components": document["components"], "$ref": "#/components/schemas/Error"}
    for path, body in ((RESPONSES, RESPONSE), (MESSAGES, MESSAGE)):
        for name, value in REFUSED[path].items():
            answer = await http.post(path, body | {re.split(r"[\[.]", name)[0]: value})
            error = answer.json["error"]
            assert (answer.status, error["type"]) == (400, "invalid_request_error"), name
            assert error["message"].startswith(f"{name}: "), error
            assert error.get("param", name) == name
            jsonschema.validate(answer.json, schema)
            assert answer.json.get("type") == ("error" if path == MESSAGES else None)
    assert d.worker("d0").num_reserves == 0


async def test_a_stream_that_fails_says_so_in_its_api_s_words(d: Deployment, http: Http) -> None:
    d.worker("d0").may_decode.clear()
    more = {"stream": True, "timeout_ms": 500}
    *_, response = events_of(await http.post(RESPONSES, RESPONSE | more))
    assert (response["type"], response["response"]["status"]) == ("response.failed", "failed")
    *_, error = events_of(await http.post(MESSAGES, MESSAGE | more))
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    d.worker("d0").may_decode.set()
