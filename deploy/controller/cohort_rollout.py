"""How a change of weights, quantisation or block size goes over: prefill and decode together. Pure.

1. Growing: the new cohort's pools get the workers that the next step's share of requests needs,
   beside all that serve; they are waited for, and so are routers that have yet to read its text.
2. Watching: that share goes to it, the old cohort shrinks to what the rest needs, and what becomes
   of both's requests is watched for as long as the step lasts, and longer where so few of the new
   one's were seen that those which failed may be chance. Then the next step.
3. Serving: the new one has served all requests for a step's time; the old one drains.

Returning: the new one fails more, or is slower, than the old one by more than is allowed, and its
share ends at once; or the spec names another version, and its share ends as the old one gets its
workers back, whose room the new one's make; named again it is watched anew with what it has. Where
nothing of the old one serves the new one gets the workers for all requests, and is then what the
next version takes over from. Returned: nothing is tried again until the spec names another version,
or has workers of this one be others than those that failed: what was at fault may be no part of a
cohort.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from deploy.api.serving_cluster import CohortRollout
from deploy.controller.cohort_judgement import (
    MIN_REQUESTS,
    Failures,
    Figures,
    Watched,
    compared,
    failures,
    is_in_doubt,
    slowness,
)


class Phase(StrEnum):
    SERVING = "Serving"
    GROWING = "Growing"
    WATCHING = "Watching"
    RETURNING = "Returning"
    RETURNED = "Returned"


@dataclass(frozen=True)
class Progress:
    """What has to be known to go on; kept in the ServingCluster's status."""

    serving: str
    """The cohort that has the requests which the next one has not."""
    next: str = ""
    """The cohort that is to take over, or was; empty: none."""
    phase: Phase = Phase.SERVING
    weight: int = 0
    """Percent of new requests that go to the next one."""
    since: datetime.datetime | None = None
    """When a step's share began to be watched."""
    reason: str = ""
    """Why it is taken back."""
    is_fault: bool = False
    """The next one serves worse than allowed."""
    tried: tuple[str, ...] = ()
    """The pools' revisions of which the next one was then."""


