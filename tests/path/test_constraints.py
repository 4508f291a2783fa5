"""Constrained answers of the demo model, from worker processes through both doors: they fit, they
are what one engine alone says, and a killed decode worker changes nothing of that."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jsonschema
import numpy as np
import openai
import pytest
import pytest_asyncio
import yaml

from baton.client import AsyncClient
from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.errors import InvalidRequestError
from baton.v1 import router_pb2
from engine.request import RequestId, RequestSpec, SamplingParams
from engine.run.build import load_lone_engine
from router.door.server import RouterServer
from router.text import TextModel
from router.text.grammar import Answer, of_schema
from router.units.router import Router
from router.units.units import Units
from tests.cluster.fleet_processes import Fleet, started
from tests.engine.fakes import drain
from tests.identities import ROUTER
from tests.path.test_killed_worker import streams_from
from tests.path.whole_path import Answer as Seen
from tests.path.whole_path import Pool, Shape, ask

pytestmark = pytest.mark.asyncio(loop_scope="module")

T = TypeVar("T")
DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
SHAPE = Shape("demo", prefill=(Pool(chunk=32),), decode=(Pool(chunk=32, replicas=2),))
QUESTION = "Who lives in the forest?"
ANIMAL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "friends": {"type": "array", "items": {"enum": ["fox", "owl"]}, "maxItems": 3},
    },
    "required": ["name", "legs", "friends"],
    "additionalProperties": False,
}
FOREST = {"type": "array", "items": ANIMAL, "minItems": 12, "maxItems": 12}
# More than the library follows at once, but only behind its first property.
LATE = {
    "type": "object",
    "properties": {
        "first": {"type": "boolean"},
        "then": {
            "type": "object",
            "properties": {f"property_{n}": {"type": "string"} for n in range(1000)},
            "additionalProperties": False,
        },
    },
    "required": ["first", "then"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "count", "parameters": ANIMAL}},
    {"type": "function", "function": {"name": "sleep"}},
]


@dataclass
class Served:
    fleet: Fleet
    far: AsyncClient
    """Every prompt is prefilled in the prefill pool."""
    near: AsyncClient
    """Every prompt is prefilled on the decode worker."""
    router: Router
    """Of `far`."""
    url: str
    text: TextModel

    async def openai(self, work: Callable[[Any], T]) -> T:
        def run() -> T:
            with openai.OpenAI(base_url=self.url, api_key="any", max_retries=0) as client:
                return work(client.chat.completions)

        return await asyncio.to_thread(run)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    path = tmp_path_factory.mktemp("served") / "cluster.yaml"
    config = SHAPE.config(DEMO, "never") | {"served_model_name": "demo"}
    path.write_text(yaml.safe_dump(config))
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(started(path))
        routers, clients, urls = [], [], []
        for local_prefill in ("never", "always"):
            routing = changed(
                RouterConfig(),
                http={"port": 0},
                placement={"local_prefill": local_prefill},
                answers={"tool_calls": "hermes"},
            )
            units = Units(routing, fleet.control, ("demo",), ROUTER)
            server = RouterServer(units, routing, "127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, 0.0)
            routers.append(await units.main_router())
            clients.append(await stack.enter_async_context(AsyncClient(server.address)))
            urls.append(f"http://{server.http_address}/v1")
        async with asyncio.timeout(60):
            while any(sum(e.usable for e in r.fleet) < 3 for r in routers):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield Served(fleet, *clients, routers[0], urls[0], routers[0].text)


async def said(client: AsyncClient, served: Served, **options: Any) -> Seen:
    prompt = served.text.encode(QUESTION)
    return await ask(client, prompt, ignore_eos=None, **({"max_tokens": 200} | options))


def alone(schema: Any, text: TextModel, **sampling: Any) -> list[int]:
    """What one engine in this process says."""
    config = replace(SHAPE.engine(), device="cpu")
    prompt = np.array(text.encode(QUESTION), np.uint32)
    grammar = Answer(of_schema(json.dumps(schema)), None).grammar(text)
    engine = load_lone_engine(str(DEMO), config)
    params = SamplingParams(**sampling)
    engine.add(RequestSpec(RequestId("x"), prompt, len(prompt), params, grammar=grammar))
    tokens = drain(engine).tokens["x"]
    engine.close()
    return tokens


# --- gRPC ---------------------------------------------------------------------------------------


async def test_every_kind_of_constraint_is_kept_wherever_the_prompt_is_computed(
    served: Served,
) -> None:
    sampling: dict[str, Any] = {"temperature": 0.75, "seed": 11}
    expected = alone(ANIMAL, served.text, max_tokens=200, **sampling)
    for client in (served.far, served.near):
        answer = await said(client, served, json_schema=json.dumps(ANIMAL), **sampling)
        assert answer.ids == expected
        jsonschema.validate(json.loads(answer.text), ANIMAL)
        assert answer.finished is not None
        assert answer.finished.reason.name == "STOP"
        answer = await said(client, served, regex="[a-z]{3} and [a-z]{3}", **sampling)
        assert re.fullmatch("[a-z]{3} and [a-z]{3}", answer.text)
        answer = await said(client, served, grammar='start: "one" | "two"', **sampling)
        assert answer.text in ("one", "two")
    free = await said(served.far, served, max_tokens=20)
    message = router_pb2.GenerateRequest(text=QUESTION, request_id="choice")
    message.choice.texts.extend(["the fox", "the owl"])
    events = [event async for event in served.far.run(message)]
    assert "".join(getattr(event, "text", "") for event in events) in ("the fox", "the owl")
    assert (await said(served.far, served, max_tokens=20)).ids == free.ids


async def test_a_constraint_that_cannot_be_followed_is_the_caller_s_mistake(
    served: Served,
) -> None:
    running = asyncio.create_task(
        said(served.far, served, json_schema=json.dumps(FOREST), max_tokens=1500)
    )
    for client in (served.far, served.near):
        for options, field in (
            ({"json_schema": '{"type": "frob"}'}, "json_schema"),
            ({"grammar": "start: <|no_such_token|>"}, "grammar"),  # which workers alone know
            ({"json_schema": json.dumps(LATE)}, "json_schema"),  # while it runs
        ):
            with pytest.raises(InvalidRequestError) as refused:
                await said(client, served, tries=None, **options)
            assert refused.value.field == field
    jsonschema.validate(json.loads((await running).text), FOREST)
    assert all(entry.usable for entry in served.router.fleet), "no worker is blamed"


# --- OpenAI -------------------------------------------------------------------------------------


async def test_the_openai_client_gets_what_its_response_format_says(served: Served) -> None:
    def work(chats: Any) -> None:
        asked: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 300,
        }
        named = {"name": "animal", "schema": ANIMAL, "strict": True}
        wanted = {"type": "json_schema", "json_schema": named}
        for seed in range(2):
            answer = chats.create(response_format=wanted, seed=seed, n=2, **asked)
            for choice in answer.choices:
                jsonschema.validate(json.loads(choice.message.content), ANIMAL)
                assert choice.finish_reason == "stop"
        stream = chats.create(response_format=wanted, stream=True, **asked)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        jsonschema.validate(json.loads(text), ANIMAL)
        answer = chats.create(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}, **asked)
        assert answer.choices[0].message.content in ("yes", "no")
        with pytest.raises(openai.BadRequestError) as refused:
            chats.create(
                response_format={**wanted, "json_schema": {**named, "schema": {"type": "x"}}},
                **asked,
            )
        assert refused.value.param == "response_format"

    await served.openai(work)


async def test_the_openai_client_gets_the_calls_that_it_demands(served: Served) -> None:
    named = {"type": "function", "function": {"name": "count"}}

    def work(chats: Any) -> None:
        for choice in ("required", named):
            answer = chats.create(
                model="demo",
                messages=[{"role": "user", "content": QUESTION}],
                tools=TOOLS,
                tool_choice=choice,
                parallel_tool_calls=False,
                max_tokens=300,
                seed=5,
            ).choices[0]
            (call,) = answer.message.tool_calls
            assert answer.finish_reason == "tool_calls"
            assert not answer.message.content
            arguments = json.loads(call.function.arguments)
            jsonschema.validate(arguments, ANIMAL if call.function.name == "count" else {})
            assert call.function.name == "count" or choice == "required"

    await served.openai(work)


async def test_biases_allowed_tokens_and_bad_words_are_kept_through_the_door(
    served: Served,
) -> None:
    text = served.text
    wanted, *others = text.encode_within(" owl fox tree")

    def work(chats: Any) -> None:
        def said(**extra: Any) -> str:
            messages = [{"role": "user", "content": QUESTION}]
            asked = {"model": "demo", "messages": messages, "max_tokens": 24, "temperature": 0}
            return str(chats.create(**asked, extra_body=extra).choices[0].message.content)

        free = said()
        word = next(each for each in free.split() if each.isalpha() and len(each) > 3)
        assert word not in said(bad_words=[word])
        assert said(logit_bias={str(text.encode_within(free)[0]): -100}) != free
        assert said(logit_bias={str(wanted): 100}) == text.decode([wanted] * 24)
        allowed = "".join(text.decode([each]) for each in others)
        assert set(said(allowed_token_ids=others)) <= set(allowed)

    await served.openai(work)
    sampling: dict[str, Any] = {"temperature": 0.9, "seed": 4, "logit_bias": {wanted: 15.0}}
    far, near = [await said(each, served, **sampling) for each in (served.far, served.near)]
    assert far.ids == near.ids
    assert wanted in far.ids


# --- a fault, which is last -----------------------------------------------------------------------


async def test_a_stream_whose_decode_worker_is_killed_still_fits_its_schema(
    served: Served,
) -> None:
    options: dict[str, Any] = {"temperature": 0.75, "max_tokens": 1500}
    seeds = range(6)
    asking = [
        asyncio.create_task(
            said(
                served.far,
                served,
                tries=None,
                request_id=f"request-{seed}",
                seed=seed,
                json_schema=json.dumps(FOREST),
                **options,
            )
        )
        for seed in seeds
    ]
    async with asyncio.timeout(60):
        while not streams_from(served.router, "decode-tp1-0"):  # noqa: ASYNC110  no event
            await asyncio.sleep(0.01)
    await served.fleet.kill("decode-tp1-0")
    answers = await asyncio.gather(*asking)
    for seed, answer in zip(seeds, answers):
        jsonschema.validate(json.loads(answer.text), FOREST)
        assert answer.ids == alone(FOREST, served.text, seed=seed, **options)
    workers = [[routed.decode_worker for routed in answer.routed] for answer in answers]
    assert ["decode-tp1-0", "decode-tp1-1"] in workers, workers
