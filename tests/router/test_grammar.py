"""Grammars of answers: whatever keeps to them is what the client asked for."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from baton.errors import InvalidRequestError
from baton.grammar import MAX_GRAMMAR_BYTES
from baton.v1 import router_pb2
from router.request.validate import ParsedRequest, RequestLimits
from router.text import TextModel
from router.text.reasoning import ReasoningSplitter
from router.text.tools import MARKERS, ToolFormat
from tests.router.test_grammar_chains import LINKS, RULES, rules, schema
from tests.router.test_text_tools import found
from tests.router.text_fixtures import byte_level_tokenizer, load_text, parse, write_model

LIMITS = RequestLimits(max_model_len=512)
TOWN = {
    "type": "object",
    "properties": {"town": {"type": "string", "maxLength": 3}, "days": {"enum": [1, 2]}},
    "required": ["town"],
    "additionalProperties": False,
}
TOOLS = {"f": TOWN, "g.h": {"type": "object", "additionalProperties": False}}
EOS = "</s>"


def model_of(
    folder: Path, template: str, special: tuple[str, ...] = (), added: tuple[str, ...] = ()
) -> TextModel:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in special])
    tokenizer.add_tokens([AddedToken(each, normalized=False, special=False) for each in added])
    return load_text(write_model(folder, tokenizer, chat_template=template))


def request(**fields: Any) -> router_pb2.GenerateRequest:
    return router_pb2.GenerateRequest(**({"text": "Say something."} | fields))


def chat(
    choice: router_pb2.ToolChoice | None = None,
    names: tuple[str, ...] = tuple(TOOLS),
    parameters: str = "{}",
    **more: Any,
) -> router_pb2.GenerateRequest:
    made = router_pb2.ChatMessages(tool_choice=choice)
    made.messages.add(role="user", content="hi")
    for name in names:
        made.tools.add(name=name, parameters=json.dumps(TOOLS[name]) if name == "f" else parameters)
    return router_pb2.GenerateRequest(chat=made, **more)


def said(folder: Path, model: TextModel, parsed: ParsedRequest, seed: int, begin: str = "") -> str:
    """An answer of any allowed tokens after `begin`; it ends as soon as it may."""
    assert parsed.constraint is not None
    (eos,) = model.eos_token_ids
    tokenizer = LLTokenizer(str(folder / "tokenizer.json"), model.vocab_size, [eos])
    matcher = LLMatcher(tokenizer, parsed.constraint.grammar)
    read_by = Tokenizer.from_file(str(folder / "tokenizer.json"))
    draw, ids = random.Random(seed), read_by.encode(begin, add_special_tokens=False).ids
    assert matcher.consume_tokens(ids), matcher.get_error()
    while True:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        if eos in allowed:
            return model.decode(ids)
        ids.append(draw.choice(allowed))
        assert len(ids) < 3000
        matcher.consume_token(ids[-1])


# --- plain --------------------------------------------------------------------------------------


def test_every_kind_of_constraint_becomes_a_grammar(tmp_path: Path) -> None:
    model = model_of(tmp_path, "")
    texts = ['a "quote"', "new\nline é"]
    cases: list[tuple[dict[str, Any], Callable[[str], object]]] = [
        (
            {"json_schema": json.dumps(TOWN)},
            lambda text: Draft202012Validator(TOWN).is_valid(json.loads(text)),
        ),
        ({"json_object": {}}, lambda text: isinstance(json.loads(text), dict)),
        ({"grammar": 'start: "x" y\ny: "y" | "z"'}, lambda text: text in ("xy", "xz")),
        ({"choice": {"texts": texts}}, lambda text: text in texts),
        ({"regex": r"\d[\w]/\s\\d"}, lambda text: re.fullmatch(r"(?a)\d\w/\s\\d", text)),
        (
            {"grammar": r'start: /[\d]\w\// "//\\d" D // "' + "\nD: /\\s/"},
            lambda text: re.fullmatch(r"(?a)\d\w///\\d\s", text),
        ),
    ]
    for fields, fits in cases:
        parsed = parse(request(**fields), model, LIMITS)
        for seed in range(5):
            assert fits(said(tmp_path, model, parsed, seed)), fields
        assert parsed.constraint is not None
        assert parsed.constraint.field in fields
    assert parse(request(), model, LIMITS).constraint is None


def test_a_grammar_that_leaves_no_choice_and_never_ends_gives_masks(tmp_path: Path) -> None:
    """Its second word has nothing left to begin with, so the library would follow it for ever."""
    never = 'start: "x" | "y" word word "a"\nword: /b+/'
    parsed = parse(request(grammar=never), model_of(tmp_path, ""), LIMITS)
    assert parsed.constraint is not None
    matcher = LLMatcher(LLTokenizer(str(tmp_path / "tokenizer.json")), parsed.constraint.grammar)
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for letter in "ybbb":
        assert matcher.compute_bitmask()
        assert matcher.consume_token(ids.token_to_id(letter))


@pytest.mark.parametrize("added", [(), ("<|user|>", "<§ü§>")], ids=["special", "added"])
@pytest.mark.parametrize("text", ["<|user|>", "a <§ü§> b"])
def test_texts_of_added_tokens_are_spelt_in_ordinary_ones(
    tmp_path: Path, text: str, added: tuple[str, ...]
) -> None:
    special = () if added else ("<|user|>", "<§ü§>")
    model = model_of(tmp_path, "{{ tools }}[TOOL_CALLS]", special, added)
    holds = {"type": "object", "properties": {text: {"const": text}}, "required": [text]}
    value = json.dumps({text: text}, ensure_ascii=False)
    for fields in (
        {"choice": {"texts": [text]}},
        {"regex": re.escape(text)},
        {"grammar": f"start: {json.dumps(text)}"},
        {"json_schema": json.dumps(holds)},
    ):
        parsed = parse(request(**fields), model, LIMITS)
        said_text = said(tmp_path, model, parsed, 1)
        assert "".join(said_text.split(" ")) in (text.replace(" ", ""), value.replace(" ", ""))
    made = chat(router_pb2.ToolChoice(), ("f",))
    made.chat.tools[0].name = text
    assert text in said(tmp_path, model, parse(made, model, LIMITS), 1)


def test_thousands_of_choices_are_one_lexeme(tmp_path: Path) -> None:
    texts = [f"{n} item" for n in range(12_000)]
    model = model_of(tmp_path, "")
    parsed = parse(request(choice={"texts": texts}), model, RequestLimits(max_model_len=1 << 14))
    assert said(tmp_path, model, parsed, 3) in texts


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "[]"}, "json_schema"),
        ({"json_schema": '{"type": "frob"}'}, "json_schema"),
        ({"json_schema": '{"not": {"type": "string"}}'}, "json_schema"),
        ({"json_schema": '{"uniqueItems": true, "x-guidance": {"lenient": true}}'}, "json_schema"),
        ({"json_schema": '{"enum": ["' + "x" * MAX_GRAMMAR_BYTES + '"]}'}, "json_schema"),
        ({"regex": "("}, "regex"),
        ({"grammar": "start: ["}, "grammar"),
        ({"grammar": '{"grammars": []}'}, "grammar"),
        ({"grammar": rules(RULES[:3], 2700)}, "grammar"),
        ({"grammar": "start: %lark {\nstart: /a/\n}"}, "grammar"),
        ({"json_schema": schema(LINKS[1:2], 1500)}, "json_schema"),
        ({"choice": {}}, "choice"),
        ({"choice": {"texts": ["a", ""]}}, "choice"),
        ({"regex": "a", "sampling": {"ignore_eos": True}}, "sampling.ignore_eos"),
        ({"regex": "a", "sampling": {"min_tokens": 2}}, "sampling.min_tokens"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_refused_by_its_field(
    tmp_path: Path, fields: dict[str, Any], field: str
) -> None:
    limits = RequestLimits(max_model_len=1 << 14)
    with pytest.raises(InvalidRequestError) as refused:
        parse(request(**fields), model_of(tmp_path, ""), limits)
    assert refused.value.field == field
    assert refused.value.message.startswith(f"{field}: ")


# --- calls --------------------------------------------------------------------------------------

FORMATS: list[tuple[ToolFormat, str, tuple[str, ...]]] = [
    ("hermes", "{{ tools }}<tool_call>", ()),
    ("hermes", "{{ tools }}<tool_call>", MARKERS["hermes"]),
    ("hermes", "{{ tools }}<tool_call>", ("added", *MARKERS["hermes"])),
    ("llama3", "{{ tools }}<|python_tag|>", ()),
    ("mistral", "{{ tools }}[TOOL_CALLS]", ("[TOOL_CALLS]",)),
    ("mistral", "{{ tools }}[TOOL_CALLS][ARGS]", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", "{{ tools }}[TOOL_CALLS][CALL_ID][ARGS]", MARKERS["mistral"]),
]


@pytest.mark.parametrize(("tool_format", "template", "special"), FORMATS)
def test_a_tool_choice_gives_calls_in_the_model_s_format_and_nothing_else(
    tmp_path: Path, tool_format: ToolFormat, template: str, special: tuple[str, ...]
) -> None:
    is_added = special[:1] == ("added",)  # as Qwen's, whose texts show
    model = model_of(tmp_path, template, *((), special[1:]) if is_added else (special,))
    assert model.tool_format == tool_format
    for choice, names in (
        (router_pb2.ToolChoice(), {"f", "g.h"}),
        (router_pb2.ToolChoice(is_single=True), {"f", "g.h"}),
        (router_pb2.ToolChoice(name="f"), {"f"}),
    ):
        parsed = parse(chat(choice), model, LIMITS)
        seen = set()
        for seed in range(12):
            text, calls = found(tool_format, [said(tmp_path, model, parsed, seed)])
            assert not text
            assert calls
            for name, arguments in calls:
                seen.add(name)
                jsonschema.validate(json.loads(arguments), TOOLS[name])
        assert seen == names


def test_offered_tools_leave_the_choice_between_a_call_and_what_the_constraint_says(
    tmp_path: Path,
) -> None:
    model = model_of(tmp_path, "{{ tools }}<tool_call>")
    parsed = parse(chat(regex="[0-9]{3}"), model, LIMITS)
    answers = [said(tmp_path, model, parsed, seed) for seed in range(20)]
    numbers = [text for text in answers if re.fullmatch("[0-9]{3}", text)]
    assert 0 < len(numbers) < len(answers)
    assert all(found("hermes", [text])[1] for text in answers if text not in numbers)


@pytest.mark.parametrize(
    ("made", "template", "field"),
    [
        (chat(router_pb2.ToolChoice(), ()), "{{ tools }}<tool_call>", "chat.tool_choice"),
        (chat(router_pb2.ToolChoice(name="k")), "{{ tools }}<tool_call>", "chat.tool_choice"),
        (chat(router_pb2.ToolChoice()), "no format", "chat.tools"),
        (
            chat(router_pb2.ToolChoice(), parameters='{"type": "frob"}'),
            "{{ tools }}<tool_call>",
            "chat.tools[1].parameters",
        ),
    ],
)
def test_a_tool_choice_that_cannot_be_made_is_refused(
    tmp_path: Path, made: router_pb2.GenerateRequest, template: str, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parse(made, model_of(tmp_path, template), LIMITS)
    assert refused.value.field == field


# --- thoughts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["spelt", "special"])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_model_that_thinks_may_do_so_before_it_keeps_to_the_constraint(
    tmp_path: Path, special: tuple[str, ...], is_open: bool
) -> None:
    template = "{# <think> #}go" + ("<think>" if is_open else "")
    model = model_of(tmp_path, template, special)
    parsed = parse(chat(None, (), regex="[0-9]{3}"), model, LIMITS)
    begun = "" if is_open else "<think>"
    for begin, thoughts in ((f"{begun}well, 12</think>", "well, 12"), ("7", "")):
        if is_open and not thoughts:
            continue
        for seed in range(5):
            splitter = ReasoningSplitter(is_open=is_open)
            split = splitter.push(said(tmp_path, model, parsed, seed, begin))
            assert split.reasoning == thoughts
            assert re.fullmatch("[0-9]{3}", split.content + splitter.finish().content)
    closing = model_of(tmp_path, template + "{# #}<think></think>\n", special)
    parsed = parse(chat(None, (), regex="[ 0-9]{3}"), closing, LIMITS)
    assert re.fullmatch("[ 0-9]{3}", said(tmp_path, closing, parsed, 1))
    assert parsed.constraint is not None
    assert "thoughts" not in parsed.constraint.grammar
    plain = parse(request(regex="[0-9]{3}"), model, LIMITS)
    assert re.fullmatch("[0-9]{3}", said(tmp_path, model, plain, 0))
