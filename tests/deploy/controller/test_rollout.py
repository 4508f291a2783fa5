"""Rollouts in a small world: workers that start and drain, an operator that is cut off anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.api.serving_cluster import UnitRollout
from deploy.api.status import State
from deploy.controller.rollout.rollout import (
    Figures,
    PoolSeen,
    Record,
    Situation,
    Step,
    UnitSeen,
    judge,
    must_recreate,
    next_step,
    total,
)
from deploy.controller.rollout.units import Unit

MAX_TIMEOUT_S = 100.0
QUICK = UnitRollout(interval="20s", ready_timeout="200s")


def unit(code: str, model: str = "", **pools: str) -> Unit:
    return Unit(code, code, pools or {"prefill": "p", "decode": "d"}, model or code)


OLD, NEW, THIRD = unit("bcdfg"), unit("hjkmn"), unit("pqrst")
OLD_IMAGE = unit("xxxxx", model="bcdfg")
"""Another unit of OLD's model."""


@dataclass
class Worker:
    pool: str
    age: int = 0
    drains_for: int | None = None


@dataclass
class Standing:
    """One unit's RayCluster and what runs under it."""

    unit: Unit
    made_at: str
    record: Record
    sizes: dict[str, int] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    is_ending: bool = False
    active: int = 0
    figures: Figures | None = None
    starts: bool = True
    """Whether its workers ever become live."""

    def live(self, pool: str) -> int:
        return sum(
            w.pool == pool and w.age >= 2 and w.drains_for is None and self.starts
            for w in self.workers
        )

    def seen(self) -> UnitSeen:
        pools = {
            name: PoolSeen(
                self.sizes.get(name, 0),
                sum(w.pool == name for w in self.workers),
                self.live(name),
                role=name,
            )
            for name in self.unit.pools
        }
        figures = self.figures or Figures(num_active=self.active)
        return UnitSeen(
            self.unit, self.made_at, self.record, pools, figures, is_ending=self.is_ending
        )


@dataclass
class World:
    """KubeRay, supervisors and routers, as the operator's steps move them."""

    wanted: Unit | None = OLD
    totals: Mapping[str, int] = field(default_factory=lambda: {"prefill": 2, "decode": 4})
    rollout: UnitRollout = QUICK
    now_s: float = 1000.0
    units: dict[str, Standing] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()
    """Codes of units whose workers never become live."""
    unread: frozenset[str] = frozenset()
    """Codes of units whose tokenizer no router can read."""
    states: list[State] = field(default_factory=list)

    def look(self) -> Step:
        seen = [each.seen() for each in self.units.values()]
        seen = [replace(u, figures=None) if u.unit.code in self.unread else u for u in seen]
        situation = Situation(
            self.wanted, self.totals, self.rollout, seen, 0, self.now_s, MAX_TIMEOUT_S
        )
        step = next_step(situation)
        assert step == next_step(situation)
        return step

    def act(self, step: Step) -> None:
        assert len(step.plans) <= 2 or any(u.is_ending for u in self.units.values())
        if not self.states or self.states[-1] is not step.state:
            self.states.append(step.state)
        if step.routes:
            assert sum(share for _, share in step.routes) == pytest.approx(1.0)
        for plan in step.plans:
            standing = self.units.get(plan.code)
            if standing is None:
                assert self.wanted is not None
                assert plan.code == self.wanted.code
                standing = self.units[plan.code] = Standing(
                    self.wanted, f"{self.now_s:012.1f}", plan.record,
                    starts=plan.code not in self.broken,
                )  # fmt: skip
            standing.record, standing.sizes = plan.record, dict(plan.sizes)
            standing.is_ending |= plan.ends

    def pass_time(self) -> None:
        self.now_s += 5.0
        for code, standing in list(self.units.items()):
            for worker in standing.workers:
                worker.age += 1
                if worker.drains_for is not None:
                    worker.drains_for -= 1
            standing.workers = [w for w in standing.workers if w.drains_for != 0]
            for pool, size in standing.sizes.items():
                own = [w for w in standing.workers if w.pool == pool and w.drains_for is None]
                for worker in sorted(own, key=lambda w: w.age)[: max(0, len(own) - size)]:
                    worker.drains_for = 2
                standing.workers += [Worker(pool) for _ in range(size - len(own))]
            standing.active = int(4 * standing.record.share) or max(0, standing.active - 1)
            if standing.is_ending and not standing.workers:
                del self.units[code]

    def turn(self) -> Step:
        step = self.look()
        self.act(step)
        self.pass_time()
        return step

    def settle(self, turns: int = 400) -> Step:
        for _ in range(turns):
            step = self.turn()
            if step.state in (State.SERVING, State.REVERTED) and len(self.units) == 1:
                sizes = {
                    name: sum(s.live(name) for s in self.units.values()) for name in self.totals
                }
                if sizes == dict(self.totals):
                    return step
        raise AssertionError(f"not settled: {self.look()}, {self.states}")

    def live(self, pool: str) -> int:
        return sum(each.live(pool) for each in self.units.values())


