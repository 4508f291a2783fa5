"""How one unit takes the place of another.

`next_step` is pure: it looks at the spec, the units and the time, and says what each unit is to be
now. It remembers nothing. What a rollout has reached is written on the units' RayClusters
(`Record`), so an operator that was cut off anywhere goes on by asking again.

                 nothing is there
                       |
                    Making
                       |                 spec asks for another unit
                    Serving -----------------------------------------> Draining (Recreate)
                       |                                                  | no worker is left
                       | (RollingUpdate)                                Ending
                       v                                                  | no pod is left
        +---------> Growing: the coming unit gets the step's workers    Making
        |              | they are live
        |              v
        |          Shifting: it has the step's share of the requests, and is watched
        | interval     |            |                  \\
        | is over      |            | pause: true       \\ not ready in time, fails, is slow
        +--------------+          Paused                 v
                       | the last step              Reverting: requests are back, it goes
                       v                                 | it is gone
                   Retiring: the former unit             v
                   runs its last streams             Reverted: until the spec changes again
                       | it is gone
                       v
                    Serving

A unit that the spec no longer asks for while another one serves is Replaced: it goes, then the
unit that the spec asks for comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from deploy.controller.units import Unit, difference


class State(StrEnum):
    MAKING = "Making"
    SERVING = "Serving"
    GROWING = "Growing"
    SHIFTING = "Shifting"
    PAUSED = "Paused"
    RETIRING = "Retiring"
    REVERTING = "Reverting"
    REVERTED = "Reverted"
    REPLACED = "Replaced"
    DRAINING = "Draining"
    ENDING = "Ending"


@dataclass(frozen=True)
class Strategy:
    """`spec.rollout`."""

    recreates: bool = False
    max_surge: int = 1
    """Workers that a pool may have beyond its size, over both units."""
    max_unavailable: int = 0
    """Live workers that a pool may lack meanwhile."""
    steps: Sequence[float] = (0.01, 0.1, 0.5, 1.0)
    """Shares of workers and requests, where the model changes. The last is 1."""
    interval_s: float = 300.0
    """How long a step is watched."""
    ready_timeout_s: float = 1800.0
    """A coming unit of which no further worker becomes live for so long goes back."""
    is_paused: bool = False
    min_requests: int = 10
    """In the last minute. A unit that ended fewer is not judged."""
    max_failures: float = 0.05
    """Share of failed requests that the coming unit may have beyond the former one's."""
    max_slowdown: float = 2.0
    """Its gap between tokens as a multiple of the former one's."""


@dataclass(frozen=True)
class PoolSeen:
    """One pool in one unit. `size`: workers asked for; `pods`: that stand; `live`: that serve."""

    size: int = 0
    pods: int = 0
    live: int = 0


@dataclass(frozen=True)
class Figures:
    """What became of one unit's requests in the last minute, over all routers."""

    num_ended: int = 0
    num_failed: int = 0
    itl_s: float | None = None
    """Median gap between tokens; None: none was seen."""
    num_active: int = 0
    """Requests that run now."""


@dataclass(frozen=True)
class Record:
    """What a unit's RayCluster remembers of its rollout."""

    share: float = 1.0
    """Of requests."""
    step: int = 0
    """Index of the step under way."""
    since_s: float = 0.0
    """When its share, or the number of its live workers, last rose. Seconds since 1970."""
    live: int = 0
    """Its live workers then."""
    refused: str = ""
    """Code of a unit that went back."""
    refused_why: str = ""


@dataclass(frozen=True)
class UnitSeen:
    unit: Unit
    made_at: str = ""
    """When its RayCluster was made, to the second; orders units."""
    record: Record = field(default_factory=Record)
    pools: Mapping[str, PoolSeen] = field(default_factory=dict)
    figures: Figures | None = None
    """None: no router has it yet."""
    is_ending: bool = False
    """The deletion of its RayCluster has begun."""

    @property
    def num_pods(self) -> int:
        return sum(pool.pods for pool in self.pools.values())


@dataclass(frozen=True)
class UnitPlan:
    """What a unit is to be now."""

    code: str
    sizes: Mapping[str, int]
    record: Record
    ends: bool = False
    """Its RayCluster is deleted."""
    is_leaving: bool = False
    """It is going away: it gets no new group, and its pods wait for no silent supervisor."""


