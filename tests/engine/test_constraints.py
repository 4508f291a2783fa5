"""Constrained requests: their output fits, whatever interrupts them, and nobody else notices."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.engine import EngineConfig
from baton.finish_reason import FinishReason
from baton.model_folder import find_text_files
from engine.errors import InvalidRequestError
from engine.request import (
    FinishedEvent,
    NoCapacityEvent,
    RequestId,
    RequestSpec,
    SampledToken,
    SamplingParams,
    TokenEvent,
)
from engine.run.build import load_model_spec, lone_engine
from engine.run.core import EngineCore
from engine.run.torch_engine import TorchModel
from engine.run.torch_runner import load_torch_decoder
from engine.sampling.constraints import GrammarCompiler
from router.text import TextModel
from router.text.grammar import Answer, Part, of_choice, of_lark, of_regex, of_schema
from tests.engine.fakes import FakeEngine, drain, fake_config, pair, pool_is_whole, reserve, spec_of

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
CONFIG = EngineConfig(
    dtype="float32",
    device="cpu",
    num_threads=1,
    block_size=16,
    num_blocks=400,
    num_regions=2,
    max_num_seqs=16,
    max_num_batched_tokens=64,
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 8, "maxItems": 9},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
SUMS = 'start: n ("+" n)*\nn: /[0-9]{1,2}/'
# More than the library can follow at once, from its first character on.
TOO_LARGE = {
    "type": "object",
    "properties": {f"property_{n}": {"type": "string"} for n in range(1000)},
    "additionalProperties": False,
}
LATE = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": TOO_LARGE}}
LATE = {**LATE, "required": ["a", "b"], "additionalProperties": False}


def unchecked(schema: Any) -> str:
    """A grammar that no router has tried."""
    options = {"x-guidance": {"whitespace_pattern": " ?"}}
    return json.dumps({"grammars": [{"json_schema": schema | options}]})


WORDS = ["yes", "no", "perhaps"]


@cache
def text() -> TextModel:
    return TextModel(find_text_files(DEMO))


def grammar(part: Part) -> str:
    return Answer(part, None).grammar(text())


def schema(value: Any) -> str:
    return grammar(of_schema(json.dumps(value)))


GRAMMARS = {
    "schema": schema(PERSON),
    "regex": grammar(of_regex(DATE)),
    "lark": grammar(of_lark(SUMS)),
    "choice": grammar(of_choice(WORDS)),
}


def assert_fits(name: str, ids: Sequence[int]) -> None:
    """A whole answer, end-of-sequence included."""
    assert ids[-1] in text().eos_token_ids
    said = text().decode(ids)
    match name:
        case "schema":
            jsonschema.validate(json.loads(said), PERSON)
        case "regex":
            assert re.fullmatch(DATE, said)
        case "lark":
            assert re.fullmatch(r"\d{1,2}(\+\d{1,2})*", said)
        case "choice":
            assert said in WORDS


@cache
def _loaded() -> tuple[Any, Any]:
    torch.set_num_threads(1)
    spec = load_model_spec(str(DEMO), CONFIG)
    return spec, load_torch_decoder(str(DEMO), CONFIG, spec, None)


@pytest.fixture
def core() -> Iterator[EngineCore]:
    made = engine()
    yield made
    pool_is_whole(made)
    made.close()


def engine(**changes: Any) -> EngineCore:
    spec, decoder = _loaded()
    config = replace(CONFIG, **changes)
    return lone_engine(TorchModel(spec, config, decoder), lambda: DEMO / "tokenizer.json")


def asked(
    name: str, grammar: str | None, question: str = "Tell me about Anna.", **sampling: Any
) -> RequestSpec:
    ids = np.array(text().encode(question), np.uint32)
    params = SamplingParams(**({"max_tokens": 120, "temperature": 0.0} | sampling))
    return RequestSpec(RequestId(name), ids, len(ids), params, grammar=grammar)


def answers(core: EngineCore, *specs: RequestSpec) -> dict[str, list[int]]:
    for spec in specs:
        core.add(spec)
    return dict(drain(core).tokens)


# --- answers fit --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_kind_of_constraint_is_kept_at_any_temperature(core: EngineCore, name: str) -> None:
    temperatures = [0.0, 0.7, 1.5, 5.0]
    specs = [
        asked(f"{n}", GRAMMARS[name], temperature=t, seed=n, top_p=0.9 if n % 2 else 1.0)
        for n, t in enumerate(temperatures)
    ]
    found = answers(core, *specs)
    ended = {request: ids for request, ids in found.items() if len(ids) < 120}
    assert name == "lark" or len(ended) == len(specs), "only sums have no greatest length"
    for ids in ended.values():
        assert_fits(name, ids)


def test_requests_with_and_without_a_constraint_do_not_touch_each_other(core: EngineCore) -> None:
    specs = [
        asked(f"{name} {seed}", grammar, f"Question {seed}?", temperature=0.8 * seed, seed=seed)
        for seed in range(2)
        for name, grammar in (("free", None), *GRAMMARS.items())
    ]
    alone = {spec.request_id: answers(engine(), spec)[spec.request_id] for spec in specs}
    assert answers(core, *specs) == alone
    assert len({tuple(ids) for ids in alone.values()}) > len(GRAMMARS)


def test_a_request_that_is_preempted_goes_on_in_the_same_state() -> None:
    specs = [asked(f"{n}", GRAMMARS["schema"], temperature=0.9, seed=n) for n in range(6)]
    expected = {spec.request_id: answers(engine(), spec)[spec.request_id] for spec in specs}
    small = engine(num_blocks=16, num_regions=1)
    for spec in specs:
        small.add(spec)
    found: dict[str, list[int]] = {}
    num_preempted = 0
    while small.has_work():
        num_running = small.load().num_running
        for event in small.step():
            if isinstance(event, TokenEvent):
                found.setdefault(event.request_id, []).append(event.token.token_id)
                num_running -= event.finished is not None
        num_preempted += small.load().num_running < num_running
    assert num_preempted
    assert found == expected
    for ids in found.values():
        assert_fits("schema", ids)
    pool_is_whole(small)


def test_a_resumed_request_goes_on_from_the_tokens_that_were_emitted(core: EngineCore) -> None:
    spec = asked("whole", GRAMMARS["schema"], temperature=0.9, seed=5)
    whole = answers(core, spec)["whole"]
    for emitted in (1, 2, len(whole) // 2, len(whole) - 1):
        assert continued(core, spec, whole[:emitted]) == whole[emitted:]


def continued(core: EngineCore, spec: RequestSpec, emitted: Sequence[int]) -> list[int]:
    """What follows on the tokens of an earlier attempt."""
    known = np.concatenate([spec.token_ids, np.array(emitted, np.uint32)])
    core.add(replace(spec, request_id=RequestId(f"{len(emitted)}"), token_ids=known))
    steps = (core.step() for _ in iter(core.has_work, False))
    return [e.token.token_id for events in steps for e in events if isinstance(e, TokenEvent)]


def test_log_probabilities_are_those_of_allowed_tokens(core: EngineCore) -> None:
    spec = asked("one", grammar(of_regex("[0-9]")), logprobs=10)
    core.add(spec)
    first, _ = (
        e for _ in iter(core.has_work, False) for e in core.step() if isinstance(e, TokenEvent)
    )
    logprobs = first.token.logprobs
    assert logprobs is not None
    likely = [(text().decode([token]), p) for token, p in logprobs.top if p > -np.inf]
    assert {digit for digit, _ in likely} <= set("0123456789")
    assert sum(np.exp(p) for _, p in likely) == pytest.approx(1.0, abs=1e-4)


# --- any schema, by an engine that takes any allowed token ----------------------------------------

_SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(-5, 200).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 40}),
    st.integers(0, 5).map(lambda most: {"type": "string", "maxLength": most}),
    st.sampled_from(["^[a-c]{1,4}$", r"^\d{2}-\d$", "^(ab|c)*d$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 9}
    ),
    st.lists(
        st.one_of(st.integers(-9, 99), st.text(max_size=4), st.booleans()), min_size=1, max_size=3
    ).map(lambda values: {"enum": values}),
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def of_object(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:num_required],
            "additionalProperties": False,
        }

    names = st.sampled_from(["a", "name", "küche", 'q"uote', "x y"])
    objects = st.dictionaries(names, inner, max_size=3)
    return st.one_of(
        st.builds(of_object, objects, st.integers(0, 3)),
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            inner,
            st.integers(0, 3),
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda kinds: {"anyOf": kinds}),
    )


SCHEMAS = st.recursive(_SCALARS, _nested, max_leaves=5)


@given(wanted=SCHEMAS, seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_no_mask_allows_a_token_that_breaks_the_schema(wanted: Any, seed: int) -> None:
    walker = FakeEngine(fake_config(), tokenizer=DEMO / "tokenizer.json").core
    prompt = np.array([7, 8, 9], np.uint32)
    for n in range(3):
        sampling = SamplingParams(max_tokens=900, temperature=1.0, seed=seed + n)
        walker.add(spec_of(f"{n}", prompt, sampling, grammar=schema(wanted)))
    streams = drain(walker)
    walker.close()
    for name, ids in streams.tokens.items():
        assert streams.finished[name] is FinishReason.STOP
        jsonschema.validate(json.loads(text().decode(ids)), wanted)


# --- what the request itself does not allow -------------------------------------------------------


def test_bad_words_hold_whatever_interrupts_a_request(core: EngineCore) -> None:
    spec = asked("free", None, "Once upon a time", temperature=0.9, seed=0)
    words = (tuple(answers(core, spec)["free"][3:6]),)
    sampling = replace(spec.sampling, bad_words=words)
    spec = replace(spec, request_id=RequestId("whole"), sampling=sampling)
    whole = answers(core, spec)["whole"]
    assert words[0] not in zip(whole, whole[1:], whole[2:])
    for emitted in (1, 4, 5, len(whole) - 1):  # as after a handoff, or at another worker
        assert continued(core, spec, whole[:emitted]) == whole[emitted:]


def test_what_both_a_grammar_and_the_request_allow_is_said(core: EngineCore) -> None:
    free = answers(core, asked("free", GRAMMARS["choice"]))["free"]
    less = answers(core, asked("less", GRAMMARS["choice"], bad_words=((free[0],),)))["less"]
    assert_fits("choice", less)
    assert less[0] != free[0]
    core.add(asked("none", GRAMMARS["choice"], allowed_tokens=b"\x01"))
    (ended,) = (event for event in core.step() if isinstance(event, FinishedEvent))
    assert "the request allows" in ended.message


# --- from one worker to another -------------------------------------------------------------------


def test_a_handoff_keeps_to_the_constraint_on_both_sides_and_gives_the_same_tokens() -> None:
    prefill, decode, wire = pair(
        fake_config(max_num_batched_tokens=8), fake_config(), tokenizer=DEMO / "tokenizer.json"
    )
    prompt = np.arange(2, 30, dtype=np.uint32)
    sampling = SamplingParams(max_tokens=300, temperature=1.0)
    for seed in range(4):
        spec = spec_of(f"{seed}", prompt, replace(sampling, seed=seed), grammar=GRAMMARS["schema"])
        lone = FakeEngine(fake_config(prefix_cache=False), tokenizer=DEMO / "tokenizer.json").core
        streams = wire.complete(wire.begin(spec))
        ids = drain(decode.core, streams).tokens[spec.request_id]
        assert_fits("schema", ids)
        assert ids == answers(lone, spec)[spec.request_id]
    pool_is_whole(prefill.core)
    pool_is_whole(decode.core)


# --- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "part"),
    [
        ("start: [", "Expected"),
        ('{"grammars": [{"json_schema": {"type": "frob"}}]}', "frob"),
        ("start: <|no_such_token|>", "special token"),
        (unchecked(TOO_LARGE), "Too many items"),
        ("", "mpty"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_before_anything_is_held(
    core: EngineCore, grammar: str, part: str
) -> None:
    spec = asked("bad", grammar)
    for take in (core.prepare, core.add, core.reserve):
        with pytest.raises(InvalidRequestError, match=part) as refused:
            take(spec)
        assert refused.value.field == "grammar"
    pool_is_whole(core)


def test_an_engine_without_a_tokenizer_or_an_end_of_sequence_refuses_constraints() -> None:
    spec = spec_of("x", np.array([5], np.uint32), grammar=GRAMMARS["regex"])
    missing = Path("/nowhere/tokenizer.json")
    for fake in (FakeEngine(fake_config()), FakeEngine(fake_config(), tokenizer=missing)):
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            fake.core.add(spec)


def test_a_tokenizer_may_have_more_or_fewer_tokens_than_the_model() -> None:
    for vocab_size in (2000, 2048, 2061):
        compiler = GrammarCompiler(lambda: DEMO / "tokenizer.json", vocab_size, frozenset({1}))
        matcher = compiler.matcher("start: /[0-9]/")
        (mask,) = compiler.new_masks(1)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert {text().decode([token]) for token in allowed} == set("0123456789")
        assert len(mask) * 8 >= vocab_size


@pytest.mark.parametrize("regex", ["", "[0-9]*"])
def test_an_output_that_may_be_empty_is_one(core: EngineCore, regex: str) -> None:
    ids = answers(core, asked("x", grammar(of_regex(regex)), max_tokens=9))["x"]
    assert re.fullmatch(regex, text().decode(ids))


def test_tokens_that_do_not_fit_the_constraint_are_not_gone_on_with(core: EngineCore) -> None:
    spec = asked("odd", GRAMMARS["regex"])
    known = np.concatenate([spec.token_ids, np.array(text().encode("hello"), np.uint32)])
    with pytest.raises(InvalidRequestError) as refused:
        core.add(replace(spec, token_ids=known))
    assert refused.value.field == "token_ids"


def test_a_constraint_that_fails_while_it_runs_ends_its_request_alone(core: EngineCore) -> None:
    free = asked("free", None)
    (expected,) = answers(engine(), free).values()
    core.add(asked("late", unchecked(LATE)))
    core.add(free)
    events = [event for _ in iter(core.has_work, False) for event in core.step()]
    (ended,) = (event for event in events if isinstance(event, FinishedEvent))
    assert (ended.request_id, ended.reason) == ("late", FinishReason.ERROR)
    assert "constraint" in ended.message
    tokens = [e for e in events if isinstance(e, TokenEvent)]
    assert [e.token.token_id for e in tokens if e.request_id == "free"] == expected
    late = [e.token.token_id for e in tokens if e.request_id == "late"]
    assert re.fullmatch(r'\{ ?"a" ?: ?(true|false) ?, ?"b" ?: ?\{? ?', text().decode(late))


@pytest.mark.parametrize(
    "sampling", [SamplingParams(ignore_eos=True), SamplingParams(min_tokens=2)]
)
def test_an_end_that_may_not_come_is_refused_beside_a_grammar(
    core: EngineCore, sampling: SamplingParams
) -> None:
    spec = spec_of("x", np.arange(2, 30, dtype=np.uint32), sampling, grammar=GRAMMARS["regex"])
    with pytest.raises(InvalidRequestError, match="exclude a grammar's end"):
        core.add(spec)


def test_a_prefill_whose_constraint_fails_stays_pinned_until_it_is_released() -> None:
    prefill, _, wire = pair(fake_config(), fake_config(), tokenizer=DEMO / "tokenizer.json")
    prompt = np.arange(2, 30, dtype=np.uint32)
    spec = spec_of("x", prompt, SamplingParams(), grammar=GRAMMARS["regex"])
    wire.begin(spec)
    scheduler = prefill.core._scheduler
    (event,) = scheduler.commit(scheduler.plan(), [SampledToken(0, fault="why")], {})
    assert event == FinishedEvent(spec.request_id, FinishReason.ERROR, "why")
    assert prefill.core.load().num_exporting == 1
    prefill.core.release(spec.request_id)
    pool_is_whole(prefill.core)


def test_nothing_of_a_request_that_is_over_is_kept(core: EngineCore) -> None:
    full = engine(max_num_seqs=1)
    reserve(full, asked("first", None))
    assert isinstance(reserve(full, asked("no room", GRAMMARS["regex"])), NoCapacityEvent)
    for made, end in ((core.reserve, core.release), (core.add, core.abort)):
        spec = asked("over", GRAMMARS["regex"])
        made(spec)
        end(spec.request_id)
        drain(core)
    answers(core, asked("done", GRAMMARS["choice"]))
    assert not core._constraints._followed
    assert not full._constraints._followed