@dataclass(frozen=True)
class CohortPool:
    """A pool's size, and how many workers of each cohort are live in it."""

    replicas: int
    num_live: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    pools: Sequence[CohortPool]
    watched: Watched | None = None
    """None: nothing was measured of this step yet."""
    unread: frozenset[str] = frozenset()
    """Cohorts to which some router sends nothing: it has not read their text."""
    targets: frozenset[str] = frozenset()
    """The revisions that the spec asks for, one of each pool."""
    silent: frozenset[str] = frozenset()
    """Cohorts of which a worker has not been heard of for a while: it may only be slow."""

    def has_live(self, cohort: str) -> bool:
        return any(pool.num_live.get(cohort, 0) for pool in self.pools)

    def is_gone(self, cohort: str) -> bool:
        """Nothing of it serves, and that is not for a few seconds of silence."""
        return not self.has_live(cohort) and cohort not in self.silent

    def both(self, progress: Progress) -> tuple[Figures, Figures]:
        """Of the next cohort, and of the serving one."""
        told = {} if self.watched is None else self.watched.figures
        return told.get(progress.next, Figures()), told.get(progress.serving, Figures())

    def percent_live(self, cohort: str) -> int:
        """Of all requests: for how many each pool has live workers."""
        shares = [100 * p.num_live.get(cohort, 0) // p.replicas for p in self.pools if p.replicas]
        return min([100, *shares])

    def is_sized(self, cohort: str, percent: int) -> bool:
        """Whether each pool has the live workers for that share of requests."""
        return all(
            pool.num_live.get(cohort, 0) >= share(pool.replicas, percent) for pool in self.pools
        )


def share(replicas: int, percent: int) -> int:
    """Workers of a pool that serve this percentage of its requests."""
    return max(1, math.ceil(replicas * percent / 100)) if replicas and percent else 0


def weights(progress: Progress) -> dict[str, int]:
    """Of new requests, by cohort; the sum is 100."""
    told = {progress.serving: 100 - progress.weight}
    return told | {progress.next: progress.weight} if progress.next else told


def cohort_size(
    progress: Progress, rollout: CohortRollout, cohort: str, replicas: int, *, is_alone: bool
) -> int:
    """Workers that a pool of this size is to have of a cohort. `is_alone`: nothing of the serving
    cohort serves, so nothing is to be waited for."""
    if cohort == progress.serving:
        return share(replicas, _serving_percent(progress, rollout))
    if cohort != progress.next:
        return 0
    takes_over = is_alone and progress.phase is Phase.RETURNING and progress.weight
    if progress.phase is Phase.GROWING or takes_over:
        return share(replicas, next_weight(progress, rollout, is_alone=is_alone))
    return share(replicas, progress.weight)


def next_weight(progress: Progress, rollout: CohortRollout, *, is_alone: bool) -> int:
    if is_alone:
        return 100
    return next((weight for weight in rollout.weights if weight > progress.weight), 100)


def _serving_percent(progress: Progress, rollout: CohortRollout) -> int:
    """While the last step is watched the old cohort keeps what it had: the way back is short."""
    if progress.phase not in (Phase.GROWING, Phase.WATCHING):
        return 100
    if progress.weight < 100:
        return 100 - progress.weight
    return 100 - max((weight for weight in rollout.weights if weight < 100), default=0)


def advance(
    progress: Progress,
    rollout: CohortRollout,
    wanted: str,
    seen: Seen,
    step_s: float,
    now: datetime.datetime,
) -> Progress:
    """One step on, if it is time. `wanted`: the spec's cohort; `step_s`: how long each step is
    watched."""
    is_settled = progress.phase in (Phase.SERVING, Phase.RETURNED)
    if wanted == progress.serving and is_settled:
        return Progress(wanted)
    if wanted != progress.next and is_settled:
        return Progress(progress.serving, wanted, Phase.GROWING)
    if progress.phase is Phase.RETURNED:
        return _tried_again(progress, seen)
    # Where nothing of the old one serves there is nothing to go back to.
    is_compared = progress.weight > 0 and seen.has_live(progress.serving)
    if is_compared and (fault := _fault(progress, rollout, seen)):
        back = replace(progress, phase=Phase.RETURNING, reason=fault, is_fault=True)
        return replace(back, weight=0, since=None, tried=tuple(sorted(seen.targets)))
    if progress.phase is Phase.RETURNING:
        return _returned(progress, wanted, seen, now)
    if wanted != progress.next:
        reason = "the spec names another version"
        return replace(progress, phase=Phase.RETURNING, reason=reason, since=None)
    if is_compared and is_in_doubt(*seen.both(progress), rollout):
        return progress
    return _forward(progress, rollout, seen, step_s, now)


def _forward(
    progress: Progress,
    rollout: CohortRollout,
    seen: Seen,
    step_s: float,
    now: datetime.datetime,
) -> Progress:
    if progress.phase is Phase.GROWING:
        return _grown(progress, rollout, seen, now)
    if seen.watched is None or seen.watched.seconds < step_s:  # however short: none goes unwatched
        return progress
    if progress.weight == 100:
        return Progress(progress.next)
    return replace(progress, phase=Phase.GROWING, since=None)


def _grown(
    progress: Progress, rollout: CohortRollout, seen: Seen, now: datetime.datetime
) -> Progress:
    is_alone = seen.is_gone(progress.serving)
    weight = next_weight(progress, rollout, is_alone=is_alone)
    if not seen.is_sized(progress.next, weight):
        return progress
    if progress.next in seen.unread and not is_alone:  # a share of requests that nobody sends
        return progress
    return replace(progress, phase=Phase.WATCHING, weight=weight, since=now)


def _returned(progress: Progress, wanted: str, seen: Seen, now: datetime.datetime) -> Progress:
    """What is no fault waits for the old workers: they take over no more than they can serve."""
    if wanted == progress.next and not progress.is_fault:  # the spec has changed its mind twice
        if not progress.weight:
            return Progress(progress.serving, wanted, Phase.GROWING)
        return replace(progress, phase=Phase.WATCHING, since=now, reason="")
    if progress.weight and seen.is_gone(progress.serving) and seen.is_sized(progress.next, 100):
        return Progress(progress.next, wanted, Phase.GROWING)
    weight = min(progress.weight, 100 - seen.percent_live(progress.serving))
    if weight:
        return replace(progress, weight=weight)
    if wanted == progress.serving:
        return Progress(wanted)
    if wanted != progress.next:
        return Progress(progress.serving, wanted, Phase.GROWING)
    return replace(progress, phase=Phase.RETURNED, weight=0)


def _tried_again(progress: Progress, seen: Seen) -> Progress:
    """Where a pool is to have other workers than those that failed. A pool more or less is no
    reason."""
    if not progress.tried:  # of an operator that did not note it
        return replace(progress, tried=tuple(sorted(seen.targets)))
    failed = {_pool_of(name): name for name in progress.tried}
    if all(failed.get(_pool_of(name), name) == name for name in seen.targets):
        return progress
    return Progress(progress.serving, progress.next, Phase.GROWING)


def _pool_of(revision: str) -> str:
    return revision.rpartition("-")[0]


def _fault(progress: Progress, rollout: CohortRollout, seen: Seen) -> str:
    """Why the new cohort is not fit; empty: it is, as far as is known."""
    new, serving = seen.both(progress)
    if failures(new, serving, rollout) is not Failures.MANY:
        return slowness(new, serving, rollout) if new.num_requests >= MIN_REQUESTS else ""
    hung = " or stood still until their clients gave up" if new.num_abandoned else ""
    new, serving = compared(new, serving)
    return (
        f"{new.failed_percent:.1f}% of its requests failed{hung} at a share of {progress.weight}%, "
        f"{serving.failed_percent:.1f}% of the old one's: maxErrorPercent is "
        f"{rollout.max_error_percent:g}"
    )