@dataclass(frozen=True)
class Step:
    state: State
    reason: str
    plans: tuple[UnitPlan, ...] = ()
    """Of the units that there are, the oldest first, and of one that is to be made."""
    routes: tuple[tuple[str, float], ...] = ()
    """Codes of units and their shares of the requests, the oldest first. Empty: as it was."""

    @property
    def unit(self) -> str:
        """The unit whose control service routers ask; empty: there is none."""
        return self.plans[0].code if self.plans else ""

    def plan(self, code: str) -> UnitPlan | None:
        return next((plan for plan in self.plans if plan.code == code), None)


def next_step(
    wanted: Unit | None,
    totals: Mapping[str, int],
    strategy: Strategy,
    units: Sequence[UnitSeen],
    num_left: int,
    max_timeout_s: float,
    now_s: float,
) -> Step:
    """`wanted`: None where the ServingCluster is deleted; `totals`: each pool's size over both
    units; `num_left`: pods of units that have no RayCluster any more; `max_timeout_s`: the longest
    time that a request may take."""
    units = sorted(units, key=lambda each: (each.made_at, -each.record.share, each.unit.code))
    if wanted is None:
        return _leave(units, "the ServingCluster is deleted", num_left)
    staying = [each for each in units if not each.is_ending]
    if not staying:
        return _make_first(wanted, totals, units, num_left, now_s)
    if len(staying) == 1:
        is_settled = len(units) == 1 and not num_left
        step = _alone(wanted, totals, strategy, staying[0], is_settled, now_s)
    else:
        step = _together(wanted, totals, strategy, staying[0], staying[-1], max_timeout_s, now_s)
    return _with_ending(step, units)


# --- no unit, or none that stays ------------------------------------------------------------------


def _leave(units: Sequence[UnitSeen], why: str, num_left: int) -> Step:
    if not units:
        left = f"{num_left} pods are left" if num_left else "no unit is left"
        return Step(State.ENDING, f"{why}, and {left}")
    num_pods = sum(each.num_pods for each in units)
    state = State.DRAINING if num_pods else State.ENDING
    told = f"{num_pods} worker pods drain" if num_pods else "no worker is left"
    return Step(state, f"{why}: {told}", tuple(_leaving(each) for each in units))


def _make_first(
    wanted: Unit, totals: Mapping[str, int], units: Sequence[UnitSeen], num_left: int,
    now_s: float,
) -> Step:  # fmt: skip
    routes = ((wanted.code, 1.0),)
    if units:
        names = ", ".join(each.unit.code for each in units)
        told = f"the RayCluster of unit {names} is being deleted"
        return Step(State.ENDING, told, tuple(_leaving(each) for each in units), routes)
    if num_left:
        return Step(State.ENDING, f"{num_left} pods of a former unit are left", routes=routes)
    plan = UnitPlan(wanted.code, totals, Record(since_s=now_s))
    return Step(State.MAKING, f"there is no unit: {wanted.code} is made", (plan,), routes)


def _leaving(seen: UnitSeen) -> UnitPlan:
    """It goes once its workers have drained."""
    sizes = dict.fromkeys(seen.pools, 0)
    ends = seen.is_ending or not seen.num_pods
    return UnitPlan(seen.unit.code, sizes, seen.record, ends=ends, is_leaving=True)


def _with_ending(step: Step, units: Sequence[UnitSeen]) -> Step:
    """RayClusters that are being deleted stay so."""
    ending = tuple(_leaving(each) for each in units if each.is_ending)
    return replace(step, plans=(*step.plans, *ending))


# --- one unit that stays --------------------------------------------------------------------------