def changing(turns: int = 0, wanted: Unit = NEW, **world: Any) -> World:
    """A world whose unit serves, and whose spec then asked for another one so many turns ago."""
    found = World(**world)
    found.settle()
    found.wanted, found.states = wanted, []
    for _ in range(turns):
        found.turn()
    return found


def retiring(**settings: Any) -> World:
    """Where another image has all requests, and the former unit is yet to go."""
    world = changing(wanted=OLD_IMAGE, **settings)
    while world.look().state is not State.RETIRING:
        world.turn()
    return world


def test_the_first_unit_is_made_and_serves() -> None:
    world = World()
    assert world.settle().state is State.SERVING
    assert world.states == [State.MAKING, State.SERVING]


def test_a_model_takes_over_by_steps_of_workers_and_requests() -> None:
    world, shares, sizes = changing(), [], []
    for _ in range(200):
        step = world.turn()
        plan = next((plan for plan in step.plans if plan.code == "hjkmn"), None)
        if plan is not None and plan.record.share not in shares:
            shares.append(plan.record.share)
        if plan is not None and plan.sizes["decode"] not in sizes:
            sizes.append(plan.sizes["decode"])
        if step.state is State.SERVING and len(world.units) == 1:
            break
    assert shares == [0.0, 0.01, 0.1, 0.5, 1.0]
    assert sizes == [0, 1, 2, 3, 4]
    assert world.settle().reason == "the unit is what the spec asks for"
    assert list(world.units) == ["hjkmn"]


@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (0, 1), (1, 1), (2, 0)])
def test_an_image_takes_over_worker_by_worker(surge: int, unavailable: int) -> None:
    rollout = replace(QUICK, max_surge=surge, max_unavailable=unavailable)
    totals = {"prefill": 2, "decode": 2}
    world = changing(wanted=OLD_IMAGE, rollout=rollout, totals=totals)
    for _ in range(100):
        world.turn()
        for pool, size in world.totals.items():
            assert world.live(pool) >= size - unavailable
            standing = sum(w.pool == pool for u in world.units.values() for w in u.workers)
            assert standing <= size + surge
        if list(world.units) == ["xxxxx"]:
            break
    world.settle()
    assert State.DRAINING not in world.states


def test_one_worker_without_room_for_another_is_recreated() -> None:
    world = World(rollout=replace(QUICK, max_surge=0, max_unavailable=1))
    world.totals = {"decode": 1}
    world.wanted = unit("bcdfg", decode="d")
    world.settle()
    world.wanted, world.states = unit("hjkmn", decode="d"), []
    step = world.turn()
    assert step.routes == (("hjkmn", 1.0),)
    assert "1 worker pods of unit bcdfg drain" in step.reason
    world.settle()
    assert world.states == [State.DRAINING, State.ENDING, State.MAKING, State.SERVING]


def test_a_pause_holds_a_step_until_it_is_over() -> None:
    world = changing(turns=60, rollout=replace(QUICK, pause=True))
    step = world.look()
    assert step.state is State.PAUSED
    assert step.routes == (("bcdfg", 0.99), ("hjkmn", 0.01))
    world.rollout = QUICK
    world.settle()
    assert list(world.units) == ["hjkmn"]


def test_a_unit_that_never_gets_ready_goes_back_and_stays_away() -> None:
    world = changing(broken=frozenset({"hjkmn"}))
    step = world.settle()
    assert step.state is State.REVERTED
    assert "nothing more became ready in 200 s: prefill 0/1 live" in step.reason
    assert list(world.units) == ["bcdfg"]
    world.wanted = THIRD
    world.settle()
    assert list(world.units) == ["pqrst"]


