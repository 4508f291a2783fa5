"""One model, two kinds of KV: workers pair with their own kind, streams go on with either."""

from __future__ import annotations

import asyncio

import pytest

from baton.clock import ManualClock
from router.fleet.fleet import Fleet, ReportedLoad
from router.fleet.worker_facts import WorkerFacts
from router.placement.admission import SCAN_AHEAD
from tests.router.answers import PROMPT, ask_for, assert_whole, expected
from tests.router.deployment import DECODE, PREFILL, Deployment, deployment
from tests.router.fleets import (
    admission_of,
    entry_of,
    facts,
    fleet_of,
    in_line,
    place,
    prompt,
    rounds,
)


def pair(name: str, kv: bytes, block_size: int = 16) -> list[WorkerFacts]:
    """A prefill and a decode worker."""
    kind = {"kv_fingerprint": kv, "block_size": block_size}
    return [facts(f"p-{name}", True, False, **kind), facts(f"d-{name}", False, True, **kind)]


def two_kinds(clock: ManualClock) -> Fleet:
    return fleet_of(*pair("one", b"one"), *pair("other", b"other", 32), clock=clock)


def report(fleet: Fleet, name: str, load: ReportedLoad) -> None:
    worker = entry_of(fleet, name)
    fleet.report(worker, load)


async def test_workers_pair_with_their_own_kind_wherever_there_is_less_to_do() -> None:
    clock = ManualClock(100.0)
    fleet = two_kinds(clock)
    report(fleet, "p-one", ReportedLoad(num_queued_tokens=500))
    report(fleet, "d-other", ReportedLoad(num_requests=5))
    admission = admission_of(fleet, clock)
    placed = await place(admission, admission.ticket(prompt(10), 4))
    assert (placed.placement.prefill_worker, placed.placement.decode_worker) == (
        "p-other",
        "d-other",
    )
    assert placed.booking.decode.facts.kv_fingerprint == b"other"
    fleet.release(placed.booking)
    explained = admission.candidates(admission.ticket(prompt(10), 4), 10)
    pairs = [(one.prefill_worker, one.decode_worker) for one in explained if one.prefill_worker]
    assert pairs == [("p-other", "d-other"), ("p-one", "d-one")]
    fleet.check_integrity()


async def test_a_kind_that_is_full_holds_up_no_request_that_the_other_has_room_for() -> None:
    clock = ManualClock(100.0)
    fleet = two_kinds(clock)
    report(fleet, "d-one", ReportedLoad(num_requests=1000))
    admission = admission_of(fleet, clock)
    placing = [in_line(admission, prompt(10, n * 10), 4) for n in range(20)]
    await rounds(admission, clock, 1.0)
    decodes = [task.result().placement.decode_worker for task in placing if task.done()]
    assert decodes == ["d-other"] * 20
    for task in placing:
        fleet.release(task.result().booking)
    fleet.check_integrity()


async def test_nobody_overtakes_more_requests_than_a_round_tries() -> None:
    """However many in front are too large for what room there is."""
    clock = ManualClock(100.0)
    fleet = two_kinds(clock)
    worker = entry_of(fleet, "d-one")
    quarantined = worker.facts.num_blocks - 8
    report(fleet, "d-one", ReportedLoad(num_requests=1, num_quarantined_blocks=quarantined))
    report(fleet, "d-other", ReportedLoad(num_requests=1000))
    admission = admission_of(fleet, clock, admission={"max_bypass_s": 60.0})
    large = [admission.ticket(prompt(10), 5000) for _ in range(SCAN_AHEAD)]
    in_front = [asyncio.create_task(place(admission, ticket)) for ticket in large]
    await rounds(admission, clock, 0.5)
    small = in_line(admission, prompt(10), 4)
    await rounds(admission, clock, 1.0)
    assert not any(task.done() for task in (*in_front, small))
    in_front[0].cancel()
    await rounds(admission, clock, 1.0)
    fleet.release((await small).booking)
    for task in in_front:
        task.cancel()
    await asyncio.wait(in_front)


def test_a_kind_whose_workers_have_left_has_its_number_when_it_is_back() -> None:
    clock = ManualClock(100.0)
    fleet = two_kinds(clock)
    before = dict(fleet.kinds.classes)
    one = [entry for entry in fleet if entry.facts.kv_fingerprint == b"one"]
    for entry in one:
        fleet.remove(entry)
    assert [kind.kv_fingerprint for kind, _ in fleet.kinds.classes] == [b"other"]
    for entry in one:
        fleet.add(entry.facts)
    assert dict(fleet.kinds.classes) == before
    fleet.check_integrity()


# --- streams --------------------------------------------------------------------------------------


async def add_pair(d: Deployment, name: str) -> None:
    for letter, role in (("p", PREFILL), ("d", DECODE)):
        await d.add_worker(f"{letter}-{name}", role, kv_fingerprint=name.encode())


@pytest.mark.parametrize("is_same_router", [True, False], ids=["same router", "next router"])
async def test_a_stream_goes_on_with_another_kind_of_kv_where_its_own_has_gone(
    is_same_router: bool,
) -> None:
    async with deployment(prefill=0, decode=0) as d:
        await add_pair(d, "one")
        await d.connected(2)
        worker, has_begun = d.worker("d-one"), asyncio.Event()

        def stop(_: object) -> None:
            worker.may_decode.clear()
            has_begun.set()

        worker.on_token = stop
        request = ask_for(PROMPT, request_id="r")
        if is_same_router:
            asking = asyncio.create_task(d.client.ask(request))
            await has_begun.wait()
            await add_pair(d, "other")
            await d.connected(4)
            await worker.die()
            answer = await asking
            assert_whole(answer, PROMPT)
        else:
            seen = await d.client.ask(request, until=lambda answer: len(answer.ids) >= 1)
            await add_pair(d, "other")
            second = await d.add_router()
            await d.connected(4, d.routers[1])
            await d.servers.pop(0).stop(0.0)
            await d.worker("d-one").die()
            d.registry.workers = [w for w in d.registry.workers if w is not worker]
            await d.registry.publish()
            await d.until(lambda: d.router.fleet.get("d-one") is None)
            request.resume_from_index = len(seen.ids)
            answer = await second.ask(request)
            assert answer.ids == expected(PROMPT, 12)[len(seen.ids) :]
        assert answer.routed[-1].decode_worker == "d-other"
