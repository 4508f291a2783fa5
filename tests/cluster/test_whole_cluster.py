"""The whole cluster as `baton up` starts it: Ray, supervisor, 2 + 2 workers, router, client.

Every test ends with every worker's books: sound, and nothing held.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from baton.client import AsyncClient
from baton.control.client import ControlClient
from baton.finish_reason import FinishReason
from tests.cluster.whole_cluster import (
    KINDS,
    PROMPT,
    Asked,
    Site,
    all_live,
    books_of,
    freeze_mid_push,
    incarnations,
    kill,
    live_workers,
    pid_of,
    run,
    site_of,
    start,
    wait_until,
)
from tests.router.callers import DOORS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
BOTH_DOORS = pytest.mark.parametrize("door", ["grpc", pytest.param("http", marks=pytest.mark.full)])


@pytest.fixture(scope="module", params=KINDS)
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    with site_of(request.param, tmp_path_factory) as site:
        yield site


def test_requests_are_prefilled_in_one_pool_and_decoded_in_the_other_with_the_oracles_tokens(
    site: Site,
) -> None:
    def one(number: int) -> None:
        prompt = PROMPT[: 10 + 7 * number]
        answer = run(site.cluster.router_address, prompt, 20)
        assert answer.ids == site.expect(prompt, 20)
        assert answer.routed[-1].prefill_worker.startswith("prefill-")
        assert answer.routed[-1].decode_worker.startswith("decode-")
        assert answer.finished is not None
        assert answer.finished.reason is FinishReason.LENGTH

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(one, range(12)))
    site.all_sound()


async def test_of_200_requests_a_third_are_cancelled_and_the_others_lose_nothing(
    site: Site,
) -> None:
    rng = random.Random(20)
    prompts = [
        [rng.randrange(3, 250) for _ in range(rng.choice((1, 7, 8, 40, 130, 380)))]
        for _ in range(200)
    ]
    lengths = [rng.randint(2, 40) for _ in prompts]
    leaving = rng.sample(range(200), 67)
    leave_after = {n: rng.randint(1, 12) for n in leaving[:40]}  # events
    leave_within_s = {n: rng.uniform(0.01, 0.1) for n in leaving[40:]}  # most are not placed yet
    kept = [n for n in range(200) if n not in leaving]
    async with AsyncClient(site.cluster.router_address) as client, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                start(client, prompts[n], lengths[n], leave_after.get(n), leave_within_s.get(n))
            )
            for n in range(200)
        ]
    answers = [task.result() for task in tasks]
    expected = site.expected([prompts[n] for n in kept], [lengths[n] for n in kept])
    for number, tokens in zip(kept, expected, strict=True):
        assert answers[number].ids == tokens, number
    left = [answers[n] for n in leaving if answers[n].finished is None]
    assert len(left) > 40, "hardly any was cancelled"
    before_routed = sum(not answer.routed for answer in left)
    before_tokens = sum(not answer.ids for answer in left) - before_routed
    while_streaming = sum(bool(answer.ids) for answer in left)
    assert min(before_routed, before_tokens, while_streaming) > 2
    workers = {a.routed[0].prefill_worker for a in answers if a.routed}
    workers |= {a.routed[0].decode_worker for a in answers if a.routed}
    assert workers == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    await asyncio.to_thread(site.all_sound)


def test_a_drained_worker_finishes_its_streams_and_is_replaced_by_a_living_supervisor(
    site: Site,
) -> None:
    before, supervisor = site.all_live(), site.supervisor_pid()
    with site.streams(), ControlClient(site.cluster.control_address) as control:
        control.drain("decode-1")
    after = site.wait_for_recreated(before, "decode-1")
    assert site.supervisor_pid() == supervisor
    assert [pool.desired_replicas for pool in after.pools] == [2, 2]
    assert dict(incarnations(before).items() ^ incarnations(after).items()).keys() == {"decode-1"}
    site.all_sound()


@pytest.mark.parametrize("door", DOORS)
def test_a_decode_worker_killed_mid_stream_costs_no_token_and_is_recreated(
    site: Site, door: str
) -> None:
    before = site.all_live()
    with site.streams(door=door) as running:
        address, control = live_workers(before)["decode-0"].address, site.cluster.control_address
        wait_until(lambda: books_of(control, address).num_running, 20, "nothing ran on decode-0")
        kill(before, "decode-0")
    if door == "grpc":  # HTTP does not tell
        assert any(len(each.result().routed) > 1 for each in running), "nothing ran on decode-0"
    after = site.wait_for_recreated(before, "decode-0")
    assert len(live_workers(after)) == 4
    assert [pool.last_error for pool in after.pools] == ["", ""]
    site.serves(after, "decode-0")
    site.all_sound()


@BOTH_DOORS
def test_a_prefill_worker_killed_in_a_push_leaves_nothing_behind_and_costs_no_token(
    site: Site, door: str
) -> None:
    before = site.all_live()
    num_steps = site.books(before)["prefill-1"].num_steps
    prompts = [[n + 3, *PROMPT[n : n + 400]] for n in range(24)]  # no two share a prefix
    with ThreadPoolExecutor(24) as threads:
        running = [threads.submit(site.ask, door, prompt, 20) for prompt in prompts]
        freeze_mid_push(site, before, "prefill-1", num_steps, pid_of(before, "prefill-1"))
        kill(before, "prefill-1")
        answers: list[Any] = [request.result(90) for request in running]
    for prompt, answer in zip(prompts, answers, strict=True):
        answer.assert_says(site.text_model, site.expect(prompt, 20))
    if door == "grpc":
        moved = [a for a in answers if a.routed[0].prefill_worker == "prefill-1" and a.routed[1:]]
        assert moved, "no request lost its prefill worker"
    site.serves(site.wait_for_recreated(before, "prefill-1"), "prefill-1")
    site.all_sound()


@pytest.mark.parametrize("door", [pytest.param("grpc", marks=pytest.mark.full), "http"])
def test_a_worker_that_hangs_is_avoided_then_killed_and_recreated(site: Site, door: str) -> None:
    before = site.all_live()
    with site.streams(door=door):
        address, control = live_workers(before)["decode-1"].address, site.cluster.control_address
        wait_until(lambda: books_of(control, address).num_running, 20, "nothing ran on decode-1")
        os.kill(pid_of(before, "decode-1"), signal.SIGSTOP)
        site.wait_for(lambda seen: "decode-1" not in live_workers(seen), 10)
        answer = run(site.cluster.router_address, PROMPT[:120], 20)
        assert answer.routed[-1].decode_worker == "decode-0"
        assert answer.ids == site.expect(PROMPT[:120], 20)
    after = site.wait_for_recreated(before, "decode-1")
    if door == "grpc":
        site.serves(after, "decode-1")
    site.all_sound()


def listens(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def asked_until_it_listens(site: Site, address: str) -> list[Asked]:
    """Requests begun while nothing listens at the address of one that was killed just now."""
    wait_until(lambda: not listens(address), 10, "it was not killed")
    asked = []
    while not listens(address):
        asked.append(site.ask_new())
    return asked


def test_kill_9_of_the_supervisor_stops_nothing_and_it_adopts_what_it_finds(site: Site) -> None:
    before, supervisor = site.all_live(), site.supervisor_pid()
    with site.streams(1, 300):
        os.kill(supervisor, signal.SIGKILL)
        begun_meanwhile = asked_until_it_listens(site, site.cluster.control_address)
    assert begun_meanwhile
    site.check(begun_meanwhile)
    after = site.all_live()
    assert incarnations(after) == incarnations(before)
    assert site.supervisor_pid() != supervisor
    site.all_sound()


@BOTH_DOORS
def test_kill_9_of_the_router_loses_and_repeats_no_token_and_no_decode_step(
    site: Site, door: str
) -> None:
    """Over HTTP whoever comes again asks for the whole answer; the seed that it is drawn with is
    the caller's, since HTTP tells of none."""
    before = site.all_sound()
    router_pid, num_tokens = site.cluster.router.pid, 250
    assert router_pid is not None
    streaming = [threading.Event() for _ in range(20)]
    with ThreadPoolExecutor(20) as threads:
        running = [
            threads.submit(
                site.ask,
                door,
                PROMPT[n : n + 120],
                num_tokens,
                streaming[n].set,
                temperature=1.0,
                **({"seed": n} if n % 2 or door == "http" else {}),
            )
            for n in range(20)
        ]
        for event in streaming:
            assert event.wait(30)
        os.kill(router_pid, signal.SIGKILL)
        answers: list[Any] = [request.result(90) for request in running]
    assert site.cluster.router.pid != router_pid
    for number, answer in enumerate(answers):
        seed = number if door == "http" else answer.routed[-1].seed
        prompt = PROMPT[number : number + 120]
        expected = site.expect(prompt, num_tokens, temperature=1.0, seed=seed)
        answer.assert_says(site.text_model, expected)
    after = site.all_sound()
    assert set(after) == set(before)
    first = sum(after[w].num_first_tokens - before[w].num_first_tokens for w in after)
    later = sum(after[w].num_later_tokens - before[w].num_later_tokens for w in after)
    ways = [
        [(r.attempt, r.prefill_worker, r.decode_worker, r.reason) for r in a.routed]
        for a in answers
        if door == "grpc"
    ]
    assert (first, later) == (20, 20 * (num_tokens - 1)), f"a token was sampled twice: {ways}"


def test_scaling_out_and_in_changes_the_fleet_and_drains_what_leaves(site: Site) -> None:
    site.all_live()
    with ControlClient(site.cluster.control_address) as control:
        assert control.set_replicas("decode", 3) == 2
        site.wait_for(lambda seen: "decode-2" in live_workers(seen))
        assert control.set_replicas("decode", 2) == 3
    site.wait_for(lambda seen: "decode-2" not in live_workers(seen) and all_live(seen))
    assert run(site.cluster.router_address, PROMPT[:50], 20).ids == site.expect(PROMPT[:50], 20)
    site.all_sound()
