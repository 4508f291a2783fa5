"""How many workers each revision of each pool is to have now, and which share of requests each
cohort. Pure: `rollout` and `cohort_rollout` say it, here they are asked for one ServingCluster.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deploy.api.serving_cluster import CohortRollout
from deploy.controller.cohort_judgement import Watched
from deploy.controller.cohort_rollout import (
    CohortPool,
    Phase,
    Progress,
    Seen,
    advance,
    cohort_size,
    weights,
)
from deploy.controller.group_size import group_size
from deploy.controller.manifests.cluster_yaml import seconds
from deploy.controller.manifests.ray_cluster import GroupSize, revision_in
from deploy.controller.observed import FleetPool, PlaceState
from deploy.controller.revisions import cohort_of
from deploy.controller.rollout import (
    Aim,
    ReadyWatch,
    RevisionState,
    Room,
    base,
    next_sizes,
)
from deploy.controller.view import ClusterView, PoolView


@dataclass(frozen=True)
class PoolRolling:
    """What is decided of one pool; `kept`: revisions that stay known though they have no size."""

    sizes: Mapping[str, int]
    kept: frozenset[str]
    watch: ReadyWatch
    is_stopped: bool = False
    """The newest revision does not get ready: what is older serves on."""
    is_taken_back: bool = False
    """The newest revision's cohort was not fit to serve."""


@dataclass(frozen=True)
class Rolling:
    pools: Mapping[str, PoolRolling]
    progress: Progress
    weights: Mapping[str, int] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """By revision, of all pools."""
        return {name: size for pool in self.pools.values() for name, size in pool.sizes.items()}

    @property
    def kept(self) -> frozenset[str]:
        return frozenset(name for pool in self.pools.values() for name in pool.kept)


def decide(
    view: ClusterView,
    progress: Progress | None,
    watches: Mapping[str, ReadyWatch],
    watched: Watched | None,
    now: datetime.datetime,
) -> Rolling:
    """`progress` and `watches`, by pool, as they were decided last; `watched`: None where nothing
    was measured of this step yet."""
    wanted = cohort_of(view.obj["spec"])
    if progress is None or _is_lost(view, progress.serving):
        progress = Progress(_serving_most(view, wanted))
    seen = _seen(view, watched, progress.serving)
    if view.heard.is_settled and not view.is_going:
        step_s = seconds(view.spec.rollout.step)
        progress = advance(progress, view.spec.rollout, wanted, seen, step_s, now)
    is_alone = seen.is_gone(progress.serving)
    pools = {}
    for name, pool in view.pools.items():
        watch = _served(pool, watches.get(name) or _first_watch(pool))
        share = _Share(progress, view.spec.rollout, is_alone)
        settled = view.heard.is_settled
        watch = _looked(watch, pool, share, now) if settled else watch.unheard()
        pools[name] = _pool(view, pool, share, watch, now)
    return Rolling(pools, progress, weights(progress))


def group_size_of(view: ClusterView, pool: PoolView, name: str, size: int) -> GroupSize:
    """Of a revision's worker group. A pool that is being deleted waits for no supervisor: its pods
    drain by themselves."""
    revision = pool.revisions[name]
    if pool.is_going and pool.fleet is None:
        return GroupSize(0, tuple(sorted(pod.name for pod in revision.pods)))
    if not view.heard.is_settled:
        return group_size(size, revision.pods, None)
    unknown = FleetPool(size, ())  # it runs nothing that it does not know
    return group_size(size, revision.pods, revision.fleet or unknown)


@dataclass(frozen=True)
class _Share:
    progress: Progress
    rollout: CohortRollout
    is_alone: bool

    def of(self, cohort: str, replicas: int) -> int:
        return cohort_size(self.progress, self.rollout, cohort, replicas, is_alone=self.is_alone)

    def has_returned(self, cohort: str) -> bool:
        return self.progress.phase is Phase.RETURNED and self.progress.next == cohort


def _pool(
    view: ClusterView, pool: PoolView, share: _Share, watch: ReadyWatch, now: datetime.datetime
) -> PoolRolling:
    states = {name: revision.state for name, revision in pool.revisions.items()}
    cohorts = {name: each.revision.cohort for name, each in pool.revisions.items()}
    is_stopped = _is_stopped(pool, watch)
    is_steady = watch.is_steady(seconds(pool.spec.rollout.ready_timeout), now)
    served, sizes = watch.of(pool.target).instead, dict[str, int]()
    kept = {pool.target}
    for cohort in sorted(set(cohorts.values())):
        own = [state for name, state in states.items() if cohorts[name] == cohort]
        replicas = share.of(cohort, pool.replicas)
        aim = _aim(pool, cohort, served)
        target = aim.target
        if cohort in (share.progress.serving, share.progress.next):
            kept.add(target)
        olds = [state for state in own if state.name != target]
        if olds and target == pool.target and not watch.of(pool.target).num_live:
            kept.add(base(olds, aim).name)
        holds = is_stopped and target == pool.target
        sizes |= next_sizes(replicas, aim, own, is_stopped=holds, is_steady=is_steady)
    if (pool.fleet is None or not view.heard.is_settled) and _is_rolled(states, pool.target):
        # Nothing tells what runs where: all stays. A pool that goes drains by itself.
        sizes = {name: 0 if pool.is_going else state.size for name, state in states.items()}
    is_taken_back = share.has_returned(cohorts[pool.target])
    return PoolRolling(sizes, frozenset(kept), watch, is_stopped, is_taken_back)


