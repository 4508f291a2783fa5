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

from baton.grammar_chains import MAX_RULES
from engine.errors import InvalidRequestError as RefusedByEngine
from engine.sampling.constraints import GrammarCompiler
from router.text.grammar import GrammarError, of_lark, of_regex, of_schema

ROOT = Path(__file__).resolve().parents[2]
MANY = "rules or definitions"
Ask = Callable[[str, str], list[str]]


def rules(links: list[str], count: int, last: str = '"a"') -> str:
    """`count` rules, each of which names the next one as a link says."""
    made = [f"r{i}: {links[i % len(links)].format(f'r{i + 1}')}" for i in range(count - 1)]
    return "\n".join([*made, f"r{count - 1}: {last}", "start: r0"])


def schema(links: list[str], count: int, last: str = "true") -> str:
    """`count` definitions; a link has `$` for the reference to the next one."""
    ref = [f'{{"$ref": "#/$defs/d{i}"}}' for i in range(count)]
    made = [f'"d{i}": {links[i % len(links)].replace("$", ref[i + 1])}' for i in range(count - 1)]
    defs = ", ".join([*made, f'"d{count - 1}": {last}'])
    return f'{{"$defs": {{{defs}}}, "$ref": "#/$defs/d0"}}'


RULES = ["{}", '"b" {} | "a"', '("b" {})* "c"', "[[[[[[[[[{}]]]]]]]]]", '/b+/ "c" {}']
# What may stand before a name, and must not hide it.
HIDING = ['<"> {}', '/x"/i{}', '"/"i{}', '"\\"" {}', '/[#]/ {} # "', '"x"~1{}', '"x"+1.5e3{}']
HIDING += ['%json {{"const": "}}"}} {}', "{} // /", "<a#/> {}", '"x" -> b\n| {}', '"x" _0x1f{}']
LINKS = ["$", '{"properties": {"a": $}}', '{"additionalProperties": $}', '{"items": $}']
LINKS += ['{"prefixItems": [$, $]}', '{"allOf": [$]}', '{"anyOf": [$, {"type": "null"}]}']
LINKS += [
    '{"oneOf": [$]}',
    '{"patternProperties": {"^a": $}}',
    '{"items": {"items": {"items": $}}}',
]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """What a router and a worker say to a grammar, in a process of their own."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-m", "tests.router.test_grammar_chains"]
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:  # type: ignore[call-overload]

        def asked(kind: str, text: str) -> list[str]:
            print(json.dumps([kind, text]), file=process.stdin, flush=True)
            line = process.stdout.readline()
            assert line, f"the process ended with {process.wait()} over {kind} {text[:300]}"
            answers: list[str] = json.loads(line)
            return answers

        yield asked
        process.kill()


@pytest.mark.parametrize("link", RULES + HIDING)
def test_a_chain_of_rules_is_taken_up_to_the_bound(ask: Ask, link: str) -> None:
    why = MANY if link in RULES else "refused: "
    for count in (MAX_RULES + 1, 7000):
        long = rules([link], count) + '\nb: "b"\n_0x1f: "c"'
        terminals = long.upper().replace("START", "start")
        for text in (long, rules([link], count, '"a" r0 | "c"'), *[terminals] * (link in RULES)):
            assert all(why in each for each in ask("lark", text))
    if link in RULES:
        most = MAX_RULES // (2 if "[[" in link else 1) - 2
        assert MANY not in str(ask("lark", rules([link], most)))
    inner = link.format("%json " + schema(LINKS[1:2], 1500))
    assert "taken" not in ask("lark", f"start: {inner}")


@pytest.mark.parametrize("link", LINKS)
def test_a_chain_of_definitions_is_taken_up_to_the_bound(ask: Ask, link: str) -> None:
    assert MANY not in str(ask("schema", schema([link], MAX_RULES - 1)))
    for last in ("true", '{"$ref": "#/$defs/d0"}'):
        assert all(MANY in each for each in ask("schema", schema([link], 3000, last)))


def test_only_references_whose_chain_is_known_are_taken(ask: Ask) -> None:
    defs: dict[str, Any] = {"a": {"$anchor": "x"}, "Box<b>": {}, "a/b": {}}
    for refs, more, why in (
        (["#x"], {}, "only a pointer"),
        (["http://x.y/z#/$defs/a"], {}, "only a pointer"),
        (["#/$defs%2Fa"], {}, "only a pointer"),
        (["#/$defs/a", "#/%24defs/a"], {}, "spelt alike"),
        (["#/anyOf/0", "#/anyOf/00"], {}, "spelt alike"),
        (["#/$defs/ids"], {"ids": {"$id": "http://x.y/z"}}, "beside"),
        (["#/$defs/c"], {}, "points to nothing"),
        (["#/$defs/a", "#/$defs/Box%3Cb%3E", "#/$defs/a~1b"], {}, "taken"),
    ):
        every = [{"$ref": ref} for ref in refs]
        made = {"$id": "http://x.y/r", "$defs": defs | more, "anyOf": every}
        assert all(why in each for each in ask("schema", json.dumps(made))), refs


# --- anything -------------------------------------------------------------------------------------

_COUNTS = st.one_of(st.integers(1, 12), st.integers(950, 1020), st.sampled_from([1000, 3000, 9000]))
_ENDS = st.sampled_from(['"a"', '"a" r0', "r1 | /b/", "x", "", "%json {}", "@g", "( r0"])
_TOKENS = [*'":|()[]{}~&/<>@%_.*+?\\\n', "R", "start", "r0", "%json", "%lark", "{}", '"$ref"']
_TEXTS = st.lists(st.sampled_from(_TOKENS)).map("".join)
_LARK = st.builds(rules, st.lists(st.sampled_from(RULES + HIDING), min_size=1), _COUNTS, _ENDS)
_VALUES = st.recursive(
    st.sampled_from(["true", "1", "{}", '{"$ref": "#"}', '{"$ref": "#/$defs/d0"}', '{"type": 1}']),
    lambda inner: st.builds(str.replace, st.sampled_from(LINKS), st.just("$"), inner),
)
_SCHEMAS = st.builds(schema, st.lists(st.sampled_from(LINKS), min_size=1), _COUNTS, _VALUES)
_CASES = st.one_of(
    st.tuples(st.just("lark"), _LARK | _TEXTS),
    st.tuples(st.just("schema"), _SCHEMAS | _VALUES | _TEXTS),
    st.tuples(st.just("regex"), st.integers(0, 20000).map(lambda n: "(a|" * n + "b" + ")*" * n)),
)


@pytest.mark.parametrize("count", [60, pytest.param(4000, marks=pytest.mark.full)])
@pytest.mark.timeout(1800)
def test_any_grammar_is_taken_or_refused(ask: Ask, count: int) -> None:
    @given(_CASES)
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    def try_one(case: tuple[str, str]) -> None:
        assert all(each == "taken" or each.startswith("refused: ") for each in ask(*case))

    try_one()


def main() -> None:
    tokenizer = ROOT / "models" / "demo" / "tokenizer.json"
    compiler = GrammarCompiler(lambda: tokenizer, 2048, frozenset({1}))

    def by_worker(kind: str, text: str) -> None:
        """Of what no router has checked."""
        part = (
            f'{{"json_schema": {text}}}' if kind == "schema" else json.dumps({"lark_grammar": text})
        )
        compiler.prepare(f'{{"grammars": [{part}]}}')

    def answer(call: Callable[..., object], *arguments: str) -> str:
        try:
            call(*arguments)
        except (GrammarError, RefusedByEngine) as error:
            return f"refused: {error}"
        return "taken"

    by_router = {"schema": of_schema, "lark": of_lark, "regex": of_regex}
    for line in sys.stdin:
        kind, text = json.loads(line)
        answers = answer(by_router[kind], text), answer(by_worker, kind, text)
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
