"""Tool calls and reasoning in an answer's text: the same however the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from baton.errors import InvalidRequestError
from baton.v1 import router_pb2
from router.request.chat import conversation_of
from router.request.validate import RequestLimits, encode_prompt
from router.text import Conversation, TextModel
from router.text.reasoning import ReasoningSplitter
from router.text.tools import CallDelta, ToolFormat, new_parser, tool_format_of
from tests.router.text_fixtures import byte_level_tokenizer, load_text, parse, write_model

NAMES = ("f", "g.h")
Found = tuple[str, list[tuple[str, str]]]


def found(tool_format: ToolFormat, pieces: Sequence[str]) -> Found:
    """The text and the calls, put together as a client does."""
    parser = new_parser(tool_format, NAMES)
    out = [one for piece in pieces for one in parser.push(piece)] + parser.finish()
    text, calls = "", list[tuple[str, str]]()
    for one in out:
        if isinstance(one, str):
            assert one
            text += one
        elif one.name is not None:
            assert one.index == len(calls), "calls come one after the other"
            calls.append((one.name, one.arguments))
        else:
            name, arguments = calls[one.index]
            calls[one.index] = (name, arguments + one.arguments)
    return text, calls


def cuts_of(text: str) -> list[list[str]]:
    """Whole, in two at every position, and character by character."""
    return [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]


TRICKY = '{"a": "}{\\"</tool_call>", "b": [1, {"c": null}], "é": "\\u00e9"}'
CASES: list[tuple[ToolFormat, str, Found]] = [
    ("hermes", "just text, 1 < 2", ("just text, 1 < 2", [])),
    (
        "hermes",
        f'Sure.\n<tool_call>\n{{"name": "f", "arguments": {TRICKY}}}\n</tool_call>',
        ("Sure.", [("f", TRICKY)]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        '<tool_call>{"arguments": {"x": 1}, "name": "g.h"}</tool_call>\n',
        ("", [("f", "{}"), ("g.h", '{"x": 1}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f"}</tool_call> and on',
        (" and on", [("f", "{}")]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>',
        ("", [("f", '{"x": 1}')]),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1', ("", [("f", '{"x": 1')])),
    (
        "hermes",
        r'<tool_call>{"name": "\ud83d\ude00\udc00f", "arguments": "\ud83d"}</tool_call>',
        ("", [("\U0001f600\ufffdf", "\ufffd")]),
    ),
    (
        "hermes",
        r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d\ud83d\ude00\\ud83d\uD8\n\udc00"}}',
        ("", [("f", r'{"a": "\ufffd\ud83d\ude00\\ud83d\uD8\n\ufffd"}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "name": "g.h", "arguments": {"b": 2}}',
        ("", [("f", '{"a": 1}')]),
    ),
    ("hermes", '<tool_call>{"name": "f", "extra": 5, "arguments": null}', ("", [("f", "{}")])),
    ("hermes", "<tool_call>f(x)</tool_call>!", ("<tool_call>f(x)</tool_call>!", [])),
    ("hermes", "<tool_call>{}</tool_call>", ("<tool_call>{}</tool_call>", [])),
    ("hermes", 'a <tool_call>{"na', ('a <tool_call>{"na', [])),
    ("hermes", "ends with <tool_", ("ends with <tool_", [])),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}} oops <tool_call>{"name": "g.h"}</tool_call>',
        ("", [("f", "{}"), ("g.h", "{}")]),
    ),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {TRICKY}}}, {{"name": "g.h"}}]',
        ("", [("f", TRICKY), ("g.h", "{}")]),
    ),
    (
        "mistral",
        'Well. [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g.h[CALL_ID]abc[ARGS]{}',
        ("Well.", [("f", '{"x": 1}'), ("g.h", "{}")]),
    ),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', ("", [("f", "{}")])),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]{"name": "g.h", "arguments": {"x": 1}}',
        ("", [("f", "{}"), ("g.h", '{"x": 1}')]),
    ),
    ("mistral", "[TOOL_CALLS][5]", ("[TOOL_CALLS][5]", [])),
    ("mistral", "[TOOL_CALLS]nothing", ("[TOOL_CALLS]nothing", [])),
    ("mistral", "see [TOOL", ("see [TOOL", [])),
    (
        "llama3",
        f'{{"name": "f", "parameters": {TRICKY}}}; {{"name": "g.h", "parameters": {{}}}}',
        ("", [("f", TRICKY), ("g.h", "{}")]),
    ),
    (
        "llama3",
        '<|python_tag|>{"type": "function", "name": "new", "parameters": {"x": 1}}',
        ("", [("new", '{"x": 1}')]),
    ),
    (
        "llama3",
        '<|python_tag|>f.call(query="it\'s", n=3)',
        ("", [("f", '{"query": "it\'s", "n": 3}')]),
    ),
    ("llama3", "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    ("llama3", "<|python_tag|>f.call(x)", ("<|python_tag|>f.call(x)", [])),
    ("llama3", "<|python_tag|>f.call(x=1e999)", ("<|python_tag|>f.call(x=1e999)", [])),
    ("llama3", '{"name": "Hugo", "age": 5}', ('{"name": "Hugo", "age": 5}', [])),
    ("llama3", ' {"answer": [1]} is it', (' {"answer": [1]} is it', [])),
    ("llama3", "plain text {", ("plain text {", [])),
]


@pytest.mark.parametrize(("tool_format", "text", "expected"), CASES)
def test_calls_are_found_wherever_the_text_is_cut(
    tool_format: ToolFormat, text: str, expected: Found
) -> None:
    for pieces in cuts_of(text):
        assert found(tool_format, pieces) == expected, pieces


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(
    tool_format=st.sampled_from(["hermes", "mistral", "llama3"]),
    calls=st.lists(
        st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=5), values)),
        min_size=1, max_size=3,
    ),
    ascii_only=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)  # fmt: skip
@settings(deadline=None)
def test_any_calls_are_read_back_however_they_are_cut(
    tool_format: ToolFormat,
    calls: list[tuple[str, dict[str, Any]]],
    ascii_only: bool,
    cuts: list[int],
) -> None:
    key = "parameters" if tool_format == "llama3" else "arguments"
    written = [
        json.dumps({"name": name, key: arguments}, ensure_ascii=ascii_only)
        for name, arguments in calls
    ]
    text = {
        "hermes": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in written),
        "mistral": f"[TOOL_CALLS][{', '.join(written)}]",
        "llama3": "; ".join(written),
    }[tool_format]
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    content, read_back = found(tool_format, [text[a:b] for a, b in itertools.pairwise(edges)])
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in read_back] == calls


@given(
    tool_format=st.sampled_from(["hermes", "mistral", "llama3"]),
    parts=st.lists(
        st.sampled_from([
            *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "f"),
            *('{"name": "f"', ', "arguments": ', '"parameters": {', "}", "]", "[", '"', "\\", ";"),
            *(" ", "\n", "text", ",", ":", "{", "null"),
        ]),
        max_size=12,
    ),
)  # fmt: skip
@settings(deadline=None, max_examples=300)
def test_no_text_breaks_a_parser_and_none_depends_on_the_cuts(
    tool_format: ToolFormat, parts: list[str]
) -> None:
    text = "".join(parts)
    assert found(tool_format, parts) == found(tool_format, [text]) == found(tool_format, list(text))


def test_a_call_s_arguments_stream_before_it_ends() -> None:
    parser = new_parser("hermes", NAMES)
    assert parser.push('<tool_call>{"name": "f", "arguments": {"text": "on') == [
        CallDelta(0, "f", '{"text": "on')
    ]
    assert parser.push("ce") == [CallDelta(0, None, "ce")]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama3"),
        ("{% if tools %}Environment: ipython{% endif %}", "llama3"),
        ("{% if tools %}<tool_call><function=f>{% endif %}", None),
        ("{% if tools %}{{ tools }}{% endif %}", None),
        ("no mention: <tool_call>", None),
    ],
)
def test_the_format_is_what_the_template_shows(template: str, expected: str | None) -> None:
    assert tool_format_of(template) == expected


# --- reasoning ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>hm</think>yes", False, ("hm", "yes")),
        ("\n<think>\nhm\n</think>\n\nyes </think>", False, ("\nhm\n", "yes </think>")),
        ("hm</think>\n\nyes", True, ("hm", "yes")),
        ("yes", False, ("", "yes")),
        (" yes <think> no", False, ("", " yes <think> no")),
        ("<think>never ends</thin", False, ("never ends</thin", "")),
        ("<thi", False, ("", "<thi")),
        ("</think>", True, ("", "")),
    ],
)
def test_reasoning_is_split_off_wherever_the_text_is_cut(
    text: str, is_open: bool, expected: tuple[str, str]
) -> None:
    for pieces in cuts_of(text):
        splitter = ReasoningSplitter(is_open=is_open)
        splits = [*map(splitter.push, pieces), splitter.finish()]
        reasoning = "".join(split.reasoning for split in splits)
        assert (reasoning, "".join(split.content for split in splits)) == expected, pieces


# --- what goes into the template ------------------------------------------------------------------

TOOLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls | default('') | tojson }}"
    "{{ m.name | default('') }}{{ m.reasoning_content | default('') }}\n{% endfor %}"
    "{{ tools | tojson if tools }}{{ extra | default('') }}<think>\n{# <tool_call> #}"
)
LIMITS = RequestLimits(max_model_len=512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("model")
    return load_text(write_model(folder, byte_level_tokenizer(), chat_template=TOOLS))


def chat_of(*messages: router_pb2.ChatMessage, **fields: Any) -> router_pb2.ChatMessages:
    return router_pb2.ChatMessages(messages=messages, **fields)


def test_a_chat_s_tools_calls_and_results_reach_the_template(model: TextModel) -> None:
    call = router_pb2.ToolCall(id="1", name="f", arguments='{"a": "<s>"}')
    tool = router_pb2.Tool(name="f", description="d <s>", parameters='{"type": "object"}')
    parts = [router_pb2.ContentPart(text="one"), router_pb2.ContentPart(text="two")]
    chat = chat_of(
        router_pb2.ChatMessage(role="user", parts=parts),
        router_pb2.ChatMessage(role="assistant", tool_calls=[call], reasoning_content="hm"),
        router_pb2.ChatMessage(role="tool", tool_call_id="1", content="42"),
        tools=[tool],
        template_arguments='{"extra": "!"}',
    )
    ids = model.encode_chat(conversation_of(chat))
    text = model.decode(ids)
    assert "user:one\ntwo" in text
    assert '"function": {"name": "f", "arguments": {"a": "<s>"}}' in text
    assert 'tool:42""f' in text
    assert '"description": "d <s>"' in text
    assert "hm" in text
    assert text.rstrip().endswith("!<think>")
    bos = model.encode("x")[0]
    assert bos not in ids, "special tokens that a client writes stay text"
    assert model.thinks_after(ids)
    request = router_pb2.GenerateRequest(chat=chat)
    parsed = parse(request, model, RequestLimits(max_model_len=4096))
    assert parsed.token_ids.tolist() == ids
    assert parsed.is_chat
    asked = router_pb2.TokenizeRequest(chat=chat)
    assert encode_prompt(asked, 0, model, RequestLimits(max_model_len=4096)).tolist() == ids
    other = router_pb2.GenerateRequest(chat=chat)
    other.chat.tools[0].name = "g"
    differs = parse(other, model, RequestLimits(max_model_len=4096))
    assert differs.body_digest != parsed.body_digest


def test_a_plain_chat_is_the_same_with_and_without_parts(model: TextModel) -> None:
    plain = chat_of(router_pb2.ChatMessage(role="user", content="hi <s>"))
    parts = chat_of(
        router_pb2.ChatMessage(role="user", parts=[router_pb2.ContentPart(text="hi <s>")])
    )
    first, second = (
        parse(router_pb2.GenerateRequest(chat=chat), model, LIMITS) for chat in (plain, parts)
    )
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.token_ids.tolist() == model.encode_chat(
        Conversation([{"role": "user", "content": "hi <s>"}])
    )


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (chat_of(tools=[router_pb2.Tool(name="f")]), "chat.messages"),
        (
            chat_of(router_pb2.ChatMessage(role="king", tool_call_id="1")),
            "chat.messages[0].role",
        ),
        (
            chat_of(router_pb2.ChatMessage(role="tool", parts=[router_pb2.ContentPart()])),
            "chat.messages[0].parts[0]",
        ),
        (
            chat_of(router_pb2.ChatMessage(role="tool"), template_arguments="[1]"),
            "chat.template_arguments",
        ),
        (
            chat_of(router_pb2.ChatMessage(role="tool"), template_arguments='{"x": "\\ud800"}'),
            "chat.template_arguments",
        ),
        (
            chat_of(router_pb2.ChatMessage(role="tool"), template_arguments='{"tools": 1}'),
            "chat.template_arguments",
        ),
        (
            chat_of(
                router_pb2.ChatMessage(role="user"),
                tools=[router_pb2.Tool(name="f", parameters="{")],
            ),
            "chat.tools[0].parameters",
        ),
    ],
)
def test_what_a_chat_cannot_hold_is_named(
    model: TextModel, chat: router_pb2.ChatMessages, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(router_pb2.GenerateRequest(chat=chat), model, LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "written",
    ['{"city": "Par', "[1]", '"x"', "no JSON", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 9999],
)
def test_what_a_model_wrote_as_arguments_is_read_back_whatever_it_is(
    model: TextModel, written: str
) -> None:
    calls = [router_pb2.ToolCall(name="", arguments=text) for text in (written, "null", "")]
    conversation = conversation_of(
        chat_of(router_pb2.ChatMessage(role="assistant", tool_calls=calls))
    )
    (message,) = conversation.messages
    functions = [call["function"] for call in message["tool_calls"]]
    assert [each["arguments"] for each in functions] == [{"malformed": written}, {}, {}]
    assert json.dumps(written) in model.decode(model.encode_chat(conversation))


def test_special_tokens_that_mark_calls_stay_in_the_text(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    template = "{{ tools }}[TOOL_CALLS]"
    folder = write_model(tmp_path, tokenizer, chat_template=template)
    marker = tokenizer.token_to_id("[TOOL_CALLS]")
    model = load_text(folder)
    assert model.tool_format == "mistral"
    assert model.decode([marker, model.encode("<s>")[0]]) == "[TOOL_CALLS]"
    files = [path for path in folder.iterdir() if path.is_file()]
    plain = TextModel(files, tool_calls="none")
    assert (plain.tool_format, plain.decode([marker])) == (None, "")
    assert TextModel(files, tool_calls="hermes").tool_format == "hermes"
    assert not model.reasons
    assert TextModel(files, reasoning="think").reasons
