"""The gaps that clients see are what the ITL target is kept for, not what workers alone tell."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from baton.fleet import Role, WorkerState
from cluster.planner.signals import (
    PoolGaps,
    PoolSignals,
    RouterSignals,
    Signals,
    WorkerSignals,
)
from tests.cluster.planner.moments import (
    STABLE_S,
    Planning,
    decode_pool,
    prefill_pool,
    router,
    with_workers,
    worker,
)

MANY = 2_000


def seen(now_s: float, p95_s: float, num_gaps: int = MANY) -> RouterSignals:
    return replace(router(now_s), gaps=(PoolGaps("decode", num_gaps, p95_s),))


def pool(now_s: float, desired: int = 2) -> PoolSignals:
    """Steps of 40 ms, 20 streams each."""
    return decode_pool(now_s, desired, streams=40, fill=0.4, itl_s=0.04)


def planned(*moments: Signals) -> Planning:
    planning = Planning()
    for each in moments:
        planning.see(each)
    return planning


def at(now_s: float, decode: PoolSignals, *routers: RouterSignals) -> Signals:
    return Signals(now_s, (prefill_pool(now_s, 1), decode), routers)


def test_gaps_over_the_target_ask_for_workers_though_decode_steps_are_within_it() -> None:
    """What is beside a step stays, whatever its streams: 10 ms of 50 ms leave it 40 ms, 25 ms
    leave 25 ms."""
    assert planned(at(0.0, pool(0.0), seen(0.0, 0.05))).desired("decode") == 2
    planning = planned(at(0.0, pool(0.0), seen(0.0, 0.065)))
    assert planning.desired("decode") == 3, "2 * 40 / 25, a tenth over is tolerated"
    assert "ITL 65.0 ms over target 50 ms, 25.0 ms of it beside" in planning.reason("decode")


def test_gaps_that_more_workers_cannot_shorten_are_explained() -> None:
    planning = planned(at(0.0, pool(0.0), seen(0.0, 0.327)))
    assert planning.desired("decode") == 2
    reported = (
        "ITL 327.0 ms over target 50 ms, 287.0 ms of it beside decode steps: more workers cannot "
        "mend that, steps of 50 ms need 1.6 workers"
    )
    assert reported in planning.reason("decode")


@dataclass
class Loop:
    """A decode pool that 3,200 tokens/s are wanted of. Steps take 10 ms and 1 ms a stream, so that
    five workers keep them within 50 ms; a worker is live `start_s` after it was asked for."""

    every_s: float = 5.0
    start_s: float = 0.0
    born_s: list[float] = field(default_factory=lambda: [-1_000.0] * 5)
    now_s: float = 0.0
    planning: Planning = field(default_factory=Planning)
    sizes: list[int] = field(default_factory=list)

    def run(self, until_s: float, extra_s: Callable[[], float]) -> None:
        while self.now_s < until_s:
            step_s = self._step_s()
            self.planning.see(at(self.now_s, self._pool(step_s), self._seen(step_s + extra_s())))
            self._follow(self.planning.desired("decode"))
            self.now_s += self.every_s

    def _live(self) -> list[float]:
        return [born_s for born_s in self.born_s if born_s <= self.now_s]

    def _step_s(self) -> float:
        busy = 3.2 / len(self._live())
        return 0.01 / (1 - busy) if busy < 0.99 else 1.0

    def _seen(self, gap_s: float) -> RouterSignals:
        return seen(self.now_s, gap_s)

    def _pool(self, step_s: float) -> PoolSignals:
        live = self._live()
        streams = round(3_200 * step_s / len(live))
        workers = tuple(
            worker(
                f"decode-{number}",
                self.now_s,
                state=WorkerState.LIVE if born_s in live else WorkerState.STARTING,
                live_for_s=self.now_s - born_s,
                streams=streams if born_s in live else 0,
                itl_s=step_s if born_s in live else None,
            )
            for number, born_s in enumerate(self.born_s)
        )
        return PoolSignals("decode", Role.DECODE, len(self.born_s), 16, workers=workers)

    def _follow(self, desired: int) -> None:
        self.sizes.append(desired)
        while len(self.born_s) < desired:
            self.born_s.append(self.now_s + self.start_s)
        self.born_s = sorted(self.born_s)[:desired]

    def turns(self) -> int:
        """How often the pool began to grow after it had shrunk, or to shrink after it had grown."""
        steps = [b > a for a, b in itertools.pairwise(self.sizes) if a != b]
        return sum(a != b for a, b in itertools.pairwise(steps))


@pytest.mark.parametrize("extra_s", [0.0, 0.06, 0.3])
def test_decode_steps_are_kept_within_the_target_though_clients_gaps_are_out_of_reach(
    extra_s: float,
) -> None:
    """Fewer workers would make gaps longer, and more hardly shorter."""
    loop = Loop(born_s=[-1_000.0 + number for number in range(7)])
    loop.run(2_000.0, lambda: extra_s)
    assert loop.sizes[-1] == 5


@pytest.mark.parametrize(
    ("extra_s", "start_s", "every_s"),
    [
        (0.03, 40.0, 5.0),
        (0.045, 3.0, 5.0),
        (0.045, 40.0, 1.0),
        (0.06, 40.0, 5.0),
        (0.1, 3.0, 1.0),
        (0.1, 40.0, 5.0),
        (0.3, 0.0, 5.0),
    ],
)
def test_longer_gaps_that_begin_at_once_never_ask_for_twice_the_workers(
    extra_s: float, start_s: float, every_s: float
) -> None:
    """On its way up what is smoothed passes all values, also the one that leaves steps no time; and
    it stays where it is while new workers warm up."""
    loop = Loop(every_s, start_s)
    loop.run(200.0, lambda: 0.0)
    loop.run(900.0, lambda: extra_s)
    assert max(loop.sizes) <= 8
    assert loop.turns() <= 2, "down before, up, and down again where that mends nothing"


def test_gaps_that_come_and_go_about_what_is_in_reach_have_no_worker_come_and_go() -> None:
    loop, chance = Loop(), random.Random(1)
    loop.run(3_600.0, lambda: chance.uniform(0.035, 0.045))
    assert loop.turns() <= 1


def test_gaps_of_several_routers_count_by_their_number() -> None:
    many, few = seen(0.0, 0.04, 3_000), seen(0.0, 0.08, 1_000)
    assert "ITL 50.0 ms" in planned(at(0.0, pool(0.0), many, few)).reason("decode")


@pytest.mark.parametrize("num_gaps", [0, 99])
def test_too_few_gaps_say_nothing(num_gaps: int) -> None:
    planning = planned(at(0.0, pool(0.0), seen(0.0, 0.327, num_gaps)))
    assert "ITL 40.0 ms" in planning.reason("decode")


def test_old_gaps_say_nothing() -> None:
    old = replace(seen(0.0, 0.327), measured_at_s=-20.0)
    planning = planned(at(0.0, pool(0.0), old, router(0.0)))
    assert "ITL 40.0 ms" in planning.reason("decode")


@pytest.mark.parametrize(
    "other",
    [
        worker("new-0", 0.0, live_for_s=5.0, streams=20, itl_s=0.4),
        worker("old-0", 0.0, state=WorkerState.DRAINING, streams=20, itl_s=0.4),
    ],
    ids=["cold", "draining"],
)
def test_gaps_that_may_be_of_a_cold_worker_or_one_that_drains_change_nothing(
    other: WorkerSignals,
) -> None:
    planning = planned(at(0.0, with_workers(pool(0.0), other), seen(0.0, 0.327)))
    assert "ITL 40.0 ms" in planning.reason("decode")
    other = replace(other, measured_at_s=10.0)
    known = at(5.0, pool(5.0), seen(5.0, 0.06))
    tainted = at(10.0, with_workers(pool(10.0), other), seen(10.0, 0.327))
    planning = planned(known, tainted)
    assert "ITL 60.0 ms" in planning.reason("decode"), "as last known"


def test_what_has_not_been_known_for_a_stable_window_is_gone_by_no_more() -> None:
    planning = planned(at(0.0, pool(0.0), seen(0.0, 0.06)))
    for number in range(1, 61):
        now_s = 5.0 * number
        planning.see(at(now_s, pool(now_s), seen(now_s, 0.06, 99)))
        assert "ITL 60.0 ms" in planning.reason("decode"), "as last known"
    planning.see(at(STABLE_S + 5.0, pool(STABLE_S + 5.0), seen(STABLE_S + 5.0, 0.06, 99)))
    assert "ITL 40.0 ms" in planning.reason("decode")
    planning.see(at(STABLE_S + 10.0, pool(STABLE_S + 10.0), seen(STABLE_S + 10.0, 0.045)))
    assert "ITL 45.0 ms" in planning.reason("decode"), "not smoothed by what was long ago"


def test_a_moment_of_longer_gaps_hardly_changes_what_is_known() -> None:
    planning = Planning()
    for now_s in (0.0, 5.0, 10.0):
        planning.see(at(now_s, pool(now_s), seen(now_s, 0.327 if now_s == 5.0 else 0.04)))
    assert planning.desired("decode") <= 3
    for number in range(3, 60):
        now_s = 5.0 * number
        planning.see(at(now_s, pool(now_s), seen(now_s, 0.04)))
    assert "needs 1.6 workers" in planning.reason("decode")
