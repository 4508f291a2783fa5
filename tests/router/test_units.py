"""Which unit a request goes to, how it is drawn, and what waits there."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.engine import EngineConfig, FakeEngineConfig
from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.config.workers import RegistryConfig
from baton.control.client import ControlClient
from baton.fleet import Role
from baton.v1 import common_pb2, control_pb2, router_pb2, worker_pb2
from cluster.registry.control_service import Changes, serve
from cluster.registry.registry import Registry
from cluster.registry.routers import Unit as Listed
from cluster.registry.routers import UnitList
from cluster.worker.worker import Worker
from engine.wire import read_spec
from router.door.server import RouterServer
from router.text import TextModel
from router.units.router import Router
from router.units.unit_router import drawn
from router.units.units import Units
from tests.cluster.conftest import ENGINE, engine_tokens, nothing_held, running_worker
from tests.cluster.pool_settings import settings_of
from tests.identities import OPERATOR, ROUTER
from tests.router.answers import Answer, Client, error_of, error_reason
from tests.router.deployment import QUICK, byte_model

CONFIG = changed(QUICK, clients={"resume_window_s": 20.0}, admission={"fleet_wait_s": 10.0})
REGISTRY = RegistryConfig(silent_after_s=0.5)  # it settles soon, and looks often
PROMPT = "the fox sang to the moon"
NUM_TOKENS = 40


@dataclass
class Unit:
    """A control service and, once `start_workers` was called, its workers."""

    code: str
    control: str
    registry: Registry
    folder: Path
    text: TextModel
    engine: EngineConfig
    stack: AsyncExitStack
    workers: tuple[Worker, ...] = ()

    async def start_workers(self) -> None:
        self.workers = tuple(
            [
                await self.stack.enter_async_context(
                    running_worker(
                        f"{self.code}-{role.value}",
                        role,
                        self.engine,
                        control_address=self.control,
                        model=str(self.folder),
                        served_model_name="fake",
                    )
                )
                for role in (Role.PREFILL, Role.DECODE)
            ]
        )

    def with_share(self, share: float) -> control_pb2.Unit:
        return control_pb2.Unit(code=self.code, control_address=self.control, share=share)

    def tokens(self, prompt: str, num_tokens: int = NUM_TOKENS) -> list[int]:
        """What one engine of the unit answers."""
        ids = np.asarray(self.text.encode(prompt), dtype="<u4")
        spec = worker_pb2.RequestSpec(
            request_id="alone",
            token_ids=ids.tobytes(),
            num_prompt_tokens=len(ids),
            sampling=request_of("alone", num_tokens=num_tokens).sampling,
            seed=7,
        )
        quick = dataclasses.replace(self.engine.fake, decode_step_s=0.0)
        return engine_tokens(dataclasses.replace(self.engine, fake=quick), read_spec(spec))


def request_of(
    request_id: str, prompt: str = PROMPT, num_tokens: int = NUM_TOKENS
) -> router_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, top_p=1.0
    )
    return router_pb2.GenerateRequest(
        request_id=request_id, text=prompt, sampling=sampling, seed=7, model="fake"
    )


@asynccontextmanager
async def unit(code: str, folder: Path, shift: int = 0, step_s: float = 0.0) -> AsyncIterator[Unit]:
    text = byte_model(folder, shift)
    window = 20 + shift  # of another model
    fake = FakeEngineConfig(window=window, vocab_size=257, decode_step_s=step_s)
    registry, changes = Registry(REGISTRY, time.monotonic, units=UnitList(Listed(code))), Changes()
    for role in (Role.PREFILL, Role.DECODE):
        registry.pools.add(settings_of(role.value, role), 1)
    async with (
        serve(registry, changes, "127.0.0.1:0", OPERATOR) as control,
        AsyncExitStack() as stack,
    ):
        engine = dataclasses.replace(ENGINE, fake=fake)
        made = Unit(code, control, registry, folder, text, engine, stack)
        yield made
        await nothing_held(*made.workers)


@asynccontextmanager
async def units_at(
    control: str, config: RouterConfig = CONFIG
) -> AsyncIterator[tuple[Units, Client]]:
    units = Units(config, control, ("fake",), ROUTER)
    server = RouterServer(units, config, "127.0.0.1:0")
    await server.start()
    client = Client(server.address)
    try:
        yield units, client
        for router in units.routers:
            router.check_integrity()
    finally:
        await client.channel.close()
        await server.stop(0.0)


async def set_units(control: str, *units: control_pb2.Unit) -> None:
    with ControlClient(control) as client:
        await asyncio.to_thread(client.set_units, units)


@dataclass
class Two:
    """Two units, and one router process."""

    old: Unit
    new: Unit
    units: Units
    client: Client

    async def share(self, of_new: float) -> None:
        old, new = self.old.with_share(1 - of_new), self.new.with_share(of_new)
        await set_units(self.old.control, old, new)
        await until(lambda: [unit.share for unit in self.units.listed] == [1 - of_new, of_new])
        await until(lambda: len(self.units.routers) == 2)

    def router(self, unit: Unit) -> Router:
        (found,) = (each for each in self.units.routers if each.model.code == unit.code)
        return found


async def until(happened: object) -> None:
    assert callable(happened)
    async with asyncio.timeout(20):
        while not happened():  # noqa: ASYNC110  it has no event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def two_units(folder: Path, step_s: float = 0.0) -> AsyncIterator[Two]:
    async with (
        unit("old", folder / "old", 0, step_s) as old,
        unit("new", folder / "new", 3, step_s) as new,
        units_at(old.control) as (units, client),
    ):
        await old.start_workers()
        await new.start_workers()
        two = Two(old, new, units, client)
        await two.share(of_new=0.5)
        for router in units.routers:
            await until(lambda r=router: sum(entry.usable for entry in r.fleet) == 2)
        yield two


def assert_whole(answer: Answer, unit: Unit, num_tokens: int = NUM_TOKENS) -> None:
    """The unit's tokens, in the unit's own text."""
    whole = unit.tokens(PROMPT, num_tokens)
    assert answer.ids == whole[answer.from_index :]
    if not answer.from_index:
        assert answer.text == unit.text.decode(whole)


def reports_of(unit: Unit) -> list[control_pb2.ReportRouterRequest]:
    """What routers report to the unit's registry."""
    reports = unit.registry.routers.reports()
    return [control_pb2.ReportRouterRequest.FromString(report) for report in reports]


