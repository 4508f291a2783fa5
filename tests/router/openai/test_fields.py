"""Every field of OpenAI's, vLLM's and SGLang's requests is served, passed or refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.errors import InvalidRequestError
from router.door.http.openai.bodies import SERVED, ChatBody, CompletionBody, parsed
from router.door.http.openai.fields import PASSED, REFUSED
from router.door.http.openai.responses import ResponsesBody
from tests.router.deployment import Deployment
from tests.router.openai.spoken import Http, Speaks, prompt_for
from tests.router.openai.test_refusals import TOOL, USER

NEEDED: dict[Any, Any] = {ChatBody: {"messages": [USER]}, CompletionBody: {"prompt": "x"}}
FUNCTION = TOOL["function"]
WITHIN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "messages": lambda each: {"messages": [USER, USER | each]},
    "content": lambda each: {"messages": [USER | {"content": [TEXT | each]}]},
    "tool_calls": lambda each: {"messages": [CALLER | {"tool_calls": [TOOL | each]}]},
    "tools": lambda each: {"tools": [TOOL | each]},
    "function": lambda each: {"tools": [TOOL | {"function": FUNCTION | each}]},
    "json_schema": lambda each: {"response_format": FORMAT | {"json_schema": SCHEMA | each}},
    "response_format": lambda each: {"response_format": {"type": "json_object"} | each},
    "stream_options": lambda each: {"stream": True, "stream_options": each},
    "structured_outputs": lambda each: {"structured_outputs": {"regex": "x"} | each},
}
TEXT, CALLER = {"type": "text", "text": "hi"}, {"role": "assistant", "content": None}
FORMAT, SCHEMA = {"type": "json_schema"}, {"schema": {"type": "object"}}


def made(kind: Any = ChatBody, **fields: Any) -> Any:
    return parsed(kind, json.dumps({**NEEDED[kind], **fields}).encode())[1][0]


def test_the_page_lists_what_is_served_passed_and_refused() -> None:
    page = (Path(__file__).parents[3] / "docs" / "openai.md").read_text()
    for word, names in (("Served", SERVED), ("Passed", PASSED), ("Refused", REFUSED)):
        (bullet,) = re.findall(rf"^- \*\*{word}\*\*(.*?)^- ", page, re.M | re.S)
        assert sorted(re.findall(r"`([\w.]+)`", bullet)) == sorted(names)


def test_a_field_that_is_not_served_is_refused_unless_it_changes_nothing() -> None:
    for kind in NEEDED:
        elsewhere = dict.fromkeys(SERVED - kind.model_fields.keys(), (False,))
        for name, neutral in {**REFUSED, **elsewhere}.items():
            if "." not in name:
                assert all(made(kind, **{name: value}) for value in (None, *neutral))
                with pytest.raises(InvalidRequestError, match=f"{name}: not served"):
                    made(kind, **{name: ["x"]})
        plain = {name: "x" for name in PASSED if "." not in name}
        plain |= dict.fromkeys(SERVED - NEEDED[kind].keys())
        assert made(kind, **plain) == made(kind)
        assert made(kind, best_of=2, n=2.0)
    for name in [*PASSED, *REFUSED]:
        around, _, own = name.partition(".")
        if own and around in WITHIN:
            within = WITHIN[around]
            assert made(**within({own: None})) == made(**within({}))
            value = "x" if name in PASSED else False
            body = json.dumps(NEEDED[ChatBody] | within({own: value}))
            assert parsed(ChatBody, body.encode())[2] == []
            if name in REFUSED:
                with pytest.raises(InvalidRequestError, match=rf"{around}\b.*\.{own}: not served"):
                    made(**within({own: ["x"]}))


async def test_what_nobody_knows_is_told_and_counted(d: Deployment, http: Http) -> None:
    for stream in (True, False):
        answer = await http.chat("yes", stream=stream, frob=1, user="x", **{"a b": 2, "null": None})
        assert answer.headers["x-baton-ignored-fields"] == "frob, other"
    turn = [USER, USER | {"frob": None, "grob": 1, "annotations": []}]
    answer = await http.post("/tokenize", {"messages": turn, "frob": 1})
    assert answer.headers["x-baton-ignored-fields"] == "frob, messages.grob"
    metrics = d.servers[0].api.units.metrics
    metrics.saw_ignored([f"f{number}" for number in range(100)])
    value = metrics.registry.get_sample_value
    counts = [value("baton_ignored_fields_total", {"field": f}) for f in ("frob", "other", "f99")]
    assert counts == [3, 2 + 100 - 61, None]


async def test_constraints_have_older_names_too_and_grammars_may_be_gbnf(http: Http) -> None:
    for kind, value, names in (
        ("json", {"type": "object"}, ("guided_json", "json_schema")),
        ("regex", "[0-9]{3}", ("guided_regex", "regex")),
        ("choice", ["yes", "no"], ("guided_choice",)),
        ("grammar", 'start: "x"', ("guided_grammar", "ebnf")),
    ):
        for name in names:
            assert made(**{name: value}) == made(structured_outputs={kind: value})
    assert (await http.chat("ab", ebnf='root ::= x "b"\nx ::= [a-c]')).status == 200


async def test_templates_read_names_documents_and_how_the_turn_goes_on(speaks: Speaks) -> None:
    turns = [{**USER, "name": "Al"}, {"role": "assistant", "content": "Hm, "}]
    async with speaks(
        "{% for m in messages %}{{ m.name }}:{{ m.content }};{% endfor %}{{ documents }}"
        "{{ reasoning_effort }}{{ enable_thinking }}{{ '>' if add_generation_prompt }}"
    ) as (_, http):
        for fields, text in (
            ({"documents": [{"a": 1}]}, "Al:hi;:Hm, ;[{'a': 1}]>"),
            ({"reasoning_effort": "none"}, "Al:hi;:Hm, ;NonenoneFalse>"),
            ({"add_generation_prompt": False}, "Al:hi;:Hm, ;None"),
            ({"continue_final_message": True}, "Al:hi;:Hm, "),
        ):
            answer = await http.post("/tokenize", {"messages": turns, **fields})
            assert bytes(answer.json["tokens"]).decode() == text


async def test_an_answer_s_text_and_ids_are_as_they_were_asked_for(http: Http) -> None:
    stop = {"include_stop_str_in_output": True}
    for fields, text, why in (
        ({"stop": ["c"], **stop}, "abc", "c"),
        ({"stop_token_ids": [ord("c")], **stop}, "abc", ord("c")),
        ({"skip_special_tokens": False, **stop}, "abcd<end>", None),
    ):
        choice = (await http.complete("abcd", **fields)).json["choices"][0]
        last = (await http.chat("abcd", stream=True, **fields)).events[-1]["choices"][0]
        assert (choice["text"], choice["stop_reason"], last["stop_reason"]) == (text, why, why)
    long = {"prompt": "x" * 3000 + prompt_for("ab"), "truncate_prompt_tokens": -1, "max_tokens": 9}
    assert (await http.post("/v1/completions", long)).json["usage"]["prompt_tokens"] == 2048 - 9
    assert made(CompletionBody, add_special_tokens=False).omit_special_tokens
    asked = {"return_token_ids": True, "truncate_prompt_tokens": 5}
    prompt, ids = [*b"\x02ab\x03\x1c"], [*b"ab", 256]
    whole = (await http.complete("ab", **asked)).json["choices"][0]
    assert (whole["prompt_token_ids"], whole["token_ids"]) == (prompt, ids)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, _ = (await http.chat("ab", **asked, stream=True, stream_options=options)).events
    assert events[0]["prompt_token_ids"] == prompt
    assert [each for event in events for each in event["choices"][0].get("token_ids", ())] == ids
    assert events[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def test_allowed_tools_are_the_only_ones_and_may_be_required() -> None:
    other, flat = {"type": "function", "function": {"name": "g"}}, {"type": "function", "name": "g"}
    mode, kind = {"mode": "required"}, {"type": "allowed_tools"}
    choice = kind | {"allowed_tools": mode | {"tools": [other]}}
    asked = {"input": "x", "tools": [flat | {"name": "f"}, flat]}
    asked["tool_choice"] = kind | mode | {"tools": [flat]}
    response = parsed(ResponsesBody, json.dumps(asked).encode())[1][0]
    for request in (made(tools=[TOOL, other], tool_choice=choice), response):
        assert [tool.name for tool in request.chat.tools] == ["g"]
        assert request.chat.HasField("tool_choice")