def _alone(
    wanted: Unit,
    totals: Mapping[str, int],
    strategy: Strategy,
    seen: UnitSeen,
    is_settled: bool,
    now_s: float,
) -> Step:
    """`is_settled`: nothing of another unit is left."""
    code, why = seen.unit.code, difference(seen.unit, wanted)
    routes = ((code, 1.0),)
    record = replace(seen.record, share=1.0)
    stays = UnitPlan(code, totals, record)
    if not why:
        kept = replace(stays, record=replace(record, refused="", refused_why=""))
        return Step(State.SERVING, "the unit is what the spec asks for", (kept,), routes)
    if record.refused == wanted.code and not strategy.recreates:
        told = f"unit {wanted.code} went back: {record.refused_why}; change the spec to try again"
        return Step(State.REVERTED, told, (stays,), routes)
    if must_recreate(strategy, totals):
        state = State.DRAINING if seen.num_pods else State.ENDING
        told = f"{seen.num_pods} worker pods of unit {code} drain" if seen.num_pods else "it goes"
        return Step(state, f"{why}: {told}", (_leaving(seen),), ((wanted.code, 1.0),))
    if not is_settled:
        return Step(State.REPLACED, "pods of another unit are left", (stays,), routes)
    coming = UnitPlan(wanted.code, dict.fromkeys(totals, 0), Record(share=0.0, since_s=now_s))
    told = f"{why}: unit {wanted.code} is made beside unit {code}"
    return Step(State.GROWING, told, (stays, coming), (*routes, (wanted.code, 0.0)))


def must_recreate(strategy: Strategy, totals: Mapping[str, int]) -> bool:
    """Whether a unit would lack a pool beside the other one: there is no room for both."""
    sizes = [total for total in totals.values() if total]
    has_no_room = strategy.max_surge == 0 and any(n <= strategy.max_unavailable for n in sizes)
    return strategy.recreates or not sizes or has_no_room


# --- two units ------------------------------------------------------------------------------------


def _together(
    wanted: Unit,
    totals: Mapping[str, int],
    strategy: Strategy,
    former: UnitSeen,
    coming: UnitSeen,
    max_timeout_s: float,
    now_s: float,
) -> Step:
    code, former_code = coming.unit.code, former.unit.code
    if not any(totals.values()):
        told = f"all pools are scaled to zero: unit {former_code} goes"
        stays = UnitPlan(code, totals, replace(coming.record, share=1.0, refused=""))
        return Step(State.RETIRING, told, (_leaving(former), stays), ((code, 1.0),))
    if difference(coming.unit, wanted):
        is_former = not difference(former.unit, wanted)
        told = f"the spec asks for unit {former_code if is_former else wanted.code}"
        former = replace(former, record=replace(former.record, refused="", refused_why=""))
        return _revert(State.REPLACED, told, totals, strategy, former, coming, now_s)
    if former.record.refused == code:
        why = former.record.refused_why
        return _revert(State.REVERTING, why, totals, strategy, former, coming, now_s)
    why = _failure(totals, strategy, former, coming, now_s)
    if why:
        refused = replace(former.record, refused=code, refused_why=why)
        former = replace(former, record=refused)
        return _revert(State.REVERTING, why, totals, strategy, former, coming, now_s)
    return _advance(totals, strategy, former, coming, max_timeout_s, now_s)


def _revert(
    state: State,
    why: str,
    totals: Mapping[str, int],
    strategy: Strategy,
    former: UnitSeen,
    coming: UnitSeen,
    now_s: float,
) -> Step:
    """Requests go back at once, workers as the former unit's become live."""
    of_former, of_coming = {}, {}
    for name, size in totals.items():
        was, comes = _seen(former, name), _seen(coming, name)
        of_former[name] = max(was.size, min(size, size + strategy.max_surge - comes.pods))
        needed = max(0, size - strategy.max_unavailable - was.live)
        of_coming[name] = min(comes.size, needed)
    leaves = not any(of_coming.values())
    plans = (
        UnitPlan(former.unit.code, of_former, replace(former.record, share=1.0)),
        UnitPlan(
            coming.unit.code,
            of_coming,
            _begun_anew(coming.record, now_s),
            ends=leaves and not coming.num_pods,
            is_leaving=leaves,
        ),
    )
    routes = ((former.unit.code, 1.0), (coming.unit.code, 0.0))
    return Step(state, f"{why}: unit {coming.unit.code} goes", plans, routes)


def _begun_anew(record: Record, now_s: float) -> Record:
    """Should the spec ask for the unit again before it has gone."""
    has_begun = record.share or record.step or record.live
    return Record(share=0.0, since_s=now_s if has_begun else record.since_s)