def test_a_unit_gets_no_request_before_a_router_has_read_its_tokenizer() -> None:
    world = changing(unread=frozenset({"hjkmn"}))
    for _ in range(15):
        assert dict(world.turn().routes).get("hjkmn", 0.0) == 0.0
    assert "no router has read its tokenizer yet" in world.look().reason
    assert world.settle().state is State.REVERTED
    world = changing(wanted=OLD_IMAGE, unread=frozenset({"xxxxx"}))
    for _ in range(15):
        assert dict(world.turn().routes).get("xxxxx", 0.0) == 0.0


def compared() -> World:
    """Where another model has 10 % of the requests for a while."""
    world = changing(rollout=replace(QUICK, interval="100s"))
    world.units["bcdfg"].figures = Figures(100, 0, 0.01, 4)
    while "hjkmn" not in world.units or world.units["hjkmn"].record.share < 0.1:
        world.turn()
    return world


@pytest.mark.parametrize(
    ("figures", "why", "num_looks"),
    [
        (Figures(100, 20, 0.01), "20% of its requests fail, 0% of the former unit's", 1),
        (Figures(25, 0, 0.03), "its gaps between tokens are 3.0 times the former unit's", 4),
    ],
)
def test_a_worse_unit_gives_its_requests_back_first_then_goes(
    figures: Figures, why: str, num_looks: int
) -> None:
    """Gaps are too long twice, 15 s apart."""
    world = compared()
    world.units["hjkmn"].figures = figures
    states = [(step := world.turn()).state for _ in range(num_looks)]
    assert states == [*[State.SHIFTING] * (num_looks - 1), State.REVERTING]
    assert step.routes == (("bcdfg", 1.0), ("hjkmn", 0.0))
    assert why in step.reason
    assert world.settle().state is State.REVERTED
    assert list(world.units) == ["bcdfg"]


def test_gaps_of_busier_workers_or_that_were_short_enough_meanwhile_send_no_unit_back() -> None:
    world = compared()
    former, coming = world.units["bcdfg"], world.units["hjkmn"]
    coming.figures = Figures(200, 0, 0.03)
    assert {world.turn().state for _ in range(15)} == {State.SHIFTING}
    for number in range(30):
        coming.figures = Figures(25, 0, 0.03 if number % 3 else 0.01)
        former.figures = Figures(100, 0, 0.01)
        assert world.turn().state is not State.REVERTING


def gone_far() -> World:
    """Where the former unit has begun to go."""
    world = retiring()
    world.units["xxxxx"].figures = Figures(10)
    while not world.units["bcdfg"].record.goes:
        world.turn()
    return world


def test_a_unit_that_fails_once_the_former_has_begun_to_go_keeps_the_requests() -> None:
    """The former's workers are all there still: the record is written before one goes."""
    world = gone_far()
    assert all(world.units["bcdfg"].live(pool) for pool in world.totals)
    world.units["xxxxx"].figures, world.states = Figures(100, 100, 9.0), []
    while "bcdfg" in world.units:
        assert dict(world.turn().routes)["xxxxx"] == 1.0
    assert world.states == [State.RETIRING]
    assert world.settle().state is State.SERVING


@pytest.mark.parametrize(("num_looks", "has_all"), [(0, "bcdfg"), (1, "xxxxx")])
def test_a_unit_that_dies_once_the_former_has_begun_to_go_says_so_and_stays(
    num_looks: int, has_all: str
) -> None:
    """What is left of the former serves meanwhile, if it is whole."""
    world = gone_far()
    for _ in range(num_looks):
        world.turn()
    world.states, world.units["xxxxx"].workers = [], []
    assert {code for code, share in world.turn().routes if share} == {has_all}
    assert world.states == [State.STRANDED]
    assert world.settle().state is State.SERVING
    assert list(world.units) == ["xxxxx"]


def test_a_further_change_replaces_the_unit_that_is_coming() -> None:
    world = changing(turns=10)
    assert set(world.units) == {"bcdfg", "hjkmn"}
    world.wanted, world.states = THIRD, []
    world.settle()
    assert world.states[0] is State.REPLACED
    assert list(world.units) == ["pqrst"]


def test_scaled_to_zero_the_newest_unit_stays() -> None:
    world = changing(turns=10)
    world.totals = {"prefill": 0, "decode": 0}
    world.settle()
    assert list(world.units) == ["hjkmn"]


