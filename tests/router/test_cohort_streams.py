"""Workers of two models behind one router: every stream is one model's, whatever happens."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from baton.v1 import common_pb2, control_pb2, router_pb2, worker_pb2
from router.cohorts import draw
from router.text import TextModel
from tests.router.deployment import (
    DECODE,
    PREFILL,
    PROMPT,
    Answer,
    Deployment,
    ask_for,
    deployment,
    error_reason,
)
from tests.router.test_chaos import PATIENT, break_things
from tests.router.test_requests import expected

WEIGHTS = {"old": 0, "new": 1 << 40}  # of the model; the KV would fit together
WORKERS = ("p0", "d0", "d1")
EVEN = {"old": 50, "new": 50}


async def tell_weights(d: Deployment, **weights: int) -> None:
    d.registry.pools = [
        control_pb2.PoolStatus(
            name=f"{kind}-{cohort}",
            role=role,
            desired_replicas=1,
            live_replicas=1,
            cohort=cohort,
            cohort_weight=weight,
        )
        for cohort, weight in weights.items()
        for kind, role in (("p", PREFILL), ("d", DECODE))
    ]
    await d.registry.publish()
    known = [server.router.fleet.cohorts for server in d.servers]
    await d.until(lambda: all(cohorts._weights == weights for cohorts in known))


async def add(d: Deployment, cohort: str, name: str) -> None:
    role = PREFILL if name[0] == "p" else DECODE
    pool, weights = f"{name[0]}-{cohort}", WEIGHTS[cohort]
    await d.add_worker(f"{cohort}-{name}", role, pool=pool, weights=weights)


@asynccontextmanager
async def two_cohorts(text_model: TextModel, **changes: Any) -> AsyncIterator[Deployment]:
    """A prefill and two decode workers each."""
    async with deployment(text_model, prefill=0, decode=0, **changes) as d:
        await tell_weights(d, **EVEN)
        for cohort in WEIGHTS:
            for name in WORKERS:
                await add(d, cohort, name)
        await d.connected(6)
        yield d


def name_drawn(cohort: str, number: int = 0) -> str:
    return [n for n in (f"r{k}" for k in range(99)) if draw(n, EVEN) == cohort][number]


def assert_of_one_cohort(answer: Answer, prompt: str, num_tokens: int = 12) -> str:
    """Its stream is that of the cohort where it ended, from the first token on."""
    cohort = answer.routed[-1].cohort
    whole = expected(prompt, num_tokens, 7 ^ WEIGHTS[cohort])
    assert answer.ids == whole[answer.from_index :]
    return cohort


async def die(d: Deployment, worker_id: str) -> None:
    """For good."""
    d.registry.workers = [w for w in d.registry.workers if w.worker_id != worker_id]
    worker = d.fabric.workers[worker_id]
    worker.state = control_pb2.WORKER_STATE_GONE
    await worker.die()
    await d.registry.publish()
    await d.until(lambda: all(server.router.fleet.get(worker_id) is None for server in d.servers))


async def run_chaos(text_model: TextModel, seed: int, num_requests: int) -> None:
    async with two_cohorts(text_model, **PATIENT, fleet_wait_s=20.0) as d:
        for cohort in WEIGHTS:
            await add(d, cohort, "p1")
        await d.connected(8)
        rng, over = random.Random(seed), asyncio.Event()
        found: list[str] = []

        async def one(number: int) -> None:
            prompt, num_tokens = f"story {number % 7}, told to listener {number}", 5 + number % 40
            await asyncio.sleep(0.01 * number)  # arrivals over time, not for order
            request = ask_for(prompt, num_tokens, request_id=f"request-{seed}-{number}")
            answer = await d.client.ask(request)
            found.append(assert_of_one_cohort(answer, prompt, num_tokens))

        async def chaos() -> None:
            incarnations: dict[str, int] = {}
            while not over.is_set():
                await asyncio.sleep(rng.uniform(0.01, 0.06))
                await break_things(d, rng, incarnations)

        breaking = asyncio.create_task(chaos())
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(num_requests):
                    group.create_task(one(number))
        finally:
            over.set()
            await breaking
        assert set(found) == {"old", "new"}
        await d.check_empty()


def assert_no_fault_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Such as a session that ends by an error of the router's."""
    of_router = [record for record in caplog.records if record.name.startswith("router")]
    assert not [record for record in of_router if record.levelname == "ERROR"]


