"""How many workers each revision of a pool is to have. Pure, and of levels only: whoever was cut
off at any step comes to the same end by asking again.

The new revision grows as far as the surge lets it; a worker of it counts once it is live, then one
of an old revision may go: first those that do not serve. What never happens:

- a decision leaves fewer live workers than `replicas - maxUnavailable`, or takes one of fewer;
- a revision grows while pods, those that still drain included, are `replicas + maxSurge` or more;
- an old worker goes while the new revision does not get ready within `readyTimeout`.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deploy.api.worker_pool import Rollout


@dataclass(frozen=True)
class RevisionState:
    """What there is of one revision."""

    name: str
    size: int
    """Workers that it is to have now: those whose standing is less."""
    live: frozenset[int] = frozenset()
    """Standings, from 0, of the workers that serve: the greatest leave first."""
    present: int = 0
    """Pods or workers that there are, whichever are more: those that start or drain included."""

    @property
    def num_live(self) -> int:
        return self.live_within(self.size)

    def live_within(self, size: int) -> int:
        """Of its live workers those that stay when it has `size` places."""
        return sum(standing < size for standing in self.live)


@dataclass(frozen=True)
class Room:
    """What a rollout is given to make room for new workers."""

    max_surge: int
    max_unavailable: int

    @classmethod
    def of(cls, rollout: Rollout) -> Room:
        return cls(rollout.max_surge, rollout.max_unavailable)


@dataclass(frozen=True)
class Aim:
    """`target`: the revision that a pool is to have; `rollout`: how; `served`:
    the revision that did before, empty: none is known."""

    target: str
    rollout: Rollout
    served: str = ""


@dataclass(frozen=True)
class ReadyWatch:
    """How long the newest revision has kept its rollout waiting."""

    revision: str
    num_live: int = 0
    """Most that were live at once: one that comes and goes is no progress."""
    waiting_since: datetime.datetime | None = None
    """Since when workers that were asked for have been missing or, once it is late, since when none
    has. None: neither, or nobody tells."""
    room: Room | None = None
    """With which it waited; None: nobody has noted it."""
    instead: str = ""
    """The revision that served before, until this one alone does; empty: none, or this one has."""
    is_late: bool = False
    """It has not got ready in time: its rollout has stopped."""
    has_served: bool = False
    """It alone, since it is the newest."""

    def look(
        self,
        target: RevisionState,
        wanted: int,
        room: Room,
        ready_timeout_s: float,
        now: datetime.datetime,
    ) -> ReadyWatch:
        """Each further worker that gets live starts the time anew, and so does other room, which
        may be what it lacked. What was late stays late when fewer are asked for because of it;
        `wanted`: how many are to be live in the end."""
        before = self.of(target.name)
        if before.room not in (None, room):
            before = replace(before, waiting_since=None, is_late=False)
        most_before = min(before.num_live, target.size)
        has_more, is_whole = target.num_live > most_before, target.num_live >= target.size
        is_late = before.is_late or before.has_waited(ready_timeout_s, now)
        is_late = is_late and target.num_live < wanted and not has_more
        goes_on = is_late is before.is_late and not has_more
        since = (before.waiting_since if goes_on else None) or now
        return ReadyWatch(
            target.name,
            max(most_before, target.num_live),
            since if is_late is is_whole else None,
            room,
            before.instead,
            is_late,
            before.has_served,
        )

    def alone(self) -> ReadyWatch:
        """It serves, and nothing older is to have workers beside it."""
        return replace(self, instead="", has_served=True)

    def unheard(self) -> ReadyWatch:
        """While nobody tells what is live: what passes then is no time that was waited."""
        return replace(self, waiting_since=None)

    def of(self, revision: str) -> ReadyWatch:
        """As it goes on, or begins, for that one. What has not served alone is nothing to come back
        to."""
        if revision == self.revision:
            return self
        served = self.instead or (self.revision if self.has_served else "")
        if served == revision:
            return ReadyWatch(revision, has_served=True)
        return ReadyWatch(revision, instead=served)

    def has_waited(self, ready_timeout_s: float, now: datetime.datetime) -> bool:
        if self.waiting_since is None:
            return False
        return (now - self.waiting_since).total_seconds() > ready_timeout_s

    def is_steady(self, ready_timeout_s: float, now: datetime.datetime) -> bool:
        """It is late, but what is asked for still has been live as long as one waits for it."""
        return self.is_late and self.has_waited(ready_timeout_s, now)


def next_sizes(
    replicas: int,
    aim: Aim,
    revisions: Sequence[RevisionState],
    *,
    is_stopped: bool = False,
    is_steady: bool = False,
) -> dict[str, int]:
    """By revision. The target may be none of `revisions` yet; `is_stopped`: it does not get ready,
    so nothing old is taken away for it any more, and what was comes back where nothing else serves.
    `is_steady`: what there is of it stays live, so old workers that stood in for it make room for
    one more."""
    target, rollout = aim.target, aim.rollout
    states = {state.name: state for state in revisions}
    states.setdefault(target, RevisionState(target, 0))
    olds = [state for name, state in sorted(states.items()) if name != target]
    is_kept = is_stopped and bool(olds) and not states[target].num_live
    if not is_kept and not any(old.size or old.present for old in olds):
        return {name: replicas if name == target else 0 for name in states}
    if is_kept or any(old.size for old in olds):
        kept = base(olds, aim)
        goals = {old.name: 0 for old in olds} | {target: replicas}
        if is_stopped:
            goals = _goals_stopped(
                replicas, rollout, states[target], olds, kept, is_steady=is_steady
            )
        states = _shrunk(replicas - rollout.max_unavailable, goals, target, states)
    else:  # the last old workers drain: what is left is a pool's ordinary size
        goals = {old.name: 0 for old in olds} | {target: replicas}
        states |= {target: replace(states[target], size=min(states[target].size, replicas))}
    first = sorted(goals, key=lambda name: ((name == target) is is_stopped, name))
    return _grown(replicas + rollout.max_surge, goals, first, states)


def base(olds: Sequence[RevisionState], aim: Aim) -> RevisionState:
    """The old revision of which some are kept: that which serves most, and where none does the one
    that did."""

    def rank(old: RevisionState) -> tuple[int, bool, int, str]:
        return old.num_live, old.name == aim.served, old.size, old.name

    return max(olds, key=rank)


def _goals_stopped(
    replicas: int,
    rollout: Rollout,
    target: RevisionState,
    olds: Sequence[RevisionState],
    kept: RevisionState,
    *,
    is_steady: bool,
) -> dict[str, int]:
    """What serves stays, and follows a change of the pool's size; the target is left as it is, with
    one worker more than are live where there is room: should that get live the rollout goes on."""
    num_old = sum(old.size for old in olds)
    room = replicas + rollout.max_surge
    wanted_old = replicas - min(target.num_live, replicas)
    if num_old + target.size <= room and not is_steady:  # else the pool has been made smaller
        wanted_old = min(max(num_old, wanted_old), replicas)
    goals = {old.name: old.size for old in olds}
    goals[kept.name] = max(0, kept.size + wanted_old - num_old)
    most = max(0, room - sum(goals.values()))
    tried = max(target.size, min(target.num_live + 1, replicas))
    return goals | {target.name: min(tried, most, replicas)}


def _shrunk(
    floor: int, goals: Mapping[str, int], target: str, states: Mapping[str, RevisionState]
) -> dict[str, RevisionState]:
    """Towards the goals, as far as what is live lets it; those that serve least go first."""
    result = dict(states)
    for name in sorted(states, key=lambda name: (name == target, states[name].num_live, name)):
        while result[name].size > goals[name]:
            smaller = result | {name: replace(result[name], size=result[name].size - 1)}
            if not _may_be(smaller, result, floor, target):
                break
            result = smaller
    return result


def _may_be(
    after: Mapping[str, RevisionState],
    before: Mapping[str, RevisionState],
    floor: int,
    target: str,
) -> bool:
    """Old workers that are not live count, too, beside the new ones that are: they may only be slow
    to come back, and the new revision has shown nothing yet."""
    num_before = sum(state.num_live for state in before.values())
    num_after = sum(state.num_live for state in after.values())
    num_old = sum(state.size for name, state in after.items() if name != target)
    takes_old = num_old < sum(state.size for name, state in before.items() if name != target)
    if takes_old and num_old + after[target].num_live < floor:
        return False
    return num_after >= min(num_before, floor)


def _grown(
    most: int,
    goals: Mapping[str, int],
    order: Sequence[str],
    states: Mapping[str, RevisionState],
) -> dict[str, int]:
    """Towards the goals, as far as there is room for pods; a place whose worker still drains has
    its pod already."""
    sizes = {name: state.size for name, state in states.items()}
    room = most - sum(max(state.size, state.present) for state in states.values())
    for name in order:
        has_pod = max(0, states[name].present - sizes[name])
        growth = max(0, min(goals[name] - sizes[name], has_pod + max(0, room)))
        sizes[name] += growth
        room -= max(0, growth - has_pod)
    return sizes