def _advance(
    totals: Mapping[str, int],
    strategy: Strategy,
    former: UnitSeen,
    coming: UnitSeen,
    max_timeout_s: float,
    now_s: float,
) -> Step:
    record, code = coming.record, coming.unit.code
    steps = _steps(strategy, former, coming)
    index = min(record.step, len(steps) - 1)
    target = steps[index]
    live = sum(pool.live for pool in coming.pools.values())
    if live > record.live:
        record = replace(record, live=live, since_s=now_s)
    missing = _missing(totals, target, strategy, coming)
    state, told = State.GROWING, f"unit {code} gets ready for {target:.0%}: {missing}"
    if missing and record.share < target:
        if len(steps) == 1 and coming.figures is not None:
            record = replace(record, share=max(record.share, _live_share(totals, former, coming)))
    elif record.share < target:
        state, record = State.SHIFTING, replace(record, share=target, since_s=now_s, live=live)
        told = f"unit {code} gets {target:.0%} of the requests"
    elif target < 1.0 and strategy.is_paused:
        state, told = State.PAUSED, f"paused with {target:.0%} of the requests at unit {code}"
    elif target < 1.0 and now_s - record.since_s >= strategy.interval_s:
        record = replace(record, step=index + 1, since_s=now_s, live=live)
        told = f"unit {code} gets its workers for {steps[index + 1]:.0%}"
    elif target < 1.0:
        state, told = State.SHIFTING, f"unit {code} has {target:.0%} of the requests"
    else:
        return _retire(totals, strategy, former, coming, record, max_timeout_s, now_s)
    sizes = _sizes(totals, target, strategy, former, coming, keeps_former=True)
    return _both(state, told, sizes, former, coming, record)


def _retire(
    totals: Mapping[str, int],
    strategy: Strategy,
    former: UnitSeen,
    coming: UnitSeen,
    record: Record,
    max_timeout_s: float,
    now_s: float,
) -> Step:
    """The coming unit has all requests. The former keeps a worker of each pool for its streams."""
    num_active = former.figures.num_active if former.figures is not None else 0
    spent_s = now_s - record.since_s
    keeps = bool(num_active) and spent_s < max_timeout_s
    # Routers hear of the last share within seconds: streams of the moment before count, too.
    keeps = keeps or spent_s < _ROUTERS_HEAR_S
    sizes = _sizes(totals, 1.0, strategy, former, coming, keeps_former=keeps)
    told = f"unit {former.unit.code} runs its last {num_active} requests"
    step = _both(State.RETIRING, told, sizes, former, coming, record)
    if keeps or any(sizes[0].values()):
        return step
    told = f"unit {former.unit.code} goes: nothing runs there"
    return replace(step, reason=told, plans=(_leaving(former), step.plans[1]))


_ROUTERS_HEAR_S = 10.0


def _both(
    state: State,
    told: str,
    sizes: tuple[Mapping[str, int], Mapping[str, int]],
    former: UnitSeen,
    coming: UnitSeen,
    record: Record,
) -> Step:
    kept = replace(former.record, share=1.0 - record.share)
    plans = (
        UnitPlan(former.unit.code, sizes[0], kept),
        UnitPlan(coming.unit.code, sizes[1], record),
    )
    routes = ((former.unit.code, 1.0 - record.share), (coming.unit.code, record.share))
    return Step(state, told, plans, routes)


# --- how many workers each unit has ---------------------------------------------------------------


def _sizes(
    totals: Mapping[str, int],
    target: float,
    strategy: Strategy,
    former: UnitSeen,
    coming: UnitSeen,
    *,
    keeps_former: bool,
) -> tuple[dict[str, int], dict[str, int]]:
    """Of the former and the coming unit. `keeps_former`: it serves, or runs streams still."""
    of_former, of_coming = {}, {}
    for name, total in totals.items():
        was, comes = _seen(former, name), _seen(coming, name)
        if name not in former.unit.pools:  # a pool that came with the coming unit
            of_former[name], of_coming[name] = 0, total
            continue
        goal = math.ceil(total * target)
        room = total + strategy.max_surge - was.pods
        grown = max(0, min(goal, room))
        needed = total - strategy.max_unavailable - was.live
        of_coming[name] = max(grown, min(comes.size, max(goal, needed)))
        least = 1 if keeps_former and total else 0
        stays = max(total - goal, total - strategy.max_unavailable - comes.live, least)
        of_former[name] = min(total, stays)
    return of_former, of_coming


