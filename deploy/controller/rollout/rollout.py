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
                   runs its last streams,            Reverted: until the spec changes again
                   then goes (Stranded: the
                   coming one has died)
                       | it is gone
                       v
                    Serving

A unit that the spec no longer asks for while another one serves is Replaced: it goes, then the
unit that the spec asks for comes.

The former unit's record says that it goes (`Record.goes`) a look before it loses a worker. From
then on nothing goes back, unless the coming unit is Stranded and the spec asks for another: then
the former unit stays, if it still serves. Requests only ever go to a unit that serves while the
other one does not (`_to_live`), whatever shares the step has planned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deploy.api.serving_cluster import UnitRollout
from deploy.api.status import State
from deploy.controller.rollout.units import Unit, difference

_ROUTERS_HEAR_S = 10.0
_MIN_REQUESTS = 10
"""A unit that ended fewer requests in the last minute is not judged."""
_CLEARLY_FAILED = 3
_SLOW_AGAIN_S = 15.0
"""Between two looks that compare gaps. Within a minute the former unit has no figures any more,
where the coming one got all requests at once."""
_LIKE_LOAD = 1.25


@dataclass(frozen=True)
class PoolSeen:
    """One pool in one unit. `size`: workers asked for; `pods`: without lost ones; `live`: workers
    that serve."""

    size: int = 0
    pods: int = 0
    live: int = 0
    role: str = ""


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
    """The unit's share of the requests."""
    step: int = 0
    """Index of the step under way."""
    since_s: float = 0.0
    """When its share, or the number of its live workers, last rose. Seconds since 1970."""
    live: int = 0
    """How many live workers the unit had then."""
    slow_since_s: float = 0.0
    """When its gaps were first seen too long, and at no look since then short enough; 0: never."""
    goes: bool = False
    """Whether it makes way for the coming unit: requests never come back to it then."""
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
    """Whether the deletion of its RayCluster has begun."""

    @property
    def num_pods(self) -> int:
        return sum(pool.pods for pool in self.pools.values())

    @property
    def num_live(self) -> int:
        return sum(pool.live for pool in self.pools.values())

    def pool(self, name: str) -> PoolSeen:
        return self.pools.get(name, PoolSeen())

    def serves(self, totals: Mapping[str, int]) -> bool:
        """Tell whether a worker of each role that is to have any is live."""
        wanted = [pool for name, pool in self.pools.items() if totals.get(name)]
        roles = {pool.role for pool in wanted}
        return bool(roles) and roles == {pool.role for pool in wanted if pool.live}


@dataclass(frozen=True)
class UnitPlan:
    """What a unit is to be now."""

    code: str
    sizes: Mapping[str, int]
    record: Record
    ends: bool = False
    """Whether its RayCluster is deleted."""
    is_leaving: bool = False
    """Whether it gets no new group, and its pods wait for no silent supervisor."""


@dataclass(frozen=True)
class Step:
    state: State
    reason: str
    plans: tuple[UnitPlan, ...] = ()
    """The plans of the units that there are, the oldest first, and of one to be made."""
    routes: tuple[tuple[str, float], ...] = ()
    """Codes of units and their shares of the requests, the oldest first. Empty: as it was."""

    @property
    def unit(self) -> str:
        """Return the unit whose control service routers ask; empty: there is none."""
        return self.plans[0].code if self.plans else ""


@dataclass(frozen=True)
class Situation:
    """What a step is decided from: the spec, the units and the time."""

    wanted: Unit | None
    """What the spec asks for; None: the ServingCluster is deleted."""
    totals: Mapping[str, int]
    """Each pool's size, over both units."""
    rollout: UnitRollout
    units: Sequence[UnitSeen]
    num_left: int
    """Pods of units that have no RayCluster any more."""
    now_s: float
    max_timeout_s: float
    """The longest time that a request may take."""


def next_step(now: Situation) -> Step:
    units = sorted(now.units, key=lambda each: (each.made_at, -each.record.share, each.unit.code))
    if now.wanted is None:
        return _leave(units, now.num_left)
    staying = [each for each in units if not each.is_ending]
    if not staying:
        return _make_first(now, now.wanted, units)
    if len(staying) == 1:
        step = _alone(now, now.wanted, staying[0])
    else:
        pair = staying[0], staying[-1]
        step = _to_live(_Pair(now, *pair).step(now.wanted), pair, now.totals)
    ending = tuple(_leaving(each) for each in units if each.is_ending)
    return replace(step, plans=(*step.plans, *ending))


