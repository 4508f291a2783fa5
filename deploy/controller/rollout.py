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
class ReadyWatch:
    """How long the newest revision has kept its rollout waiting."""

    revision: str
    num_live: int = 0
    """Most that were live at once: one that comes and goes is no progress."""
    waiting_since: datetime.datetime | None = None
    """None: all that were asked for are live."""

    def look(self, target: RevisionState, now: datetime.datetime) -> ReadyWatch:
        """Each further worker that gets live starts the time anew."""
        before = self if self.revision == target.name else ReadyWatch(target.name)
        if target.num_live >= target.size:
            return ReadyWatch(target.name, max(before.num_live, target.num_live))
        if target.num_live > before.num_live or before.waiting_since is None:
            most = max(before.num_live, target.num_live)
            return ReadyWatch(target.name, most, now)
        return before

    def is_late(self, ready_timeout_s: float, now: datetime.datetime) -> bool:
        if self.waiting_since is None:
            return False
        return (now - self.waiting_since).total_seconds() > ready_timeout_s


def next_sizes(
    replicas: int,
    rollout: Rollout,
    target: str,
    revisions: Sequence[RevisionState],
    *,
    is_stopped: bool = False,
) -> dict[str, int]:
    """By revision. `target` is the one that the pool is to have, which may be none of `revisions`
    yet; `is_stopped`: it does not get ready, so nothing old is taken away for it any more."""
    states = {state.name: state for state in revisions}
    states.setdefault(target, RevisionState(target, 0))
    olds = [state for name, state in sorted(states.items()) if name != target]
    if not any(old.size or old.present for old in olds):
        return {name: replicas if name == target else 0 for name in states}
    if any(old.size for old in olds):
        held = _goals_stopped if is_stopped else _goals
        goals = held(replicas, rollout, states[target], olds)
        states = _shrunk(replicas - rollout.max_unavailable, goals, target, states)
    else:  # the last old workers drain: what is left is a pool's ordinary size
        goals = {old.name: 0 for old in olds} | {target: replicas}
        kept = replace(states[target], size=min(states[target].size, replicas))
        states |= {target: kept}
    first = sorted(goals, key=lambda name: ((name == target) is is_stopped, name))
    return _grown(replicas + rollout.max_surge, goals, first, states)


def rests(
    replicas: int,
    rollout: Rollout,
    target: str,
    revisions: Sequence[RevisionState],
    sizes: Mapping[str, int],
) -> bool:
    """Whether these are the sizes to stay: of others nothing is left, and nothing more changes once
    all that is asked for is live."""
    if any(state.present and not sizes[state.name] for state in revisions):
        return False
    whole = [RevisionState(n, size, frozenset(range(size)), size) for n, size in sizes.items()]
    return next_sizes(replicas, rollout, target, whole) == sizes


def _goals(
    replicas: int, rollout: Rollout, target: RevisionState, olds: Sequence[RevisionState]
) -> dict[str, int]:
    """All are to be of the target but those of the partition."""
    num_kept = min(rollout.partition, replicas)
    goals = {old.name: 0 for old in olds} | {target.name: replicas - num_kept}
    return goals | {_base(olds).name: num_kept}


def _goals_stopped(
    replicas: int, rollout: Rollout, target: RevisionState, olds: Sequence[RevisionState]
) -> dict[str, int]:
    """What serves stays, and follows a change of the pool's size; the target is left as it is."""
    base, num_old = _base(olds), sum(old.size for old in olds)
    wanted_old = min(max(num_old, replicas - target.num_live), replicas)
    goals = {old.name: old.size for old in olds}
    goals[base.name] = max(0, base.size + wanted_old - num_old)
    most = max(0, replicas + rollout.max_surge - sum(goals.values()))
    return goals | {target.name: min(target.size, most)}


def _base(olds: Sequence[RevisionState]) -> RevisionState:
    """The old revision that serves most: what is kept of old ones is kept of it."""
    return max(olds, key=lambda old: (old.num_live, old.size, old.name))


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