def _need(total: int, target: float, strategy: Strategy) -> int:
    """Live workers of a pool that a step's share of the requests needs."""
    if not total:
        return 0
    return max(1, min(math.ceil(total * target), total - strategy.max_unavailable))


def _live_share(totals: Mapping[str, int], former: UnitSeen, coming: UnitSeen) -> float:
    """Of requests that the coming unit's live workers can take, as its scarcest pool says."""
    shares = [
        _ratio(_seen(coming, name).live, _seen(former, name).live)
        for name, total in totals.items()
        if total
    ]
    return math.floor(100 * min(shares, default=0.0)) / 100


def _ratio(live: int, other: int) -> float:
    return live / (live + other) if live else 0.0


def _seen(unit: UnitSeen, pool: str) -> PoolSeen:
    return unit.pools.get(pool, PoolSeen())


# --- whether the coming unit goes back ------------------------------------------------------------


def _failure(
    totals: Mapping[str, int],
    strategy: Strategy,
    former: UnitSeen,
    coming: UnitSeen,
    now_s: float,
) -> str:
    """Why the coming unit goes back; empty: it does not."""
    record, steps = coming.record, _steps(strategy, former, coming)
    target = steps[min(record.step, len(steps) - 1)]
    missing = _missing(totals, target, strategy, coming) if record.share < target else ""
    live = sum(pool.live for pool in coming.pools.values())
    if missing and live <= record.live and now_s - record.since_s > strategy.ready_timeout_s:
        return f"nothing more became ready in {strategy.ready_timeout_s:g} s: {missing}"
    return judge(former.figures, coming.figures, strategy)


def _steps(strategy: Strategy, former: UnitSeen, coming: UnitSeen) -> Sequence[float]:
    """Where the model stays, requests follow the workers that are live."""
    return strategy.steps if former.unit.model != coming.unit.model else (1.0,)


def _missing(totals: Mapping[str, int], target: float, strategy: Strategy, coming: UnitSeen) -> str:
    """What the coming unit lacks for a step's share of the requests; empty: nothing."""
    needs = {name: _need(total, target, strategy) for name, total in totals.items()}
    live = {name: _seen(coming, name).live for name in totals}
    late = [f"{name} {live[name]}/{need} live" for name, need in needs.items() if live[name] < need]
    if not late and coming.figures is None:
        return "no router has read its tokenizer yet"
    return ", ".join(late)


def judge(former: Figures | None, coming: Figures | None, strategy: Strategy) -> str:
    """Why the coming unit is worse than the former one, by what became of their requests in the
    last minute; empty: it is not.

    - Failures: it fails `max_failures` more of its requests than the former one does.
    - Gaps: its median gap between tokens is `max_slowdown` times the former one's.

    A unit that ended fewer than `min_requests` is not judged, nor compared with.
    """
    if coming is None or coming.num_ended < strategy.min_requests:
        return ""
    is_known = former is not None and former.num_ended >= strategy.min_requests
    usual = former.num_failed / former.num_ended if former is not None and is_known else 0.0
    failed = coming.num_failed / coming.num_ended
    if failed > usual + strategy.max_failures:
        return f"{failed:.0%} of its requests fail, {usual:.0%} of the former unit's"
    usual_s = former.itl_s if former is not None and is_known else None
    if usual_s and coming.itl_s and coming.itl_s > strategy.max_slowdown * usual_s:
        ratio = coming.itl_s / usual_s
        return f"its gaps between tokens are {ratio:.1f} times the former unit's"
    return ""


def total(figures: Iterable[Figures]) -> Figures | None:
    """Of one unit, over its routers. None: no router reports."""
    parts = list(figures)
    if not parts:
        return None
    gaps = sorted(each.itl_s for each in parts if each.itl_s is not None)
    return Figures(
        sum(each.num_ended for each in parts),
        sum(each.num_failed for each in parts),
        gaps[len(gaps) // 2] if gaps else None,
        sum(each.num_active for each in parts),
    )