# --- no unit, or none that stays ------------------------------------------------------------------


def _leave(units: Sequence[UnitSeen], num_left: int) -> Step:
    why = "the ServingCluster is deleted"
    if not units:
        left = f"{num_left} pods are left" if num_left else "no unit is left"
        return Step(State.ENDING, f"{why}, and {left}")
    num_pods = sum(each.num_pods for each in units)
    state = State.DRAINING if num_pods else State.ENDING
    left = f"{num_pods} worker pods drain" if num_pods else "no worker is left"
    return Step(state, f"{why}: {left}", tuple(_leaving(each) for each in units))


def _make_first(now: Situation, wanted: Unit, units: Sequence[UnitSeen]) -> Step:
    routes = ((wanted.code, 1.0),)
    if units:
        names = ", ".join(each.unit.code for each in units)
        reason = f"the RayCluster of unit {names} is being deleted"
        return Step(State.ENDING, reason, tuple(_leaving(each) for each in units), routes)
    if now.num_left:
        return Step(State.ENDING, f"{now.num_left} pods of a former unit are left", routes=routes)
    plan = UnitPlan(wanted.code, now.totals, Record(since_s=now.now_s))
    return Step(State.MAKING, f"there is no unit: {wanted.code} is made", (plan,), routes)


def _leaving(seen: UnitSeen) -> UnitPlan:
    """Return the plan of a unit that goes once its workers have drained."""
    sizes = dict.fromkeys(seen.pools, 0)
    ends = seen.is_ending or not seen.num_pods
    return UnitPlan(seen.unit.code, sizes, seen.record, ends=ends, is_leaving=True)


# --- one unit that stays --------------------------------------------------------------------------


def _alone(now: Situation, wanted: Unit, seen: UnitSeen) -> Step:
    code, why = seen.unit.code, difference(seen.unit, wanted)
    routes = ((code, 1.0),)
    record = replace(seen.record, share=1.0, goes=False)
    stays = UnitPlan(code, now.totals, record)
    if not why:
        kept = replace(stays, record=replace(record, refused="", refused_why=""))
        return Step(State.SERVING, "the unit is what the spec asks for", (kept,), routes)
    if record.refused == wanted.code and now.rollout.strategy != "Recreate":
        why = record.refused_why
        reason = f"unit {wanted.code} went back: {why}; change what makes a unit to try again"
        return Step(State.REVERTED, reason, (stays,), routes)
    if must_recreate(now.rollout, now.totals):
        state = State.DRAINING if seen.num_pods else State.ENDING
        left = f"{seen.num_pods} worker pods of unit {code} drain" if seen.num_pods else "it goes"
        return Step(state, f"{why}: {left}", (_leaving(seen),), ((wanted.code, 1.0),))
    if len(now.units) > 1 or now.num_left:
        return Step(State.REPLACED, "pods of another unit are left", (stays,), routes)
    record = Record(share=0.0, since_s=now.now_s)
    coming = UnitPlan(wanted.code, dict.fromkeys(now.totals, 0), record)
    reason = f"{why}: unit {wanted.code} is made beside unit {code}"
    return Step(State.GROWING, reason, (stays, coming), (*routes, (wanted.code, 0.0)))


def must_recreate(rollout: UnitRollout, totals: Mapping[str, int]) -> bool:
    """Tell whether a unit would lack a pool beside the other one: there is no room for both."""
    sizes = [size for size in totals.values() if size]
    has_no_room = rollout.max_surge == 0 and any(n <= rollout.max_unavailable for n in sizes)
    return rollout.strategy == "Recreate" or not sizes or has_no_room


# --- two units ------------------------------------------------------------------------------------


def _to_live(step: Step, pair: Iterable[UnitSeen], totals: Mapping[str, int]) -> Step:
    """Send all requests to the only unit that serves, if there is one. Where all pools are scaled
    to zero neither does, and requests wait for the newest."""
    serving = [each.unit.code for each in pair if each.serves(totals)]
    routes = tuple((code, float(code in serving)) for code, _ in step.routes)
    return replace(step, routes=routes) if len(serving) == 1 else step