async def test_no_stream_ever_mixes_two_models_while_workers_of_both_keep_dying(
    text_model: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    await run_chaos(text_model, 5, 24)
    assert_no_fault_of_its_own(caplog)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
async def test_no_stream_mixes_two_models_in_any_broken_fleet(
    text_model: TextModel, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    await run_chaos(text_model, seed, 150)
    assert_no_fault_of_its_own(caplog)


async def test_a_stream_whose_cohort_has_gone_ends_with_an_error_that_says_so(
    text_model: TextModel,
) -> None:
    async with two_cohorts(text_model, fleet_wait_s=0.2) as d:
        for name in ("d0", "d1"):
            d.worker(f"new-{name}").on_token = lambda _, name=name: stop(name)
        stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def stop(running: str) -> None:
            for name in ("d0", "d1"):
                d.worker(f"new-{name}").may_decode.clear()
            if not stopped.done():
                stopped.set_result(running)

        asking = {
            cohort: asyncio.create_task(
                d.client.ask(ask_for(PROMPT, request_id=name_drawn(cohort)))
            )
            for cohort in WEIGHTS
        }
        running = await stopped
        for name in sorted(("d0", "d1"), key=lambda name: name == running):
            await die(d, f"new-{name}")  # the one that runs it last: two deaths are too many
        assert assert_of_one_cohort(await asking["old"], PROMPT) == "old"
        with pytest.raises(grpc.aio.AioRpcError, match="its cohort, 'new'") as refused:
            await asking["new"]
        assert error_reason(refused.value) == "NOT_RESUMABLE"
        told = {one.cohort: one for one in d.router._report().cohorts}
        assert told["new"].failures_per_s == told["new"].requests_per_s > 0
        assert told["old"].failures_per_s == 0 < told["old"].requests_per_s
        assert told["old"].itl_s > 0
        await d.check_empty()


async def test_a_request_without_tokens_goes_to_the_other_cohort_when_its_own_fails(
    text_model: TextModel,
) -> None:
    async with two_cohorts(text_model) as d:
        d.worker("new-p0").may_prefill.clear()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id=name_drawn("new"))))
        await d.until(lambda: d.worker("new-p0").num_prefilling == 1)
        await die(d, "new-p0")
        answer = await asking
        assert assert_of_one_cohort(answer, PROMPT) == "old"
        assert [routed.cohort for routed in answer.routed] == ["new", "old"]
        told = {one.cohort: one for one in d.router._report().cohorts}
        assert told["new"].failures_per_s == told["new"].requests_per_s > 0
        assert told["old"].failures_per_s == 0
        await d.check_empty()


async def test_a_cohort_that_fails_a_request_twice_leaves_it_to_the_other(
    text_model: TextModel,
) -> None:
    """Each of its handoffs fails, and no worker of it is to blame alone."""
    async with two_cohorts(text_model) as d:
        d.worker("new-p0").faults.fail_prefills = 1000
        await add(d, "new", "p1")
        d.worker("new-p1").faults.fail_prefills = 1000
        await d.connected(7)
        answer = await d.client.ask(ask_for(PROMPT, request_id=name_drawn("new")))
        assert assert_of_one_cohort(answer, PROMPT) == "old"
        assert sum(1000 - d.worker(p).faults.fail_prefills for p in ("new-p0", "new-p1")) == 2
        told = {one.cohort: one for one in d.router._report().cohorts}
        assert told["new"].failures_per_s == told["new"].requests_per_s > 0
        assert told["old"].failures_per_s == 0
        await d.check_empty()


async def test_a_cohort_without_weight_gets_nothing_that_another_failed(
    text_model: TextModel,
) -> None:
    async with two_cohorts(text_model, max_attempts=4) as d:
        await tell_weights(d, old=0, new=1)
        d.worker("new-p0").faults.fail_prefills = 3
        answer = await d.client.ask(ask_for(PROMPT, request_id="r1"))
        assert assert_of_one_cohort(answer, PROMPT) == "new"
        await d.check_empty()


async def test_a_cohort_in_which_requests_hang_until_their_deadline_fails_them(
    text_model: TextModel,
) -> None:
    async with two_cohorts(text_model) as d:
        d.worker("new-p0").may_prefill.clear()
        request = ask_for(PROMPT, request_id=name_drawn("new"), timeout_ms=300)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await d.client.ask(request)
        assert error_reason(late.value) == "DEADLINE"
        (told,) = d.router._report().cohorts
        assert told.cohort == "new"
        assert told.failures_per_s == told.requests_per_s > 0


@pytest.mark.parametrize(
    ("tokens_per_s", "is_judged"), [(20.0, False), (2000.0, True)], ids=["too short", "enough"]
)
async def test_a_deadline_in_which_nobody_could_have_served_a_request_is_no_cohort_s_failure(
    text_model: TextModel, tokens_per_s: float, is_judged: bool
) -> None:
    """The new one's prefill worker has yet to tell how fast it is: nothing is refused at once."""
    async with two_cohorts(text_model) as d:
        d.worker("old-p0").load = worker_pb2.WorkerLoad(prefill_tokens_per_s=tokens_per_s)
        await d.registry.publish()
        measured = d.router.fleet.arrays.prefill_measured_s
        await d.until(lambda: bool(np.isfinite(measured).any()))
        d.worker("new-p0").may_prefill.clear()
        request = ask_for(PROMPT, request_id=name_drawn("new"), timeout_ms=200)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await d.client.ask(request)
        assert error_reason(late.value) == "DEADLINE"
        told = [(one.cohort, one.failures_per_s > 0) for one in d.router._report().cohorts]
        assert told == ([("new", True)] if is_judged else [])


