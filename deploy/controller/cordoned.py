"""Workers on nodes that are cordoned: they leave one after the other, and serve on elsewhere. Pure,
and of levels only.

1. A pod there that does no work goes at once: another of its pool goes where pods may go.
2. As many workers as serve there, `maxSurge` of them at most, are started beside the pool's own,
   each of the revision that it is to stand in for.
3. While more are live than `maxUnavailable` asks for, a pod whose worker serves there is deleted.
   It closes itself to Ray and drains, as at an eviction; the next one waits until it is gone.
4. With the last one the surge ends: the supervisor gives up what does not serve, which is the place
   of the one that drains.

A pool that is being rolled gets no surge here: its new pods go where pods may go anyway. One that
stays at several revisions does: of a partition, or with a version that does not get ready, which
has a surge of its own already. A node that is uncordoned halfway keeps the workers that it still
has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from deploy.controller.observed import Place, PlaceState, Pod

_States = Mapping[str, PlaceState]
"""Of what is on a pod, by its name."""
_HOLDS = (PlaceState.LIVE, PlaceState.SUSPECT, PlaceState.DRAINING)
"""A worker in these states may have requests."""


@dataclass(frozen=True)
class Leaving:
    """What becomes of a pool's pods on cordoned nodes."""

    surge: Mapping[str, int] = field(default_factory=dict)
    """Workers beside its size, by revision."""
    pods: frozenset[str] = field(default_factory=frozenset)
    """Names of those that are to be deleted now."""
    replaced: Mapping[str, int] = field(default_factory=dict)
    """By revision: pods that go, or are to, whose worker still serves while another serves for
    it."""


NOBODY_LEAVES = Leaving()


def leaving(
    pods: Sequence[Pod],
    places: Sequence[Place],
    *,
    floor: int,
    max_surge: int,
    surged: int,
    growing: Collection[str],
) -> Leaving:
    """Of one pool, all its revisions together. `floor`: workers that have to stay live; `surged`:
    those that it has beside its size so far; `growing`: revisions that may have some beside."""
    states = {place.pod: place.state for place in places if place.pod}
    # Those that go, too: a size that is lowered before such a worker drains would take another one.
    concerned = [pod for pod in pods if pod.is_cordoned or pod.is_going]
    concerned.sort(key=lambda pod: _next_to_leave(pod, growing))
    there = [pod for pod in concerned if pod.is_cordoned]
    most = max_surge if there else min(surged, max_surge)
    serving = [pod for pod in concerned if states.get(pod.name) is PlaceState.LIVE]
    stood_in_for = [pod for pod in serving if pod.revision in growing][: max(0, most)]
    num_live = sum(place.state is PlaceState.LIVE for place in places) - sum(
        pod.is_going for pod in serving
    )
    names = frozenset(_chosen(there, states, has_spare=num_live > max(0, floor)))
    replaced = [pod.revision for pod in stood_in_for if pod.is_going or pod.name in names]
    return Leaving(Counter(pod.revision for pod in stood_in_for), names, Counter(replaced))


def _next_to_leave(pod: Pod, growing: Collection[str]) -> tuple[bool, bool, bool, str]:
    """Whoever is stood in for first leaves first."""
    return not pod.is_cordoned, not pod.is_going, pod.revision not in growing, pod.name


def _chosen(there: Sequence[Pod], states: _States, *, has_spare: bool) -> list[str]:
    """Names of the pods that are to go now: what does no work, and, where more are live than have
    to be, one that does. `there`: the next to leave first."""
    staying = [pod for pod in there if not pod.is_going]
    chosen = [pod.name for pod in staying if states.get(pod.name) not in _HOLDS]
    serving = [pod.name for pod in staying if states.get(pod.name) is PlaceState.LIVE]
    anybody_leaves = any(
        states.get(pod.name) is PlaceState.DRAINING or (pod.is_going and pod.name in states)
        for pod in there
    )
    return chosen + serving[: has_spare and not anybody_leaves]
