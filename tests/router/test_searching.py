"""Requests that another router began are looked for so many at once, by turns of their tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.errors import OverloadedError
from baton.status import from_rpc_error
from router import router
from router.placement.fairness import FairLine
from tests.router.answers import PROMPT, ask_for, assert_whole, refusal
from tests.router.deployment import QUICK, deployment


class Searches:
    """What searches under the turns that it is given, in the order in which they came."""

    def __init__(self, max_queue: int) -> None:
        self.turns = FairLine("found", 2, 2 + max_queue, QUICK.overload_retry_s)
        self.begun: list[str] = []
        self.on_end: Callable[[], object] = lambda: None
        self._may_end: dict[str, asyncio.Event] = {}

    def ask(self, name: str) -> asyncio.Task[None]:
        """`name`: the tenant's letter and a number."""
        self._may_end[name] = asyncio.Event()
        return asyncio.create_task(self._search(name))

    async def _search(self, name: str) -> None:
        async with self.turns.turn(name[0]):
            self.begun.append(name)
            await self._may_end[name].wait()
        self.on_end()

    async def end(self, name: str) -> None:
        self._may_end[name].set()
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def _two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "SEARCHES_AT_ONCE", 2)


pytestmark = pytest.mark.usefixtures("_two_at_once")


async def test_a_tenant_that_asks_for_little_waits_behind_its_own_requests_only() -> None:
    searches = Searches(max_queue=10)
    asked = {name: searches.ask(name) for name in ("a1", "a2", "a3", "a4", "a5", "b1")}
    await settled()
    assert searches.begun == ["a1", "a2"]
    await searches.end("a2")
    for name in ("a1", "a3", "b1", "a4", "a5"):
        await searches.end(name)
    await asyncio.gather(*asked.values())
    assert searches.begun == ["a1", "a2", "b1", "a3", "a4", "a5"]
    assert searches.turns.num_requests == 0


async def test_a_full_line_refuses_the_newest_of_the_tenant_that_has_most_of_it() -> None:
    searches = Searches(max_queue=2)
    asked = {name: searches.ask(name) for name in ("a1", "a2", "a3", "a4")}
    await settled()
    with pytest.raises(OverloadedError) as caught:
        await searches.ask("a5")
    assert caught.value.retry_after_s == QUICK.overload_retry_s
    other = searches.ask("b1")
    with pytest.raises(OverloadedError):
        await asked.pop("a4")
    others = [other, searches.ask("b2")]
    with pytest.raises(OverloadedError):
        await asked.pop("a3")
    with pytest.raises(OverloadedError):
        await searches.ask("b3")  # what `a` has left runs
    for name in ("a1", "a2", "b1", "b2"):
        await searches.end(name)
    await asyncio.gather(*others, *asked.values())
    assert searches.turns.num_requests == 0


async def test_who_leaves_gives_its_turn_to_the_next_also_when_it_has_just_come() -> None:
    searches = Searches(max_queue=10)
    asked = {name: searches.ask(name) for name in ("a1", "a2", "a3", "a4", "a5")}
    await settled()
    asked["a3"].cancel()
    await settled()
    searches.on_end = asked["a4"].cancel  # whose turn it is then, but that it has yet to hear
    await searches.end("a1")
    assert asked["a4"].cancelled()
    assert searches.begun == ["a1", "a2", "a5"]
    for name in ("a2", "a5"):
        await searches.end(name)
    await asyncio.gather(*asked.values(), return_exceptions=True)
    assert searches.turns.num_requests == 0


async def test_resumes_ask_the_workers_no_faster_than_searches_may_and_are_refused_beyond() -> None:
    async with deployment(max_queue=1, attach_timeout_s=20.0) as d:
        worker = d.worker("d0")
        worker.faults.hang_attaches = 2
        asking = []
        for number in range(3):
            request = ask_for(PROMPT, request_id=f"r{number}", resume_from_index=0)
            asking.append(asyncio.create_task(d.client.ask(request)))
            await d.until(lambda n=number: d.router.num_active == n + 1)  # type: ignore[misc]
        await d.until(lambda: worker.num_attaching == 2)
        error = await refusal(d.client, ask_for(PROMPT, request_id="r3", resume_from_index=0))
        problem = from_rpc_error(error)  # type: ignore[arg-type]
        assert isinstance(problem, OverloadedError)
        assert problem.retry_after_s == QUICK.overload_retry_s
        assert worker.num_attaching == 2
        asking[0].cancel()
        assert_whole(await asking[2], PROMPT)  # it was nowhere, and ran
        asking[1].cancel()