async def a_few_tokens(client: Client, request_id: str) -> Answer:
    """Then the client is cut off."""
    return await client.ask(request_of(request_id), until=lambda answer: len(answer.ids) >= 4)


def resumed(request_id: str, seen: Answer, unit: str = "") -> router_pb2.GenerateRequest:
    request = request_of(request_id)
    request.resume_from_index, request.unit = len(seen.ids), unit
    return request


# --- two units ------------------------------------------------------------------------------------


async def test_each_request_is_answered_by_its_unit_with_its_own_tokenizer(tmp_path: Path) -> None:
    async with two_units(tmp_path) as two:
        ids = [f"request-{number}" for number in range(12)]
        answers = await asyncio.gather(*(two.client.ask(request_of(each)) for each in ids))
        for request_id, answer in zip(ids, answers, strict=True):
            its_unit = (two.old, two.new)[drawn(request_id, [0.5, 0.5])]
            assert_whole(answer, its_unit)
            code, _, fingerprint = answer.routed[0].unit.rpartition("/")
            assert code == its_unit.code
            assert its_unit.workers[0].rank.model.model_fingerprint.hex().startswith(fingerprint)
            assert len(fingerprint) == 16
        assert {answer.routed[0].unit for answer in answers} == {
            router.model.unit for router in two.units.routers
        }
        explain = router_pb2.ExplainRouteRequest(request=request_of(ids[0]))
        explained = await two.client.stub.ExplainRoute(explain)
        assert explained.unit == answers[0].routed[0].unit
        reports = [router.report() for router in two.units.routers]
        assert sum(report.requests.num_requests for report in reports) == len(ids)
        assert all(report.requests.num_requests for report in reports)


async def test_a_client_that_was_cut_off_goes_on_in_its_unit_whatever_the_shares_are(
    tmp_path: Path,
) -> None:
    async with two_units(tmp_path, step_s=0.01) as two, units_at(two.old.control) as (_, other):
        await two.share(of_new=1.0)
        seen = await a_few_tokens(two.client, "r")
        await two.share(of_new=0.0)
        rest = await other.ask(resumed("r", seen, seen.routed[0].unit))
        assert seen.ids + rest.ids == two.new.tokens(PROMPT)
        assert (await two.client.ask(request_of("next"))).routed[0].unit.startswith("old/")


async def test_tokens_of_a_unit_that_is_gone_are_not_continued(tmp_path: Path) -> None:
    async with two_units(tmp_path) as two:
        request = request_of("r")
        request.unit, request.resume_from_index = "gone/" + 16 * "0", 3
        assert error_reason(await error_of(two.client.ask(request))) == "NOT_RESUMABLE"
        request.resume_from_index = 0  # nothing was seen
        answer = await two.client.ask(request)
        assert_whole(answer, (two.old, two.new)[drawn("r", [0.5, 0.5])])


async def test_a_request_that_comes_again_without_its_unit_is_found_in_it(tmp_path: Path) -> None:
    async with two_units(tmp_path, step_s=0.01) as two, units_at(two.old.control) as (units, other):
        await two.share(of_new=1.0)
        seen = await a_few_tokens(two.client, "r")
        await two.share(of_new=0.0)
        await until(lambda: len(units.routers) == 2)
        for router in units.routers:
            await until(lambda r=router: r.links.are_all_known)
        # At the process that follows it, then at one that does not.
        for client in (two.client, other):
            again = await a_few_tokens(client, "r") if client is two.client else None
            rest = again or await client.ask(resumed("r", seen))
            assert {routed.unit.split("/")[0] for routed in rest.routed} == {"new"}
        assert seen.ids + rest.ids == two.new.tokens(PROMPT)
        assert two.old.workers[1].engine.num_steps == 0