@dataclass(frozen=True)
class _Pair:
    """A unit that serves, and the one that comes to take its place."""

    now: Situation
    former: UnitSeen
    coming: UnitSeen

    def step(self, wanted: Unit) -> Step:
        code, former = self.coming.unit.code, self.former
        if not any(self.now.totals.values()):
            record = replace(self.coming.record, share=1.0, refused="")
            stays = UnitPlan(code, self.now.totals, record)
            reason = f"all pools are scaled to zero: unit {former.unit.code} goes"
            goes = replace(_leaving(former), record=replace(former.record, goes=True))
            return Step(State.RETIRING, reason, (goes, stays), ((code, 1.0),))
        if former.record.goes and not (difference(self.coming.unit, wanted) and self._can_return()):
            return self._let_go()
        if difference(self.coming.unit, wanted):
            asked = wanted if difference(former.unit, wanted) else former.unit
            return self._revert(State.REPLACED, f"the spec asks for unit {asked.code}", refused="")
        was_refused = former.record.refused == code
        why = former.record.refused_why if was_refused else self._failure()
        if was_refused or why:
            return self._revert(State.REVERTING, why, refused=code)
        return self._advance()

    def _revert(self, state: State, why: str, refused: str) -> Step:
        """Go back. Requests do so at once, or once the former unit serves; workers as its own
        become live. `refused`: the code of a unit that is not tried again."""
        rollout, code = self.now.rollout, self.coming.unit.code
        of_former, of_coming = {}, {}
        least = 0 if self.former.serves(self.now.totals) else 1
        for name, size in self.now.totals.items():
            was, comes = self.former.pool(name), self.coming.pool(name)
            of_former[name] = max(was.size, min(size, size + rollout.max_surge - comes.pods))
            needed = max(least, size - rollout.max_unavailable - was.live)
            of_coming[name] = min(comes.live, needed)
        leaves = not any(of_coming.values())
        kept = replace(self.former.record, share=1.0, goes=False)
        kept = replace(kept, refused=refused, refused_why=why if refused else "")
        plans = (
            UnitPlan(self.former.unit.code, of_former, kept),
            UnitPlan(
                code,
                of_coming,
                self._begun_anew(),
                ends=leaves and not self.coming.num_pods,
                is_leaving=leaves,
            ),
        )
        routes = ((self.former.unit.code, 1.0), (code, 0.0))
        return Step(state, f"{why}: unit {code} goes", plans, routes)

    def _begun_anew(self) -> Record:
        """Return a new record: the spec may ask for the coming unit again before it has gone."""
        record = self.coming.record
        has_begun = record.share or record.step or record.live
        return Record(share=0.0, since_s=self.now.now_s if has_begun else record.since_s)

    def _advance(self) -> Step:
        code, now_s = self.coming.unit.code, self.now.now_s
        record = replace(self.coming.record, slow_since_s=self._slowness()[0])
        live, target = self.coming.num_live, self.target
        if live > record.live:
            record = replace(record, live=live, since_s=now_s)
        missing = self._missing()
        state, reason = State.GROWING, f"unit {code} gets ready for {target:.0%}: {missing}"
        if missing and record.share < target:
            if len(self.steps) == 1 and self.coming.figures is not None:
                record = replace(record, share=max(record.share, self._live_share()))
        elif record.share < target:
            state, record = State.SHIFTING, replace(record, share=target, since_s=now_s, live=live)
            reason = f"unit {code} gets {target:.0%} of the requests"
        elif target < 1.0 and self.now.rollout.pause:
            state, reason = State.PAUSED, f"paused with {target:.0%} of the requests at unit {code}"
        elif target < 1.0 and now_s - record.since_s >= self.now.rollout.interval_s:
            record = replace(record, step=self.index + 1, since_s=now_s, live=live)
            reason = f"unit {code} gets its workers for {self.steps[self.index + 1]:.0%}"
        elif target < 1.0:
            state, reason = State.SHIFTING, f"unit {code} has {target:.0%} of the requests"
        else:
            return self._retire(record)
        return self._both(state, reason, record, keeps_former=True)

    def _retire(self, record: Record) -> Step:
        """Retire the former unit, as the coming one has all requests. It keeps a worker of each
        pool for its streams, and until the coming unit is judged: it may yet get its requests
        back."""
        now, figures = self.now, self.former.figures
        spent_s = now.now_s - record.since_s
        num_active = 0 if figures is None else figures.num_active
        code, coming, rollout = self.former.unit.code, self.coming.unit.code, now.rollout
        # Routers hear of the last share within seconds: streams of the moment before count, too.
        runs = spent_s < _ROUTERS_HEAR_S or (num_active > 0 and spent_s < now.max_timeout_s)
        is_slow = record.slow_since_s > 0
        is_judged = _can_judge(self.coming.figures) and not is_slow
        within_s = rollout.interval_s * (1 + is_slow)
        # Without a surge the coming unit's last workers have no room until the former goes.
        awaits = rollout.max_surge > 0 and not is_judged and spent_s < within_s
        if num_active:
            reason = f"unit {code} runs its last {num_active} requests"
        elif awaits:
            reason = f"unit {code} stays until unit {coming} is judged"
        elif runs:
            reason = f"unit {code} stays until routers know that unit {coming} has all requests"
        elif self._missing():
            reason = f"unit {code} stays until enough workers of unit {coming} are live"
        else:
            reason = f"unit {code} goes: nothing runs there"
        step = self._both(State.RETIRING, reason, record, keeps_former=True)
        if runs or awaits or self._missing():
            return step
        goes = replace(step.plans[0], record=replace(step.plans[0].record, goes=True))
        return replace(step, plans=(goes, step.plans[1]))

    def _let_go(self) -> Step:
        """Let the former unit go, which has begun to: there is no verdict any more, and no other
        unit comes before it is gone."""
        code, coming = self.former.unit.code, self.coming.unit.code
        record = replace(self.coming.record, share=1.0)
        serves = self.coming.serves(self.now.totals)
        state, reason = State.RETIRING, f"unit {code} goes: nothing runs there"
        if not serves:
            state = State.STRANDED
            reason = f"unit {coming} has lost its workers, and unit {code} has begun to go"
        step = self._both(state, reason, record, keeps_former=not serves)
        if any(step.plans[0].sizes.values()):
            return step
        return replace(step, plans=(_leaving(self.former), step.plans[1]))

    def _can_return(self) -> bool:
        """Tell whether the former unit, which has begun to go, serves with the workers that it is
        to keep, while the coming one does not serve."""
        pools = self.former.pools.items()
        kept = {name: replace(pool, live=min(pool.live, pool.size)) for name, pool in pools}
        totals = self.now.totals
        return replace(self.former, pools=kept).serves(totals) and not self.coming.serves(totals)

    def _both(self, state: State, reason: str, record: Record, *, keeps_former: bool) -> Step:
        """Make the step of both units. `record` is the coming unit's."""
        of_former, of_coming = self._sizes(keeps_former=keeps_former)
        former, coming, share = self.former.unit.code, self.coming.unit.code, 1.0 - record.share
        plans = (
            UnitPlan(former, of_former, replace(self.former.record, share=share)),
            UnitPlan(coming, of_coming, record),
        )
        return Step(state, reason, plans, ((former, share), (coming, record.share)))

    # --- steps, and the workers that they need ---

    @property
    def steps(self) -> Sequence[float]:
        """Return the steps' shares; one where the model stays: requests follow live workers."""
        is_same_model = self.former.unit.model == self.coming.unit.model
        return (1.0,) if is_same_model else self.now.rollout.shares

    @property
    def index(self) -> int:
        return min(self.coming.record.step, len(self.steps) - 1)

    @property
    def target(self) -> float:
        """Return the step's share of workers and requests."""
        return 1.0 if self.former.record.goes else self.steps[self.index]

    def _sizes(self, *, keeps_former: bool) -> tuple[dict[str, int], dict[str, int]]:
        """Return the workers of the former and of the coming unit. `keeps_former`: it serves, or
        still runs streams."""
        rollout = self.now.rollout
        of_former, of_coming = {}, {}
        for name, size in self.now.totals.items():
            was, comes = self.former.pool(name), self.coming.pool(name)
            if name not in self.former.unit.pools:  # a pool that came with the coming unit
                of_former[name], of_coming[name] = 0, size
                continue
            goal = math.ceil(size * self.target)
            grown = max(0, min(goal, size + rollout.max_surge - was.pods))
            needed = size - rollout.max_unavailable - was.live
            of_coming[name] = max(grown, min(comes.size, max(goal, needed)))
            least = 1 if keeps_former and size else 0
            stays = max(size - goal, size - rollout.max_unavailable - comes.live, least)
            of_former[name] = min(was.size if self.former.record.goes else size, stays)
        return of_former, of_coming

    def _live_share(self) -> float:
        """Return the requests' share that the coming unit's scarcest pool can take."""
        shares = []
        for name, size in self.now.totals.items():
            was, comes = self.former.pool(name).live, self.coming.pool(name).live
            if size:
                shares.append(comes / (was + comes) if comes else 0.0)
        return math.floor(100 * min(shares, default=0.0)) / 100

    def _missing(self) -> str:
        """Say what the coming unit lacks for the step's share of the requests; empty: nothing."""
        late = []
        for name, size in self.now.totals.items():
            live = self.coming.pool(name).live
            goal = min(math.ceil(size * self.target), size - self.now.rollout.max_unavailable)
            need = max(1, goal) if size else 0
            if live < need:
                late.append(f"{name} {live}/{need} live")
        if not late and self.coming.figures is None:
            return "no router has read its tokenizer yet"
        return ", ".join(late)

    # --- whether the coming unit goes back ---

    def _failure(self) -> str:
        """Say why the coming unit goes back; empty: it does not. It has nowhere to go back to while
        the former one does not serve."""
        if not self.former.serves(self.now.totals):
            return ""
        record, timeout_s = self.coming.record, self.now.rollout.ready_timeout_s
        missing = self._missing() if record.share < self.target else ""
        is_late = self.now.now_s - record.since_s > timeout_s
        if missing and is_late and self.coming.num_live <= record.live:
            return f"nothing more became ready in {timeout_s:g} s: {missing}"
        if worse := judge(self.former.figures, self.coming.figures, self.now.rollout):
            return worse
        return self._slowness()[1]

    def _slowness(self) -> tuple[float, str]:
        """Return since when the coming unit's gaps are too long, and why it goes back if so."""
        now_s, rollout, since_s = self.now.now_s, self.now.rollout, self.coming.record.slow_since_s
        ratio = slowdown(self.former, self.coming)
        if ratio is None:
            return since_s, ""
        if ratio <= rollout.max_slowdown:
            return 0.0, ""
        is_again = since_s and now_s - since_s >= min(_SLOW_AGAIN_S, rollout.interval_s)
        why = f"its gaps between tokens are {ratio:.1f} times the former unit's"
        return since_s or now_s, why if is_again else ""


