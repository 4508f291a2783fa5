"""The planner over a queueing model of two pools, deterministic from start to end: an hour of the
Azure trace, twice as fast and in load steps, then silence, then one more request.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from baton.config.planner import PlannerConfig
from tests.cluster.planner.moments import Planning
from tests.cluster.planner.queueing import TRACE, Arrival, Shape, Site

STEP_S = 0.5
EVERY_S = 5.0
FASTER = 2
TRACE_S = 3_510.0 / FASTER
SILENT_S = 700.0
SHAPE = Shape(prefill_tokens_per_s=4_000.0, stream_s=0.002)
CONFIG = PlannerConfig(
    ttft_target_s=1.5,
    itl_target_s=0.06,
    stable_window_s=120.0,
    scale_in_hold_s=30.0,
    scale_to_zero_after_s=240.0,
)


SHARES = (0.3, 1.0, 0.3, 1.0, 0.3)
"""Of the trace's requests, in each fifth of it: the load more than triples at once, and falls."""


def trace(faster: float) -> Iterator[Arrival]:
    """Each bin's requests, those that its step takes, evenly spread and all alike."""
    lines = [line for line in TRACE.read_text(encoding="utf-8").splitlines() if line[0].isdigit()]
    bin_s = 10.0 / faster
    for number, line in enumerate(lines):
        requests, prompts, outputs = map(int, line.split(","))
        kept = round(requests * SHARES[number * len(SHARES) // len(lines)])
        for i in range(kept):
            at_s = bin_s * (number + (i + 0.5) / kept)
            yield Arrival(at_s, round(prompts / requests), max(1, round(outputs / requests)))


@dataclass
class Course:
    """What became of a run: pool sizes over time, and what users had."""

    site: Site
    planning: Planning
    times_s: list[float] = field(default_factory=list)
    sizes: dict[str, list[int]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    live: dict[str, list[int]] = field(default_factory=lambda: {"prefill": [], "decode": []})

    def run_until(self, end_s: float) -> None:
        next_s = self.site.now_s
        while self.site.now_s < end_s:
            self.site.step(STEP_S)
            if self.site.now_s >= next_s:
                next_s += EVERY_S
                self.site.apply(self.planning.see(self.site.signals(EVERY_S)))
                self.times_s.append(self.site.now_s)
                for pool in self.site.pools:
                    self.sizes[pool.role.value].append(pool.desired)
                    self.live[pool.role.value].append(len(pool.serving(self.site.now_s)))

    def turns_s(self, pool: str) -> list[float]:
        """When the pool began to grow after it had shrunk, or to shrink after it had grown."""
        changes = [
            (at_s, new > old)
            for at_s, (old, new) in zip(self.times_s[1:], itertools.pairwise(self.sizes[pool]))
            if new != old
        ]
        return [at_s for (_, was), (at_s, now) in itertools.pairwise(changes) if was != now]

    def share_of_first_tokens_within(self, target_s: float, begin_s: float, end_s: float) -> float:
        """Of the requests that arrived in this time."""
        asked = [each for each in self.site.done if begin_s <= each.arrived_s < end_s]
        good = sum((each.first_token_s or 0) - each.arrived_s <= target_s for each in asked)
        return good / len(asked)

    def share_of_gaps_within(self, target_s: float, begin_s: float, end_s: float) -> float:
        gaps = [gap_s for at_s, gap_s in self.site.gaps if begin_s <= at_s < end_s]
        return sum(gap_s <= target_s for gap_s in gaps) / len(gaps)

    def size_at(self, pool: str, at_s: float) -> int:
        return self.sizes[pool][bisect.bisect(self.times_s, at_s) - 1]


@pytest.fixture(scope="module")
def course() -> Course:
    """From pools of the size that the first fifth needs."""
    last = Arrival(TRACE_S + SILENT_S, 1_000, 200)
    site = Site(SHAPE, itertools.chain(trace(FASTER), [last]))
    site.prefill.begin_with(2)
    site.decode.begin_with(4)
    whole = Course(site, Planning(CONFIG))
    whole.run_until(TRACE_S + SILENT_S + 120.0)
    return whole


def test_pools_follow_the_load_up_and_down_within_their_bounds(course: Course) -> None:
    """At the end of each fifth; the busiest are 5.5 workers' worth of prompts, and 9 of tokens."""
    at_s = [TRACE_S * fifth / 5 for fifth in (1, 2, 3, 4, 5)]
    prefill = [course.size_at("prefill", end_s) for end_s in at_s]
    decode = [course.size_at("decode", end_s) for end_s in at_s]
    for sizes in (prefill, decode):
        low, high, lower, higher, end = sizes
        assert low < high > lower < higher > end
    assert max(course.sizes["prefill"]) <= 8
    assert max(course.sizes["decode"]) <= 11


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_no_pool_turns_twice_within_a_stable_window(course: Course, pool: str) -> None:
    turns_s = course.turns_s(pool)
    assert turns_s, "it does follow the load"
    for one_s, next_s in itertools.pairwise(turns_s):
        assert next_s - one_s > CONFIG.stable_window_s


def test_targets_are_met_but_for_the_minutes_in_which_workers_are_still_to_come(
    course: Course,
) -> None:
    """98% of first tokens and of gaps, but for 240 s after the load has more than tripled, which
    is a worker's start and what has waited meanwhile; 75% with these."""
    ttft_s, itl_s = CONFIG.ttft_target_s, CONFIG.itl_target_s
    step_s = TRACE_S / 5
    for begin_s, end_s in (
        (0.0, step_s),
        (step_s + 240.0, 3 * step_s),
        (3 * step_s + 240.0, TRACE_S),
    ):
        assert course.share_of_first_tokens_within(ttft_s, begin_s, end_s) >= 0.98
        assert course.share_of_gaps_within(itl_s, begin_s, end_s) >= 0.98
    assert course.share_of_first_tokens_within(ttft_s, 0.0, TRACE_S) >= 0.75
    assert course.share_of_gaps_within(itl_s, 0.0, TRACE_S) >= 0.75


def test_both_pools_stop_together_when_idle_and_start_together_for_the_next_request(
    course: Course,
) -> None:
    stopped = [size == 0 for size in course.sizes["prefill"]]
    assert stopped == [size == 0 for size in course.sizes["decode"]]
    idle_s = course.times_s[stopped.index(True)] - TRACE_S
    assert CONFIG.scale_to_zero_after_s is not None
    assert 0 <= idle_s - CONFIG.scale_to_zero_after_s <= 30.0
    assert stopped[-1] is False
    assert course.site.done[-1].arrived_s == TRACE_S + SILENT_S


def test_every_request_is_answered(course: Course) -> None:
    asked = sum(1 for _ in trace(FASTER)) + 1
    assert len(course.site.done) == asked
    assert not course.site.queue
    assert not any(worker.streams for worker in course.site.decode.workers)