@pytest.mark.parametrize("of_new", [0.0, 1.0])
async def test_an_abort_reaches_the_unit_that_runs_the_request(
    tmp_path: Path, of_new: float
) -> None:
    async with two_units(tmp_path, step_s=0.05) as two:
        await two.share(of_new)
        asking = asyncio.create_task(two.client.ask(request_of("r")))
        router = two.router(two.new if of_new else two.old)
        await until(lambda: router.num_active == 1)
        await two.client.stub.Abort(router_pb2.AbortRequest(request_id="r"))
        answer = await asking
        assert answer.reason == common_pb2.FINISH_REASON_ABORTED
        assert (
            await error_of(two.client.stub.Abort(router_pb2.AbortRequest(request_id="nobody's")))
        ).code() is grpc.StatusCode.NOT_FOUND


async def test_a_unit_that_leaves_ends_its_streams_first_and_nothing_of_it_stays(
    tmp_path: Path,
) -> None:
    async with two_units(tmp_path, step_s=0.01) as two:
        await two.share(of_new=0.0)
        asking = [asyncio.create_task(two.client.ask(request_of(""))) for _ in range(4)]
        old = two.router(two.old)
        await until(lambda: old.num_active == 4)
        await set_units(two.old.control, two.new.with_share(1.0))
        await until(lambda: len(two.units.listed) == 1)
        assert (await two.client.ask(request_of("next"))).routed[0].unit.startswith("new/")
        for answer in await asyncio.gather(*asking):
            assert_whole(answer, two.old)
            assert not answer.migrated
        await until(lambda: two.units.routers == [two.router(two.new)])
        await until(lambda: not two.units.leaving)
        assert not list(old.links)
        old.check_integrity()


# --- waiting for a unit --------------------------------------------------------------------------


async def test_requests_wait_for_the_first_worker_to_load(tmp_path: Path) -> None:
    patient = changed(CONFIG, admission={"fleet_wait_s": 0.1})
    async with (
        unit("", tmp_path / "model") as only,
        units_at(only.control, patient) as (units, client),
    ):
        asking = asyncio.create_task(client.ask(request_of("r")))
        await until(lambda: units.num_waiting == 1)
        # Pools at zero start for it.
        await until(lambda: [each.num_held for each in reports_of(only)] == [1])
        await only.start_workers()
        assert_whole(await asking, only)
        assert units.num_waiting == 0


async def test_only_so_many_wait_and_each_until_its_own_deadline(tmp_path: Path) -> None:
    config = changed(CONFIG, admission={"max_queue": 2}, timeouts={"default_s": 0.5})
    async with (
        unit("", tmp_path / "model") as only,
        units_at(only.control, config) as (units, client),
    ):
        hurried = request_of("hurried")
        hurried.timeout_ms = 400
        asking = [asyncio.create_task(client.ask(each)) for each in (hurried, request_of("other"))]
        await until(lambda: units.num_waiting == 2)
        assert error_reason(await error_of(client.ask(request_of("third")))) == "OVERLOADED"
        ends = await asyncio.gather(*asking, return_exceptions=True)
        assert [error_reason(end) for end in ends if isinstance(end, grpc.aio.AioRpcError)] == [
            "DEADLINE",
            "UNAVAILABLE",
        ]
        assert all("no worker of the cluster has sent its tokenizer" in str(end) for end in ends)
        assert units.num_waiting == 0


async def test_a_request_that_waits_can_be_aborted(tmp_path: Path) -> None:
    async with unit("", tmp_path / "model") as only, units_at(only.control) as (units, client):
        asking = asyncio.create_task(client.ask(request_of("r")))
        await until(lambda: units.num_waiting == 1)
        await client.stub.Abort(router_pb2.AbortRequest(request_id="r"))
        answer = await asking
        assert answer.reason == common_pb2.FINISH_REASON_ABORTED
        assert units.num_waiting == 0


async def test_a_process_that_leaves_sends_those_who_wait_to_another(tmp_path: Path) -> None:
    async with unit("", tmp_path / "model") as only, units_at(only.control) as (units, client):
        asking = asyncio.create_task(client.ask(request_of("r")))
        await until(lambda: units.num_waiting == 1)
        await units.close()
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await asking


OLD, NEW = 0, 1
SHARES = st.floats(0, 1)
IDS = [f"request-{number}" for number in range(2000)]


@given(st.text(), SHARES, SHARES)
def test_a_growing_share_moves_requests_to_the_youngest_unit_alone(
    request_id: str, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    before, after = drawn(request_id, [1 - less, less]), drawn(request_id, [1 - more, more])
    assert (before, after) in ((OLD, OLD), (OLD, NEW), (NEW, NEW))


@given(SHARES)
def test_each_unit_gets_its_share(share: float) -> None:
    num_new = sum(drawn(request_id, [1 - share, share]) for request_id in IDS)
    assert abs(num_new / len(IDS) - share) < 0.05


@given(st.text())
def test_a_unit_without_a_share_gets_nothing(request_id: str) -> None:
    assert drawn(request_id, [1.0, 0.0]) == OLD
    assert drawn(request_id, [0.0, 1.0 - 1e-7]) == NEW
    assert drawn(request_id, [1.0]) == OLD
