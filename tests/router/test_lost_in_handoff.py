"""A router that is gone once the first token is out, while the prompt's KV is still moving."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.config.settings import changed
from baton.config.workers import DecodeConfig
from baton.fleet import Role
from baton.v1 import common_pb2
from cluster.worker.worker import Worker
from kv_transfer.transports.memory_transport import MemoryNetwork
from tests.cluster.conftest import nothing_held, running_worker
from tests.prefill_worker.held_puts import HeldPuts
from tests.router.answers import failures_of
from tests.router.callers import DOORS, LostError
from tests.router.deployment import default_model
from tests.router.real_workers import (
    CONFIG,
    NUM_TOKENS,
    SLOW,
    Listed,
    alone,
    asked_at,
    named,
    router_over,
    until,
)

PATIENT = changed(CONFIG, clients={"resume_window_s": 30.0})


@dataclasses.dataclass
class Held:
    """Workers between which nothing moves until `go_on`."""

    prefill: Worker
    decode: Worker
    go_on: Callable[[], None]

    @property
    def listed(self) -> list[Listed]:
        return [Listed(each, each.address) for each in (self.prefill, self.decode)]

    def num_orphans(self) -> int:
        assert self.decode.decode is not None
        return self.decode.decode.runs.num_orphans()


@asynccontextmanager
async def held_workers(
    monkeypatch: pytest.MonkeyPatch, decode_config: DecodeConfig | None = None
) -> AsyncIterator[Held]:
    puts = HeldPuts()
    monkeypatch.setattr(MemoryNetwork, "_shared", MemoryNetwork(puts))

    def go_on() -> None:
        puts.holds = False
        puts.go_on()

    async with (
        running_worker("p0", Role.PREFILL, SLOW) as prefill,
        running_worker("d0", Role.DECODE, SLOW, decode=decode_config or DecodeConfig()) as decode,
    ):
        yield Held(prefill, decode, go_on)
        await nothing_held(prefill, decode)


@asynccontextmanager
async def router_that_saw_a_first_token(held: Held, door: str = "grpc") -> AsyncIterator[None]:
    """Of the request `named(1)`, which then fails at it."""
    async with asked_at(door, *held.listed, config=PATIENT) as (router, client):
        asking = asyncio.create_task(client.ask(named(1)))
        await until(lambda: any(len(run.log.ids) == 1 for run in router.runs))
        yield
        await router.close()
        with pytest.raises(LostError):
            await asking
        await until(lambda: held.num_orphans() == 1)
        assert (await held.prefill.integrity()).num_first_tokens == 1  # it has heard of the end


@pytest.mark.parametrize("door", DOORS)
async def test_a_token_that_a_client_has_is_not_sampled_again_where_its_router_is_lost(
    monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    async with held_workers(monkeypatch) as held:
        async with router_that_saw_a_first_token(held, door):
            pass
        held.go_on()
        async with asked_at(door, *held.listed, config=PATIENT) as (router, client):
            answer: Any = await client.ask(named(1, 1))
            if door == "grpc":
                assert answer.ids == alone(1)[1:]
                assert [routed.attempt for routed in answer.routed] == [1]
            else:
                answer.assert_says(default_model(), alone(1))
            assert not failures_of(router)
        assert (await held.prefill.integrity()).num_first_tokens == 1
        assert (await held.decode.integrity()).num_later_tokens == NUM_TOKENS - 1


async def test_a_handoff_that_nobody_comes_back_for_ends_with_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with held_workers(monkeypatch, DecodeConfig(orphan_ttl_s=0.2)) as held:
        async with router_that_saw_a_first_token(held):
            pass
        assert held.decode.decode is not None
        runs = held.decode.decode.runs
        await until(lambda: len(runs) == 0)
        held.go_on()  # what was posted has to land before its blocks are free
        await nothing_held(held.prefill, held.decode)
        assert held.prefill.prefill is not None
        assert held.prefill.prefill.is_idle
        assert (await held.decode.integrity()).num_later_tokens == 0


@pytest.mark.parametrize("is_aborted", [True, False], ids=["aborted", "left"])
async def test_a_handoff_that_its_client_ends_is_ended_by_the_lease_s_owner(
    monkeypatch: pytest.MonkeyPatch, is_aborted: bool
) -> None:
    request = named(1)
    if not is_aborted:
        request.request_id = ""
    async with held_workers(monkeypatch) as held:
        async with router_over(*held.listed, config=PATIENT) as (router, client):
            if is_aborted:
                asking = asyncio.create_task(client.ask(request))
                runs = router.runs
                await until(lambda: any(len(run.log.ids) == 1 for run in runs))
                router.abort("", "named")
                finished = (await asking).finished
                assert finished is not None
                assert finished.reason == common_pb2.FINISH_REASON_ABORTED
            else:
                await client.ask(request, until=lambda answer: len(answer.ids) == 1)
            assert held.decode.decode is not None
            left = held.decode.decode.runs
            await until(lambda: len(left) == 0)
            held.go_on()
            await nothing_held(held.prefill, held.decode)
        assert held.prefill.prefill is not None
        await until(lambda: held.prefill.prefill.is_idle)
        assert (await held.decode.integrity()).num_later_tokens == 0
