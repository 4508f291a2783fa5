"""The registry says what a worker that can do both is to get new requests for."""

from __future__ import annotations

import asyncio

from baton.v1 import control_pb2
from router.fleet.registry import read_fleet
from tests.router.answers import PROMPT, ask_for, assert_whole
from tests.router.deployment import DECODE, PREFILL, Deployment, deployment


def split(d: Deployment, **roles: int) -> None:
    """As the registry tells it, and at once: the test goes on with the roles in force."""
    for worker_id, role in roles.items():
        d.worker(worker_id).active_role = role
    workers = [worker.info() for worker in d.registry.workers]
    d.router.links.update(read_fleet(control_pb2.WatchFleetResponse(workers=workers)))


async def where(d: Deployment) -> tuple[str, str]:
    """Which worker prefills a new prompt, and which decodes it."""
    answer = await d.client.ask(ask_for(PROMPT))
    assert_whole(answer, PROMPT)
    (routed,) = answer.routed
    return routed.prefill_worker, routed.decode_worker


async def test_new_requests_go_by_the_roles_in_force() -> None:
    async with deployment(prefill=0, decode=0, mixed=2) as d:
        split(d, m0=PREFILL, m1=DECODE)
        assert {await where(d) for _ in range(8)} == {("m0", "m1")}
        split(d, m0=DECODE, m1=PREFILL)
        assert {await where(d) for _ in range(8)} == {("m1", "m0")}


async def test_a_stream_goes_on_where_it_runs_when_its_workers_role_is_taken_away() -> None:
    async with deployment(prefill=0, decode=0, mixed=2) as d:
        split(d, m0=PREFILL, m1=DECODE)
        d.worker("m1").may_decode.clear()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: bool(d.worker("m1").runs))
        split(d, m0=DECODE, m1=PREFILL)
        d.worker("m1").may_decode.set()
        answer = await asking
        assert_whole(answer, PROMPT)
        assert not answer.migrated
        assert [routed.decode_worker for routed in answer.routed] == ["m1"]


async def test_a_worker_is_given_no_role_that_it_does_not_have() -> None:
    async with deployment(prefill=1, decode=1) as d:
        split(d, d0=PREFILL)
        entry = d.entry("d0")
        assert not d.router.fleet.arrays.can_prefill[entry.slot]
        split(d, d0=DECODE)
        assert await where(d) == ("p0", "d0")