@pytest.mark.parametrize(
    ("num_active", "num_judged", "expected_s"),
    [(3, 10, MAX_TIMEOUT_S), (0, 10, 10.0), (0, 9, QUICK.interval_s)],
)
def test_the_former_unit_goes_when_its_streams_have_ended_and_the_other_is_judged(
    num_active: int, num_judged: int, expected_s: float
) -> None:
    world = retiring()
    since_s = world.units["xxxxx"].record.since_s
    while any(world.units["bcdfg"].sizes.values()):
        world.units["bcdfg"].figures = Figures(num_active=num_active)
        world.units["xxxxx"].figures = Figures(num_judged)
        world.turn()
    assert expected_s <= world.now_s - since_s <= expected_s + 15.0


def test_a_former_unit_says_why_it_stays_where_it_runs_nothing() -> None:
    world = retiring()
    former, coming = world.units["bcdfg"], world.units["xxxxx"]
    former.figures, coming.figures = Figures(), Figures(10)
    reasons = []
    while any(former.sizes.values()):
        coming.workers[0].age = 0 if len(reasons) < 5 else 9
        reasons.append(world.turn().reason)
    assert list(dict.fromkeys(reasons)) == [
        "unit bcdfg stays until routers know that unit xxxxx has all requests",
        "unit bcdfg stays until enough workers of unit xxxxx are live",
        "unit bcdfg goes: nothing runs there",
    ]


@pytest.mark.parametrize("figures", [Figures(20, 4), Figures(20, 0, 0.03)])
def test_a_unit_of_the_same_model_goes_back_if_it_is_worse_once_it_has_all_requests(
    figures: Figures,
) -> None:
    """For its gaps, while those of the former unit are known."""
    world = retiring()
    world.units["bcdfg"].figures = Figures(100, 0, 0.01)
    world.units["xxxxx"].figures = figures
    assert world.settle().state is State.REVERTED
    assert list(world.units) == ["bcdfg"]


def test_a_deleted_cluster_drains_both_units() -> None:
    world = changing(turns=10)
    world.wanted = None
    step = world.turn()
    assert step.state is State.DRAINING
    for _ in range(10):
        world.turn()
    assert not world.units
    assert world.look().reason == "the ServingCluster is deleted, and no unit is left"


def test_pods_of_a_former_unit_are_waited_for() -> None:
    step = next_step(Situation(NEW, {"decode": 1}, QUICK, [], 2, 0.0, MAX_TIMEOUT_S))
    assert (step.state, step.reason) == (State.ENDING, "2 pods of a former unit are left")


@pytest.mark.parametrize(
    ("former", "coming", "expected"),
    [
        (None, None, ""),
        (Figures(50, 0), Figures(9, 9), ""),
        (None, Figures(20, 4), "20% of its requests fail"),
        (Figures(9, 9), Figures(10, 2), ""),
        (Figures(50, 0), Figures(10, 1), "10% of its requests fail, 0% of the former unit's"),
        (Figures(50, 10), Figures(20, 4), ""),
    ],
)
def test_judged_is_what_was_seen_often_enough(
    former: Figures | None, coming: Figures | None, expected: str
) -> None:
    assert judge(former, coming, QUICK) == expected


def test_figures_of_routers_are_summed() -> None:
    parts = [Figures(10, 1, 0.02, 3), Figures(5, 0, None, 1)]
    assert total(parts) == Figures(15, 1, 0.02, 4)
    assert total([]) is None


def test_room_for_both_units_is_asked_of_each_pool() -> None:
    assert must_recreate(replace(QUICK, strategy="Recreate"), {"decode": 4})
    assert not must_recreate(QUICK, {"decode": 1})
    assert must_recreate(QUICK, {"decode": 0})
    tight = replace(QUICK, max_surge=0, max_unavailable=1)
    assert must_recreate(tight, {"prefill": 1, "decode": 2})
    assert not must_recreate(tight, {"prefill": 2, "decode": 2})


specs = st.sampled_from([OLD, NEW, THIRD, OLD_IMAGE])
few, roles = st.integers(0, 3), ("prefill", "decode")
often_no = st.sampled_from([False, False, False, True])
pool_seen = {
    role: st.builds(PoolSeen, few, few, st.sampled_from([0, 2]), st.just(role)) for role in roles
}
record = st.builds(
    Record, st.sampled_from([0.0, 0.5, 1.0]), few, goes=st.booleans(),
    refused=st.sampled_from(["", "hjkmn"]),
)  # fmt: skip
seen = st.builds(
    UnitSeen, specs, st.sampled_from("ab"), record, st.fixed_dictionaries(pool_seen),
    st.builds(Figures, st.sampled_from([0, 50]), few), often_no,
)  # fmt: skip
situations = st.builds(
    Situation,
    specs | st.none(),
    st.fixed_dictionaries(dict.fromkeys(roles, few)),
    st.builds(
        replace, st.just(QUICK), pause=st.booleans(), max_unavailable=few,
        strategy=st.sampled_from(["RollingUpdate", "RollingUpdate", "Recreate"]),
    ),
    st.lists(seen, max_size=1)
    | st.tuples(seen, seen).filter(lambda both: both[0].unit != both[1].unit),
    few, st.just(1000.0), st.just(MAX_TIMEOUT_S),
)  # fmt: skip


