"""What holds of every plan, whatever the signals."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.planner import PlannerConfig
from baton.fleet import Role, WorkerState
from cluster.planner.measure import measure_pool
from cluster.planner.needs import PlannerState, PoolMemory
from cluster.planner.planner import Plan, decide
from cluster.planner.signals import (
    PoolGaps,
    PoolSignals,
    QueueSignals,
    RouterSignals,
    Signals,
    WorkerSignals,
)
from cluster.planner.sizing import Pool, Size, keep_ratio
from cluster.role_plan import RolePlan
from tests.cluster.planner.moments import decode_pool, prefill_pool, router

NOW_S = 1_000.0
_STATES = (WorkerState.STARTING, WorkerState.LIVE, WorkerState.DRAINING)
MAX_REPLICAS = 12


SEEDS = st.integers(0, 2**32)
"""Signals are made of a seed: drawn field by field they would take most of the time."""


def made_worker(rng: random.Random) -> WorkerSignals:
    return WorkerSignals(
        worker_id="worker",
        state=rng.choice([WorkerState.LIVE, *_STATES]),
        live_since_s=rng.choice([None, NOW_S - 1, 0.0]),
        measured_at_s=rng.choice([None, 0.0, NOW_S - 1, NOW_S]),
        num_streams=rng.choice([0, rng.randrange(100)]),
        max_streams=64,
        kv_use=rng.choice([0.0, 1.0, rng.random()]),
        num_queued_tokens=rng.choice([0, rng.randrange(50_000)]),
        prefill_tokens_per_s=rng.choice([None, 900.0, 1_100.0, 5_000.0]),
        itl_s=rng.choice([None, 0.001, 0.03, 0.2]),
    )


def made_queue(rng: random.Random) -> QueueSignals:
    if rng.random() < 0.5:
        return QueueSignals()
    median_s, oldest_s = sorted((100 * rng.random(), 100 * rng.random()))
    return QueueSignals(rng.randrange(1_000), rng.randrange(1_000_000), oldest_s, median_s)


def made_router(rng: random.Random) -> RouterSignals:
    return RouterSignals(
        router_id="router",
        measured_at_s=rng.choice([None, 0.0, NOW_S, NOW_S]),
        requests_per_s=rng.choice([0.0, 100 * rng.random()]),
        uncached_tokens_per_s=rng.choice([0.0, 50_000 * rng.random()]),
        output_tokens=rng.choice([None, 1.0, 300.0]),
        num_held=rng.choice([0, 0, 3]),
        waiting_for_prefill=made_queue(rng),
        waiting_for_decode=made_queue(rng),
        gaps=tuple(
            PoolGaps(f"{role.value}-{number}", rng.choice([5, 500]), rng.choice([0.01, 0.06, 0.3]))
            for role in (Role.DECODE, Role.MIXED)
            for number in range(rng.randrange(4))
        ),
    )


def made_pool(rng: random.Random, role: Role, number: int) -> PoolSignals:
    min_replicas = rng.choice([0, 0, 1, 3])
    return PoolSignals(
        name=f"{role.value}-{number}",
        role=role,
        desired_replicas=rng.choice([0, rng.randrange(MAX_REPLICAS + 2)]),
        max_replicas=rng.randint(max(1, min_replicas), MAX_REPLICAS),
        min_replicas=min_replicas,
        num_pending=rng.randrange(3),
        workers=tuple(made_worker(rng) for _ in range(rng.randrange(7))),
        role_plan=RolePlan(rng.randrange(4), rng.randrange(4)),
    )


def made_moment(seed: int, roles: tuple[Role, ...] = ()) -> Signals:
    rng = random.Random(seed)
    of_pools = roles or rng.choices(list(Role), k=rng.randint(1, 4))
    return Signals(
        NOW_S,
        tuple(made_pool(rng, role, number) for number, role in enumerate(of_pools)),
        tuple(made_router(rng) for _ in range(rng.choice([0, 1, 1, 1, 3]))),
    )


def made_config(seed: int) -> PlannerConfig:
    rng = random.Random(seed)
    low, high = sorted(rng.choices([0.25, 0.5, 1.0, 2.0, 3.0], k=2))
    return PlannerConfig(
        panic_window_s=150.0,  # so that two calls make a stable window
        scale_to_zero_after_s=rng.choice([None, 300.0]),
        max_step_out=rng.randint(1, 20),
        max_step_in=rng.randint(1, 20),
        scale_in_hold_s=rng.choice([0.0, 60.0]),
        min_prefill_per_decode=rng.choice([None, low]),
        max_prefill_per_decode=rng.choice([None, high]),
    )


MOMENTS = SEEDS.map(made_moment)
PAIRS = SEEDS.map(lambda seed: made_moment(seed, (Role.PREFILL, Role.DECODE)))
CONFIGS = SEEDS.map(made_config)
MANY = settings(max_examples=60, deadline=None)


def shifted(signals: Signals, by_s: float) -> Signals:
    """The same moment at another time."""
    return Signals(
        signals.now_s + by_s,
        tuple(
            replace(
                pool,
                workers=tuple(
                    replace(
                        worker,
                        measured_at_s=_plus(worker.measured_at_s, by_s),
                        live_since_s=_plus(worker.live_since_s, by_s),
                    )
                    for worker in pool.workers
                ),
            )
            for pool in signals.pools
        ),
        tuple(
            replace(router, measured_at_s=_plus(router.measured_at_s, by_s))
            for router in signals.routers
        ),
    )


def _plus(at_s: float | None, by_s: float) -> float | None:
    return None if at_s is None else at_s + by_s


def planned(signals: Signals, config: PlannerConfig) -> tuple[PlannerState, Plan]:
    """After a stable window of the same."""
    state, _ = decide(PlannerState(), shifted(signals, -300.0), config)
    state, _ = decide(state, shifted(signals, -150.0), config)
    return decide(state, signals, config)


def sizes(plan: Plan) -> dict[str, int]:
    return {name: pool.desired_replicas for name, pool in plan.items()}


@MANY
@given(MOMENTS, CONFIGS)
def test_sizes_are_within_the_bounds_or_all_zero(signals: Signals, config: PlannerConfig) -> None:
    plan = sizes(planned(signals, config)[1])
    if any(plan.values()) or any(pool.min_replicas for pool in signals.pools):
        for pool in signals.pools:
            assert max(1, pool.min_replicas) <= plan[pool.name] <= pool.max_replicas


@MANY
@given(MOMENTS, CONFIGS)
def test_roles_are_of_workers_that_there_are(signals: Signals, config: PlannerConfig) -> None:
    plan = planned(signals, config)[1]
    for pool in signals.pools:
        roles, size = plan[pool.name].role_plan, plan[pool.name].desired_replicas
        assert (roles is None) == (pool.role is not Role.MIXED)
        num_live = sum(worker.state is WorkerState.LIVE for worker in pool.workers)
        if roles is not None:
            assert roles.prefill >= 0
            assert roles.decode >= 0
            num_workers = min(size, num_live)
            assert roles.prefill + roles.decode <= num_workers
            if roles != pool.role_plan:
                assert num_workers - roles.prefill >= min(num_workers, streams_need(pool))


def streams_need(pool: PoolSignals) -> int:
    """Workers that hold what runs at workers of which it is known."""
    heard = [
        worker
        for worker in pool.workers
        if worker.state is WorkerState.LIVE and (worker.measured_at_s or 0.0) >= NOW_S - 1
    ]
    fill = math.fsum(
        max(worker.kv_use, worker.num_streams / worker.max_streams) for worker in heard
    )
    return math.ceil(fill - 1e-9)


@MANY
@given(PAIRS, CONFIGS)
def test_the_ratio_is_kept_wherever_the_pools_bounds_allow_it(
    signals: Signals, config: PlannerConfig
) -> None:
    plan = sizes(planned(signals, config)[1])
    prefill, decode = signals.pools
    low = config.min_prefill_per_decode or 0.0
    high = config.max_prefill_per_decode or math.inf

    def keeps(num_prefill: int, num_decode: int) -> bool:
        return low * num_decode <= num_prefill <= high * num_decode

    allowed = [
        range(max(1, pool.min_replicas), pool.max_replicas + 1) for pool in (prefill, decode)
    ]
    if any(plan.values()) and any(keeps(p, d) for p in allowed[0] for d in allowed[1]):
        assert keeps(plan[prefill.name], plan[decode.name])


@st.composite
def sized_pools(draw: st.DrawFn, role: Role) -> tuple[Pool, Size]:
    """A pool of this role, with a size by its own load."""
    most = draw(st.integers(1, 25))
    signals = PoolSignals(role.value, role, 1, most, min_replicas=draw(st.integers(0, most)))
    measure = measure_pool(signals, Signals(NOW_S, (signals,), ()), PlannerConfig())
    pool = Pool(signals, measure, PoolMemory(), is_known=True, words="")
    allowed = st.integers(pool.floor, most)
    return pool, Size(draw(allowed), draw(allowed), "")


def best_fit(
    prefill: tuple[Pool, Size], decode: tuple[Pool, Size], config: PlannerConfig
) -> tuple[int, int]:
    """What `keep_ratio` promises, by trying every size of both pools."""
    low = config.min_prefill_per_decode or 0.0
    high = config.max_prefill_per_decode or math.inf

    def cost(sizes: tuple[int, int]) -> tuple[int, ...]:
        (p, d), (present_p, present_d) = sizes, present
        least_p, least_d = (min(size.goal, size.replicas) for _, size in (prefill, decode))
        if least_p <= p <= present_p and least_d <= d <= present_d:
            return 0, -d, -p
        return 1, -min(p, present_p), -min(d, present_d), p, d

    present = prefill[1].replicas, decode[1].replicas
    allowed = [range(pool.floor, pool.signals.max_replicas + 1) for pool, _ in (prefill, decode)]
    keep = [
        (p, d) for p, d in itertools.product(*allowed) if low * d - 1e-9 <= p <= high * d + 1e-9
    ]
    return present if present in keep else min(keep, key=cost, default=present)


RATIOS = st.none() | st.floats(0.05, 20) | st.sampled_from([1 / 3, 0.1, 3.0, 1e308])


@settings(max_examples=500, deadline=None)
@given(sized_pools(Role.PREFILL), sized_pools(Role.DECODE), RATIOS, RATIOS)
def test_the_sizes_that_keep_the_ratio_are_the_best_of_all(
    prefill: tuple[Pool, Size], decode: tuple[Pool, Size], low: float | None, high: float | None
) -> None:
    if low is not None and high is not None:
        low, high = sorted((low, high))
    config = PlannerConfig(min_prefill_per_decode=low, max_prefill_per_decode=high)
    by_load = {pool.name: size for pool, size in (prefill, decode)}
    kept = keep_ratio([prefill[0], decode[0]], by_load, config)
    found = kept["prefill"].replicas, kept["decode"].replicas
    assert found == best_fit(prefill, decode, config)


@MANY
@given(PAIRS, PAIRS, CONFIGS)
def test_the_same_signals_twice_change_nothing_the_second_time(
    before: Signals, signals: Signals, config: PlannerConfig
) -> None:
    state, _ = planned(shifted(before, -5.0), config)
    state, first = decide(state, signals, config)
    again_state, again = decide(state, signals, config)
    assert again == first
    assert again_state == state


@MANY
@given(PAIRS, CONFIGS)
def test_a_plan_that_came_true_is_not_followed_by_another_at_once(
    signals: Signals, config: PlannerConfig
) -> None:
    state, first = planned(signals, config)
    applied = replace(
        signals,
        pools=tuple(
            replace(pool, desired_replicas=first[pool.name].desired_replicas)
            for pool in signals.pools
        ),
    )
    assert sizes(decide(state, applied, config)[1]) == sizes(first)


@MANY
@given(MOMENTS, CONFIGS, st.randoms())
def test_the_order_of_pools_workers_and_routers_changes_nothing(
    signals: Signals, config: PlannerConfig, order: random.Random
) -> None:
    pools = [
        replace(pool, workers=tuple(order.sample(pool.workers, len(pool.workers))))
        for pool in signals.pools
    ]
    shuffled = Signals(
        signals.now_s,
        tuple(order.sample(pools, len(pools))),
        tuple(order.sample(signals.routers, len(signals.routers))),
    )
    assert planned(shuffled, config)[1] == planned(signals, config)[1]


def times(signals: Signals, factor: int) -> Signals:
    """So many times the load, of the same kind."""

    def queue(of: QueueSignals) -> QueueSignals:
        return replace(of, num_requests=factor * of.num_requests, num_tokens=factor * of.num_tokens)

    return replace(
        signals,
        pools=tuple(
            replace(
                pool,
                workers=tuple(
                    replace(
                        worker,
                        num_streams=factor * worker.num_streams,
                        num_queued_tokens=factor * worker.num_queued_tokens,
                        kv_use=min(1.0, factor * worker.kv_use),
                    )
                    for worker in pool.workers
                ),
            )
            for pool in signals.pools
        ),
        routers=tuple(
            replace(
                router,
                requests_per_s=factor * router.requests_per_s,
                uncached_tokens_per_s=factor * router.uncached_tokens_per_s,
                num_held=factor * router.num_held,
                waiting_for_prefill=queue(router.waiting_for_prefill),
                waiting_for_decode=queue(router.waiting_for_decode),
            )
            for router in signals.routers
        ),
    )


@MANY
@given(MOMENTS, CONFIGS, st.integers(2, 5))
def test_more_load_never_means_fewer_workers(
    signals: Signals, config: PlannerConfig, factor: int
) -> None:
    """Of a role: where the ratio bounds them, its pools may share what is left in another way."""
    less = sizes(planned(signals, config)[1])
    more = sizes(planned(times(signals, factor), config)[1])
    for role in Role:
        names = [pool.name for pool in signals.pools if pool.role is role]
        assert sum(more[name] for name in names) >= sum(less[name] for name in names)


@MANY
@given(MOMENTS, CONFIGS, SEEDS)
def test_old_figures_of_a_worker_change_nothing(
    signals: Signals, config: PlannerConfig, seed: int
) -> None:
    old = NOW_S - 1_000.0

    def with_old(figures: WorkerSignals) -> Signals:
        silent = replace(figures, state=WorkerState.LIVE, live_since_s=old, measured_at_s=old)
        first, *rest = signals.pools
        return replace(signals, pools=(replace(first, workers=(*first.workers, silent)), *rest))

    reported = planned(with_old(made_worker(random.Random(seed))), config)[1]
    assert reported == planned(with_old(WorkerSignals("worker")), config)[1]


@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_no_pool_shrinks_within_a_stable_window_after_it_grew(seed: int) -> None:
    """Whatever the load does; what is planned comes true at once."""
    rng = random.Random(seed)
    config = PlannerConfig(stable_window_s=60.0, scale_in_hold_s=0.0, max_step_in=20)
    state, sizes, grew_at_s = PlannerState(), {"prefill": 1, "decode": 1}, dict[str, float]()
    level = 0.0
    for now_s in range(0, 600, 5):
        level = rng.choice([level, level, level, rng.uniform(0, 8)])
        load = level * rng.uniform(0.7, 1.3)
        seen = router(float(now_s), tokens_per_s=1_000 * load)
        fill = min(load, sizes["decode"])
        pools = (
            prefill_pool(float(now_s), sizes["prefill"]),
            decode_pool(float(now_s), sizes["decode"], streams=round(20 * fill), fill=fill),
        )
        state, plan = decide(state, Signals(float(now_s), pools, (seen,)), config)
        for name, former in sizes.items():
            size = plan[name].desired_replicas
            if size > former:
                grew_at_s[name] = now_s
            elif size < former:
                assert now_s - grew_at_s[name] >= config.stable_window_s
            sizes[name] = size