async def test_a_request_that_its_client_cancels_says_nothing_of_its_cohort(
    text_model: TextModel,
) -> None:
    async with two_cohorts(text_model) as d:
        d.worker("new-p0").may_prefill.clear()
        name = name_drawn("new")
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id=name)))
        await d.until(lambda: d.worker("new-p0").num_prefilling == 1)
        await d.client.stub.Abort(router_pb2.AbortRequest(request_id=name))
        answer = await asking
        assert answer.finished is not None
        assert answer.finished.reason == common_pb2.FINISH_REASON_ABORTED
        assert not d.router._report().cohorts
        await d.check_empty()


class AheadClock:
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.mark.parametrize("hangs_before", ["first token", "next token"])
@pytest.mark.parametrize(("still_s", "is_counted"), [(3.0, False), (6.0, True)])
async def test_a_request_that_stood_still_until_its_client_gave_up_is_told_of_its_cohort(
    text_model: TextModel, hangs_before: str, still_s: float, is_counted: bool
) -> None:
    clock = AheadClock()
    async with two_cohorts(text_model, clock=clock) as d:
        for worker in ("new-p0", "new-d0", "new-d1"):
            hangs = d.worker(worker)
            (hangs.may_prefill if hangs_before == "first token" else hangs.may_decode).clear()
        name = name_drawn("new")
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id=name)))
        if hangs_before == "first token":
            await d.until(lambda: d.worker("new-p0").num_prefilling == 1)
        else:
            await d.until(lambda: any(run.log.ids for run in d.router._runs.values()))
        clock.ahead_s = still_s
        await d.client.stub.Abort(router_pb2.AbortRequest(request_id=name))
        assert (await asking).finished is not None
        told = [(one.cohort, one.abandoned_per_s > 0) for one in d.router._report().cohorts]
        assert told == ([("new", True)] if is_counted else [])
        await d.check_empty()


@pytest.mark.parametrize("keeps", [True, False], ids=["attached", "run again"])
async def test_another_router_goes_on_in_the_cohort_of_the_tokens_whatever_the_weights(
    text_model: TextModel, keeps: bool
) -> None:
    async with two_cohorts(text_model) as d:
        second = await d.add_router()
        await d.connected(6, d.servers[1].router)
        request = ask_for(PROMPT, 40, request_id=name_drawn("new"))
        seen = await d.client.ask(request, until=lambda answer: len(answer.ids) >= 3)
        assert seen.routed[0].cohort == "new"
        await d.servers.pop(0).stop(0.0)
        await tell_weights(d, old=100, new=0)
        if not keeps:
            await die(d, seen.routed[0].decode_worker)
        request.resume_from_index = len(seen.ids)
        if not keeps:
            with pytest.raises(grpc.aio.AioRpcError, match="cohort") as refused:
                await second.ask(request)
            assert error_reason(refused.value) == "NOT_RESUMABLE"
        request.cohort = seen.routed[0].cohort
        assert assert_of_one_cohort(await second.ask(request), PROMPT, 40) == "new"


async def test_an_explanation_tells_cohorts_where_there_are_several(
    text_model: TextModel,
) -> None:
    async with two_cohorts(text_model) as d:
        await tell_weights(d, old=75, new=25)
        for cohort in WEIGHTS:
            request = ask_for(PROMPT)
            name = next(
                n for n in (f"r{k}" for k in range(99)) if draw(n, {"old": 75, "new": 25}) == cohort
            )
            request.request_id = name
            explained = await d.client.stub.ExplainRoute(
                router_pb2.ExplainRouteRequest(request=request)
            )
            assert [one.cohort for one in explained.candidates[:2]] == [cohort] * 2
            shares = {one.cohort: one.cohort_share for one in explained.candidates}
            assert shares == {"old": 0.75, "new": 0.25}
            answer = await d.client.ask(request)
            assert answer.routed[0].cohort == cohort


async def test_a_worker_is_used_as_soon_as_the_registry_tells_of_its_pool(
    text_model: TextModel,
) -> None:
    async with two_cohorts(text_model) as d:
        await d.add_worker("late", DECODE, pool="d-late")
        watch, fleet = d.router.watch, d.router.fleet

        def is_listed() -> bool:
            workers = watch.last.workers if watch.last is not None else ()
            return "late" in [worker.info.ref.worker_id for worker in workers]

        await d.until(is_listed)
        assert fleet.get("late") is None  # whose tokens would it give?
        await tell_weights(d, **EVEN, late=0)
        await d.connected(7)
        entry = fleet.get("late")
        assert entry is not None
        assert entry.facts.cohort == "late"