def judge(former: Figures | None, coming: Figures | None, rollout: UnitRollout) -> str:
    """Say why the coming unit is worse than the former one, by what became of their requests in the
    last minute: it fails `max_failure_percent` more of them. Empty: it does not.

    A unit that ended fewer than `_MIN_REQUESTS` is not judged, nor compared with. Where there is
    nothing to compare with, fewer than `_CLEARLY_FAILED` failures count as none.
    """
    if coming is None or not _can_judge(coming):
        return ""
    failed, most = coming.num_failed / coming.num_ended, rollout.max_failure_percent / 100
    if former is None or not _can_judge(former):
        is_worse = failed > most and coming.num_failed >= _CLEARLY_FAILED
        return f"{failed:.0%} of its requests fail" if is_worse else ""
    usual = former.num_failed / former.num_ended
    if failed > usual + most:
        return f"{failed:.0%} of its requests fail, {usual:.0%} of the former unit's"
    return ""


def slowdown(former: UnitSeen, coming: UnitSeen) -> float | None:
    """Divide the coming unit's median gap between tokens by the former's. None: they cannot be
    compared, or the coming unit's workers get more requests each."""
    was, comes = former.figures, coming.figures
    if was is None or comes is None or not (_can_judge(was) and _can_judge(comes)):
        return None
    is_busier = any(
        comes.num_ended * former.pool(name).live > _LIKE_LOAD * was.num_ended * pool.live
        for name, pool in coming.pools.items()
    )
    return None if is_busier or not was.itl_s or not comes.itl_s else comes.itl_s / was.itl_s


def _can_judge(figures: Figures | None) -> bool:
    return figures is not None and figures.num_ended >= _MIN_REQUESTS


def total(figures: Iterable[Figures]) -> Figures | None:
    """Add up one unit's figures over its routers. None: no router reports."""
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
