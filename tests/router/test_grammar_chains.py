"""Whatever a client sends as a grammar is taken or refused; no chain of rules ends the process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequestError
from baton.grammar_chains import MAX_CHAIN
from baton.v1 import router_pb2
from engine.constraints import GrammarCompiler
from engine.errors import InvalidRequestError as RefusedByEngine
from router.request.validate import RequestLimits, parse_generate
from router.text.grammar import GrammarError, of_lark, of_regex, of_schema
from tests.router.text_fixtures import byte_level_tokenizer, load_text, write_model

ROOT = Path(__file__).resolve().parents[2]
TAKEN = ["taken", "taken"]
Link = Callable[[Any], Any]


def rules(links: list[str], count: int, last: str = '"a"') -> str:
    """`count` rules, each of which names the next one as a link says."""
    chain = [f"r{i}: {links[i % len(links)].format(f'r{i + 1}')}" for i in range(count - 1)]
    return "\n".join([*chain, f"r{count - 1}: {last}", "start: r0"])


def schema(links: list[Link], count: int, last: Any = True) -> str:
    ref = "#/$defs/d{}".format
    made = {f"d{i}": links[i % len(links)]({"$ref": ref(i + 1)}) for i in range(count - 1)}
    return json.dumps({"$defs": {**made, f"d{count - 1}": last}, "$ref": ref(0)})


RULES = ["{}", '"b" {} | "a"', '("b" {})* "c"', "[[[[[[[[[{}]]]]]]]]]", '/b+/ "c" {}']
# What may stand before a name, and must not hide it.
HIDING = ['<"> {}', '/x"/i{} ', '"/"i{} ', '"\\"" {}', '/[#]/ {} # "', "a~1{}", '"x"+1.5e3{}']
HIDING += ['%json {{"const": "}}"}} {}', "a {} // /", "<a#/> {}", "a -> b\n| {}", "_0x1f{}"]
LINKS: list[Link] = [
    lambda ref: ref,
    lambda ref: {"type": "object", "properties": {"a": ref}},
    lambda ref: {"additionalProperties": ref},
    lambda ref: {"patternProperties": {"^a+$": ref}},
    lambda ref: {"type": "array", "items": ref},
    lambda ref: {"prefixItems": [ref, ref]},
    lambda ref: {"allOf": [ref]},
    lambda ref: {"anyOf": [ref, {"type": "null"}]},
    lambda ref: {"oneOf": [ref]},
    lambda ref: {**ref, "type": ["boolean", "object"]},
    lambda ref: {"items": {"items": {"properties": {"a": {"items": {"allOf": [ref]}}}}}},
]


class Child:
    """A process that compiles as a router and as a worker do."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.router.test_grammar_chains"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answers(self, kind: str, text: str) -> list[str]:
        """The router's and the worker's."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([kind, text]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, f"the process has ended with {self.process.wait()} over {kind} {text[:300]}"
        found: list[str] = json.loads(line)
        return found


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    made = Child()
    with made.process:
        yield made
        made.process.kill()


@pytest.mark.parametrize("link", RULES)
def test_a_chain_of_rules_is_taken_up_to_the_bound(child: Child, link: str) -> None:
    most = MAX_CHAIN // (2 if "[[" in link else 1) - 1
    for count, is_taken in ((most, True), (MAX_CHAIN + 1, False), (7000, False)):
        for last in ('"a"', '"a" r0 | "c"'):
            terminals = rules([link], count, '"a"').upper().replace("START", "start")
            for text in (rules([link], count, last), terminals):
                found = child.answers("lark", text)
                assert all(("chain" in each) != is_taken for each in found)


@pytest.mark.parametrize("link", HIDING)
def test_no_token_hides_a_rule(child: Child, link: str) -> None:
    assert TAKEN != child.answers("lark", rules([link], 4000) + '\na: "a"\nb: "b"')
    inner = schema(LINKS[1:2], 1500)
    assert "taken" not in child.answers("lark", f"start: {link.format(f'%json {inner}')}\na: /a/")


@pytest.mark.parametrize("link", LINKS)
def test_a_chain_of_definitions_is_taken_up_to_the_bound(child: Child, link: Link) -> None:
    most = MAX_CHAIN // (1 + json.dumps(link({})).count("items") // 3) - 2
    assert child.answers("schema", schema([link], most)) == TAKEN
    for last in (True, {"$ref": "#/$defs/d0"}):
        found = child.answers("schema", schema([link], 1500, last))
        assert all("chain" in each for each in found)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$defs": {"a": {"$anchor": "x"}}, "$ref": "#x"}, "only a pointer"),
        ({"$defs": {"a": {}}, "$ref": "http://x.y/z#/$defs/a"}, "only a pointer"),
        ({"$defs": {"a": {}}, "$ref": "#/$defs%2Fa"}, "only a pointer"),
        ({"$defs": {"a": {}}, "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/%24defs/a"}]}, "same"),
        ({"prefixItems": [{}], "anyOf": [{"$ref": "#/prefixItems/00"}, {"$ref": "#/prefixItems/0"}]}, "same"),
        ({"$defs": {"a": {"$id": "http://x.y/z"}}, "$ref": "#/$defs/a"}, "beside \\$ref"),
        ({"$ref": "#/$defs/a"}, "points to nothing"),
    ],
)  # fmt: skip
def test_references_whose_chain_is_not_known_are_refused(schema: Any, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        of_schema(json.dumps(schema))


def test_definitions_may_be_named_as_generators_name_them(child: Child) -> None:
    for name in ("Box%3Cstring%3E", "a~1b", "a.b-c"):
        key = name.replace("%3C", "<").replace("%3E", ">").replace("~1", "/")
        tree = {"type": "object", "properties": {"next": {"$ref": f"#/$defs/{name}"}}}
        made = {"$id": "http://x.y/z", "$defs": {key: tree}, "$ref": f"#/$defs/{name}"}
        assert child.answers("schema", json.dumps(made)) == TAKEN


def test_a_refusal_names_the_field(tmp_path: Path) -> None:
    model = load_text(
        write_model(tmp_path, byte_level_tokenizer(), chat_template="{{ tools }}<tool_call>")
    )  # noqa: E501
    long = schema(LINKS[1:2], 1500)
    chat = router_pb2.ChatMessages(tool_choice=router_pb2.ToolChoice())
    chat.messages.add(role="user", content="hi")
    chat.tools.add(name="f", parameters="{}")
    chat.tools.add(name="g", parameters=long)
    for field, request in (
        ("json_schema", router_pb2.GenerateRequest(text="x", json_schema=long)),
        ("grammar", router_pb2.GenerateRequest(text="x", grammar=rules(RULES[:3], 2700))),
        ("grammar", router_pb2.GenerateRequest(text="x", grammar="start: %lark {\nstart: /a/\n}")),
        ("chat.tools[1].parameters", router_pb2.GenerateRequest(chat=chat)),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            parse_generate(request, model, RequestLimits(max_model_len=1 << 18))
        assert refused.value.field == field


# --- anything ---------------------------------------------------------------------------------------

_COUNTS = st.one_of(st.integers(1, 12), st.integers(350, 420), st.sampled_from([1000, 3000, 9000]))
_ENDS = st.sampled_from(['"a"', '"a" r0', "r1 | /b/", "x", "", "%json {}", "@g", "( r0"])
_LARK = st.builds(rules, st.lists(st.sampled_from(RULES + HIDING), min_size=1), _COUNTS, _ENDS)
_TEXTS = st.lists(
    st.sampled_from([*'":|()[]{}~&/<>@%_.*+?\n', *"rRs", "start", "r0", "%json", "%lark", "{}", "\\"])
).map("".join)  # fmt: skip
_VALUES = st.recursive(
    st.sampled_from([True, None, 1, "x", {"$ref": "#"}, {"$ref": "#/$defs/d0"}, {"type": "null"}]),
    lambda inner: st.one_of(
        st.builds(lambda link, value: link(value), st.sampled_from(LINKS[1:-2]), inner),
        st.lists(inner, max_size=3).map(lambda each: {"anyOf": each, "$defs": {"d0": True}}),
    ),
)
_SCHEMAS = st.builds(schema, st.lists(st.sampled_from(LINKS), min_size=1), _COUNTS, _VALUES)
ANY = st.one_of(
    st.tuples(st.just("lark"), st.one_of(_LARK, _TEXTS)),
    st.tuples(st.just("schema"), st.one_of(_SCHEMAS, _VALUES.map(json.dumps), _TEXTS)),
    st.tuples(st.just("regex"), st.integers(0, 20000).map(lambda n: "(a|" * n + "b" + ")*" * n)),
)


def fuzz(child: Child, num_examples: int) -> None:
    @given(ANY)
    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck))
    def try_one(case: tuple[str, str]) -> None:
        assert all(each == "taken" or each.startswith("refused: ") for each in child.answers(*case))

    try_one()


def test_any_grammar_is_taken_or_refused(child: Child) -> None:
    fuzz(child, 60)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_many_grammars_are_taken_or_refused(child: Child) -> None:
    fuzz(child, 4000)


def main() -> None:
    compiler = GrammarCompiler(
        lambda: ROOT / "models" / "demo" / "tokenizer.json", 2048, frozenset({1})
    )

    def by_worker(kind: str, text: str) -> None:
        """Of what no router has checked."""
        try:
            part = {"json_schema": json.loads(text)} if kind == "schema" else {"lark_grammar": text}
        except ValueError:
            return
        compiler.prepare(json.dumps({"grammars": [part]}))

    def answer(call: Callable[..., Any], *text: str) -> str:
        try:
            call(*text)
        except (GrammarError, RefusedByEngine) as error:
            return f"refused: {error}"
        return "taken"

    of = {"schema": of_schema, "lark": of_lark, "regex": of_regex}
    for line in sys.stdin:
        kind, text = json.loads(line)
        print(json.dumps([answer(of[kind], text), answer(by_worker, kind, text)]), flush=True)


if __name__ == "__main__":
    main()
