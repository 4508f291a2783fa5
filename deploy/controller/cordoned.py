"""Workers on nodes that are cordoned: they leave one after the other, and serve on elsewhere. Pure,
and of levels only.

1. A pod there that does no work goes at once: another of its pool goes where pods may go.
2. As many workers as serve there, `maxSurge` of them at most, are started beside the pool's own.
3. While more are live than `maxUnavailable` asks for, a pod whose worker serves there is deleted.
   It closes itself to Ray and drains, as at an eviction; the next one waits until it is gone.
4. With the last one the surge ends: the supervisor gives up what does not serve, which is the place
   of the one that drains.

A pool that is rolled gets no surge here: its new pods go where pods may go anyway. A node that is
uncordoned halfway keeps the workers that it still has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deploy.controller.observed import Place, PlaceState, Pod

_States = Mapping[Pod, PlaceState | None]
"""Of what is on each pod; None: nothing."""
_HOLDS = (PlaceState.LIVE, PlaceState.SUSPECT, PlaceState.DRAINING)
"""A worker in these states may have requests."""


@dataclass(frozen=True)
class Leaving:
    """What becomes of a pool's pods on cordoned nodes."""

    surge: int = 0
    """Workers beside the pool's size."""
    pods: frozenset[str] = field(default_factory=frozenset)
    """Names of those that are to be deleted now."""
    replaced: Mapping[str, int] = field(default_factory=dict)
    """By revision: pods that go, or are to, whose worker still serves while another serves for
    it."""


NOBODY_LEAVES = Leaving()


def leaving(
    pods: Sequence[Pod], places: Sequence[Place], *, floor: int, max_surge: int, surged: int
) -> Leaving:
    """Of one pool, all its revisions together. `floor`: workers that have to stay live; `surged`:
    those that it has beside its size so far."""
    states = {place.pod: place.state for place in places if place.pod}
    there = {pod: states.get(pod.name) for pod in pods if pod.is_cordoned}
    # A size that is lowered before this worker drains would take another one.
    going = {pod: states.get(pod.name) for pod in pods if pod.is_going}
    serving = [pod for pod, state in (there | going).items() if state is PlaceState.LIVE]
    most = max_surge if there else min(surged, max_surge)
    surge = max(0, min(most, len(serving)))
    names = frozenset(_chosen(floor, there, going, places))
    replaced: dict[str, int] = {}
    for pod in [pod for pod in serving if pod.is_going or pod.name in names][:surge]:
        replaced[pod.revision] = replaced.get(pod.revision, 0) + 1
    return Leaving(surge, names, replaced)


def _chosen(floor: int, there: _States, going: _States, places: Sequence[Place]) -> list[str]:
    """Names of the pods that are to go now: what does no work, and one that does while more than
    `floor` stay live."""
    staying = {pod: state for pod, state in there.items() if not pod.is_going}
    chosen = [pod.name for pod, state in staying.items() if state not in _HOLDS]
    gone = {pod.name for pod in going}
    num_live = sum(p.state is PlaceState.LIVE and p.pod not in gone for p in places)
    if not _anybody_leaves(there) and num_live > max(0, floor):
        serving = [pod.name for pod, state in staying.items() if state is PlaceState.LIVE]
        chosen += sorted(serving)[:1]
    return chosen


def _anybody_leaves(there: _States) -> bool:
    return any(
        state is PlaceState.DRAINING or (pod.is_going and state is not None)
        for pod, state in there.items()
    )