@given(situations)
@settings(max_examples=1000, deadline=None)
def test_whatever_is_seen_requests_go_where_workers_are_and_nothing_goes_back_to_what_goes(
    now: Situation,
) -> None:
    step = next_step(now)
    assert not step.routes or sum(share for _, share in step.routes) == pytest.approx(1.0)
    staying = {seen.unit.code: seen for seen in now.units if not seen.is_ending}
    is_alone = len(staying) == 1
    if now.wanted is None or not staying or (is_alone and must_recreate(now.rollout, now.totals)):
        return  # requests are held for the unit to come
    serving = {code for code, seen in staying.items() if seen.serves(now.totals)}
    plans = {plan.code: plan for plan in step.plans}
    if serving:
        assert {code for code, share in step.routes if share} <= serving
    former = staying[step.plans[0].code]
    if former.record.goes and not is_alone and any(now.totals.values()):
        keeps = all(
            min(former.pool(n).size, former.pool(n).live) for n in now.totals if now.totals[n]
        )
        if serving == {former.unit.code} and keeps and step.plans[1].code != now.wanted.code:
            assert step.state is State.REPLACED
        else:
            sizes = plans[former.unit.code].sizes
            assert step.state in (State.RETIRING, State.STRANDED)
            assert all(n <= former.pool(name).size for name, n in sizes.items())
    for code in serving if len(serving) == 1 else ():  # it keeps a worker of each pool
        for name, size in now.totals.items():
            assert plans[code].sizes[name] >= min(1, size, staying[code].pool(name).size)


rollouts = st.sampled_from(
    [QUICK, replace(QUICK, max_surge=0, max_unavailable=1), replace(QUICK, max_unavailable=1)]
)


@given(
    rollouts,
    st.lists(st.tuples(st.none() | specs, st.integers(0, 12), st.booleans()), max_size=12),
)
@settings(max_examples=300, deadline=None)
def test_live_workers_are_never_fewer_than_promised_and_the_last_spec_comes_to_serve(
    rollout: UnitRollout, events: list[tuple[Unit | None, int, bool]]
) -> None:
    """The spec changes at any time, and an operator is cut off between its look and what it does:
    the next one goes on from what it sees."""
    world = World(rollout=rollout, totals={"prefill": 2, "decode": 3})
    world.settle()
    for spec, turns, is_cut_off in events:
        world.wanted = spec or world.wanted
        if is_cut_off:
            world.look()
            world.pass_time()
        for _ in range(turns):
            world.turn()
            assert len(world.units) <= 2
            for pool, size in world.totals.items():
                assert world.live(pool) >= size - rollout.max_unavailable
    world.settle()
    assert world.wanted is not None
    assert [each.unit for each in world.units.values()] == [world.wanted]


@given(st.lists(st.tuples(specs, st.integers(0, 12)), max_size=6))
@settings(max_examples=100, deadline=None)
def test_a_stranded_rollout_ends_whatever_is_asked_for(events: list[tuple[Unit, int]]) -> None:
    world = gone_far()
    world.units["xxxxx"].starts = False
    for spec, turns in events:
        world.wanted = spec
        for _ in range(turns):
            world.turn()
    world.wanted = unit("zzzzz")
    world.settle()
    assert list(world.units) == ["zzzzz"]


@given(st.lists(st.tuples(specs, st.integers(0, 6)), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_recreated_there_is_one_unit_at_a_time(events: list[tuple[Unit, int]]) -> None:
    world = World(rollout=replace(QUICK, strategy="Recreate"))
    for spec, turns in events:
        world.wanted = spec
        for _ in range(turns):
            world.turn()
            assert len(world.units) <= 1
    world.settle()
    assert [each.unit for each in world.units.values()] == [world.wanted]


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_sizes_are_totals_over_both_units(before: int, after: int, turns: int) -> None:
    world = changing(turns, totals={"prefill": 1, "decode": before})
    world.totals = {"prefill": 1, "decode": after}
    world.settle()
    assert world.live("decode") == after
