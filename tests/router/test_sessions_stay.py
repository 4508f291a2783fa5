"""A session prefers the decode worker that it was on last; a hot prefix gets further holders."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.config.router import PlacementConfig
from kv_transfer.block_hash import SHARED_BY_ALL
from router.fleet.fleet import Booking, Fleet
from router.index.prefix_index import PrefixIndex
from router.placement.placement import Placement
from router.placement.placing import Placing
from router.placement.ticket import PromptBlocks, Ticket
from tests.router.answers import ask_for
from tests.router.deployment import deployment
from tests.router.fleets import POLICY, entry_of, facts, fleet_of, two_and_two

NOW_S = 100.0


def placing_on(fleet: Fleet, config: PlacementConfig = POLICY) -> Placing:
    return Placing(config, fleet, PrefixIndex(), random.Random(0))


def place_and_keep(placing: Placing, fleet: Fleet, ticket: Ticket) -> tuple[Placement, Booking]:
    nobody = np.zeros(fleet.num_slots, dtype=np.bool_)
    placement = placing.best(ticket, nobody, NOW_S)
    assert placement is not None
    return placement, placing.book(ticket, placement, NOW_S).booking


def place(placing: Placing, fleet: Fleet, ticket: Ticket) -> Placement:
    placement, booking = place_and_keep(placing, fleet, ticket)
    fleet.release(booking)
    return placement


def ticket_of(first: int, session: tuple[str, str] | None) -> Ticket:
    tokens = np.arange(first, first + 64, dtype=np.uint32)
    return Ticket((0, 0.0, 0), PromptBlocks(tokens, SHARED_BY_ALL), 16, 16, session=session)


def test_a_session_stays_where_it_was_at_equal_cost_and_is_its_tenants_own() -> None:
    fleet = fleet_of(facts("p0", True, False), *(facts(f"d{n}", False, True) for n in range(8)))
    placing = placing_on(fleet)
    ran_on = {
        (tenant, turn): place(placing, fleet, ticket_of(first + 100 * turn, (tenant, "talk")))
        for turn in range(8)
        for tenant, first in (("one", 0), ("two", 10_000))
    }
    homes = [{ran_on[tenant, n].decode_worker for n in range(8)} for tenant in ("one", "two")]
    assert [len(home) for home in homes] == [1, 1]
    assert homes[0] != homes[1]
    anyone = {
        place(placing, fleet, ticket_of(20_000 + n * 100, None)).decode_worker for n in range(40)
    }
    assert len(anyone) > 4


def test_a_session_leaves_a_worker_that_is_dearer_or_gone() -> None:
    fleet = two_and_two()
    placing, talk = placing_on(fleet), ("", "talk")
    home = place(placing, fleet, ticket_of(0, talk)).decode_worker
    other = {"d0": "d1", "d1": "d0"}[home]
    assert place(placing, fleet, ticket_of(1000, talk)).decode_worker == home
    busy = [fleet.book_running(entry_of(fleet, home), 16) for _ in range(4)]
    assert place(placing, fleet, ticket_of(2000, talk)).decode_worker == other
    for booking in busy:
        fleet.release(booking)
    fleet.remove(entry_of(fleet, other))
    assert place(placing, fleet, ticket_of(3000, talk)).decode_worker == home


def test_the_quietest_session_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.placement.placing.MAX_SESSIONS", 2)
    fleet = two_and_two()
    placing = placing_on(fleet)
    for name in ("a", "b", "a", "c"):
        place(placing, fleet, ticket_of(0, ("", name)))
    (a,), (b,), (c,) = (placing.queries(ticket_of(0, ("", name)), NOW_S) for name in "abc")
    assert b.preferred is None
    assert a.preferred is not None
    assert c.preferred is not None


def test_a_hot_prefix_gets_another_holder_once_its_holders_queue_costs_more() -> None:
    """The costs alone do that: at some length of the holder's queue it is cheaper to compute the
    prefix anew. What is computed there is a copy, which later requests use."""
    fleet = two_and_two()
    placing = placing_on(fleet, PlacementConfig(local_prefill="never"))
    common = np.arange(2000, dtype=np.uint32)

    def ask(number: int) -> tuple[Placement, Booking]:
        own = np.full(200, 3000 + number, dtype=np.uint32)
        prompt = PromptBlocks(np.concatenate([common, own]), SHARED_BY_ALL)
        return place_and_keep(placing, fleet, Ticket((0, 0.0, 0), prompt, 16, 16))

    first, booking = ask(0)
    fleet.release_prefill(booking)  # it is computed: one prefill and one decode worker hold it
    later = [ask(number)[0] for number in range(1, 31)]
    prefills = [placement.prefill_worker for placement in later]
    copied = next(n for n, worker in enumerate(prefills) if worker != first.prefill_worker)
    assert 8 <= copied <= 11  # 2,000 tokens are as dear as a queue of ten times 200
    assert later[copied].num_cached_tokens_prefill == 0
    assert all(placement.num_cached_tokens_prefill == 2000 for placement in later[copied + 1 :])
    assert prefills[copied + 1 :].count(first.prefill_worker) >= 5
    decodes = [placement.decode_worker for placement in later]
    moved = next(n for n, worker in enumerate(decodes) if worker != first.decode_worker)
    assert later[moved].num_cached_tokens_decode == 0
    assert decodes.count(first.decode_worker) >= 10
    assert decodes.count(decodes[moved]) >= 10


async def test_a_clients_session_id_reaches_the_choice() -> None:
    async with deployment(1, 4) as d:
        decodes = set[str]()
        for turn in range(8):
            answer = await d.client.ask(ask_for(f"{turn}: nothing in common", session_id="talk"))
            decodes.add(answer.routed[0].decode_worker)
        assert len(decodes) == 1