def _looked(watch: ReadyWatch, pool: PoolView, share: _Share, now: datetime.datetime) -> ReadyWatch:
    """Of a pool at zero what was late stays so: it will be wanted again."""
    cohort = pool.updated.revision.cohort
    watch, rollout = _still(pool, watch.of(pool.target)), pool.spec.rollout
    wanted = share.of(cohort, pool.replicas)
    if not pool.replicas:
        wanted = 1
    return watch.look(
        pool.updated.state,
        wanted,
        Room.of(rollout),
        seconds(rollout.ready_timeout),
        now,
    )


def _served(pool: PoolView, watch: ReadyWatch) -> ReadyWatch:
    """Noted of what was asked for last, before another takes its place, and while nothing is rolled
    yet, too: what a supervisor that has just begun to speak tells of as live is so. Of a pool at
    zero, or that comes from there, sizes say nothing of what is to stay."""
    last = pool.revisions.get(watch.revision)
    if last is None or not last.state.num_live or not pool.replicas:
        return watch
    if any(each.size for each in pool.revisions.values() if each is not last):
        return watch
    return watch.alone()


def _still(pool: PoolView, watch: ReadyWatch) -> ReadyWatch:
    """Where nothing is left of what served before, another does: a third version was asked for
    before the second one alone served."""
    cohort = pool.updated.revision.cohort
    olds = [each.state for each in pool.others if each.revision.cohort == cohort and each.num_live]
    if not watch.instead or watch.instead in pool.revisions or not olds:
        return watch
    return replace(watch, instead=base(olds, Aim(pool.target, pool.spec.rollout)).name)


def _aim(pool: PoolView, cohort: str, served: str) -> Aim:
    """Of the pool's revisions of one cohort. A cohort that the spec does not name any more goes on
    with one revision."""
    own = [each.state for each in pool.revisions.values() if each.revision.cohort == cohort]
    as_spec = Aim(pool.target, pool.spec.rollout, served)
    if cohort != pool.updated.revision.cohort:
        return replace(as_spec, target=base(own, as_spec).name)
    return as_spec


def _first_watch(pool: PoolView) -> ReadyWatch:
    """Where nothing tells how far it was."""
    there = pool.others if pool.replicas else pool.revisions.values()
    cohort = pool.updated.revision.cohort
    olds = [each.state for each in there if each.revision.cohort == cohort]
    olds = [state for state in olds if state.name != pool.target]
    aim = Aim(pool.target, pool.spec.rollout)
    return ReadyWatch(pool.target, instead=base(olds, aim).name if olds else "")


def _is_stopped(pool: PoolView, watch: ReadyWatch) -> bool:
    """An old revision without workers, too, can serve instead of a new one that never did. A watch
    is of a former revision until the supervisor has spoken long enough."""
    if watch.revision != pool.target or not watch.is_late:
        return False
    cohort = pool.updated.revision.cohort
    num_own = sum(each.revision.cohort == cohort for each in pool.revisions.values())
    return bool(pool.others) or (bool(pool.replicas) and not watch.num_live and num_own > 1)


def _is_rolled(states: Mapping[str, RevisionState], target: str) -> bool:
    """Whether there is anything of another revision."""
    return any(name != target and (s.size or s.present) for name, s in states.items())


def _serving_most(view: ClusterView, wanted: str) -> str:
    """The cohort of what runs, where nothing tells how far it was."""
    found: dict[str, tuple[int, int]] = {}
    for each in view.revisions.values():
        live, size = found.get(each.revision.cohort, (0, 0))
        found[each.revision.cohort] = (live + each.num_live, size + each.size)
    best = max(found, key=lambda cohort: (found[cohort], cohort == wanted), default=wanted)
    return best if any(found.get(best, ())) else wanted


def _is_lost(view: ClusterView, cohort: str) -> bool:
    """No pool has a version of it, and none could be made: of what the spec does not name the
    RayCluster alone holds what there is to know."""
    told = [revision_in(group) for group in view.groups.values()]
    there = [*told, *(each.revision for each in view.revisions.values())]
    return all(each.cohort != cohort for each in there)


def _live(pool: PoolView) -> dict[str, int]:
    """Workers, by cohort."""
    live: dict[str, int] = {}
    for each in pool.revisions.values():
        live[each.revision.cohort] = live.get(each.revision.cohort, 0) + each.num_live
    return live


def _seen(view: ClusterView, watched: Watched | None, serving: str) -> Seen:
    pools = [(pool.replicas, _live(pool)) for pool in view.pools.values() if not pool.is_going]
    if any(live.get(serving) for _, live in pools):
        for replicas, live in pools:
            live.setdefault(serving, replicas)  # it is newer than that cohort: none is missed
    unread = frozenset[str]() if view.fleet is None else view.fleet.unread_cohorts
    targets = frozenset(pool.target for pool in view.pools.values() if not pool.is_going)
    silent = {
        each.revision.cohort
        for each in view.revisions.values()
        if each.fleet is not None and each.fleet.of_state(PlaceState.SUSPECT)
    }
    live_in = [CohortPool(replicas, live) for replicas, live in pools]
    return Seen(live_in, watched, unread, targets, frozenset(silent))
