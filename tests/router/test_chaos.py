"""Many requests while workers fail, hang, drop sessions, die and come back: the same tokens."""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.v1 import worker_pb2
from tests.router.answers import ask_for, expected
from tests.router.callers import DOORS, caller_at
from tests.router.deployment import DECODE, PREFILL, Deployment, default_model, deployment


async def break_things(d: Deployment, rng: random.Random, incarnations: dict[str, int]) -> None:
    """One fault somewhere, of any kind."""
    worker = d.fabric.workers[rng.choice(sorted(d.fabric.workers))]
    kind = rng.choice(("fail_prefills", "fail_handoffs", "end_early", "reject", "drop", "die"))
    if kind == "reject":
        worker.faults.reject.append((worker_pb2.REJECT_REASON_NO_CAPACITY, 10))
    elif kind == "drop":
        worker.drop_sessions()
    elif kind == "die":
        incarnations[worker.worker_id] = incarnations.get(worker.worker_id, 1) + 1
        await worker.die()
        number, kv = incarnations[worker.worker_id], worker.kv_fingerprint
        await d.add_worker(worker.worker_id, worker.role, number, kv_fingerprint=kv)
    else:
        setattr(worker.faults, kind, 1)


PATIENT = {"max_attempts": 50, "max_dead_decode_workers": 50}


async def run_chaos(
    seed: int,
    num_requests: int,
    workers: tuple[int, int, int] = (3, 3, 0),
    others: int = 0,
) -> None:
    """`workers`: how many prefill, decode and mixed ones; `others`: of each of the first two roles,
    how many whose KV is of another kind. Requests take turns at the two doors."""
    async with deployment(
        *workers, retries=PATIENT, placement={"local_prefill": "auto"}, http={"port": 0}
    ) as d:
        doors = [caller_at(door, d.servers[0].address, d.servers[0].http_address) for door in DOORS]
        for number in range(others):
            for letter, role in (("p", PREFILL), ("d", DECODE)):
                await d.add_worker(f"other-{letter}{number}", role, kv_fingerprint=b"other")
        await d.connected(sum(workers) + 2 * others)
        rng = random.Random(seed)
        incarnations: dict[str, int] = {}
        answered = asyncio.Event()
        num_left = num_requests

        async def one(number: int) -> None:
            prompt = f"story {number % 7}, told to listener {number}"
            await asyncio.sleep(0.004 * number)  # arrivals over time, not for order
            answer = await doors[number % 2].ask(ask_for(prompt, 5 + number % 40))
            answer.assert_says(default_model(), expected(prompt, 5 + number % 40))
            nonlocal num_left
            num_left -= 1
            answered.set()

        async def chaos() -> None:
            """At most one fault for an answer: a slow machine needs time to give one. Never left
            between a worker's end and its next start."""
            while num_left:
                await asyncio.sleep(rng.uniform(0.01, 0.06))
                answered.clear()
                if num_left:
                    await break_things(d, rng, incarnations)
                    await answered.wait()

        breaking = asyncio.create_task(chaos())
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(num_requests):
                    group.create_task(one(number))
        finally:
            num_left = 0
            answered.set()
            await breaking
            await asyncio.gather(*(door.close() for door in doors))
        await d.check_empty()
        assert len(d.fabric.workers) == sum(workers) + 2 * others


async def test_every_request_survives_a_fleet_that_keeps_breaking() -> None:
    await run_chaos(seed=1, num_requests=150)


async def test_three_workers_of_both_roles_that_keep_breaking_lose_nothing() -> None:
    await run_chaos(seed=11, num_requests=80, workers=(0, 0, 3))


async def test_streams_go_on_among_workers_of_two_kinds_of_kv_that_keep_breaking() -> None:
    await run_chaos(seed=5, num_requests=80, workers=(2, 2, 0), others=2)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
async def test_every_request_survives_broken_fleets_of_two_kinds_of_kv(seed: int) -> None:
    await run_chaos(seed, num_requests=300, workers=(2, 2, 0), others=2)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 10))
async def test_every_request_survives_many_broken_fleets(seed: int) -> None:
    await run_chaos(seed, num_requests=400)
