"""How many pods a pool's worker group is to have, and which go. Pure, and of levels only: whoever
was cut off at any step comes to the same end by asking again.

A pod goes only when no worker is left on it. So scaling in is: the supervisor is told the pool's
new size, places that are too many drain, and pods whose place is gone go in one patch.
"""

from __future__ import annotations

from collections.abc import Sequence

from deploy.controller.manifests.ray_cluster import GroupSize
from deploy.controller.observed import FleetPool, Place, Pod


def group_size(replicas: int, pods: Sequence[Pod], pool: FleetPool | None) -> GroupSize:
    """`replicas`: the pool's size; `pods`: all of its group; `pool`: None while the supervisor does
    not answer, or does not know the pool: then nothing tells what runs where, and nothing goes."""
    staying = [pod for pod in pods if not pod.is_going]
    going = tuple(sorted(pod.name for pod in pods if pod.is_going))
    if pool is None:
        return GroupSize(max(replicas, len(staying)), going)
    surplus = _surplus(replicas, staying, pool.places)
    chosen = sorted(_empty(staying, pool.places), key=_least_wanted_first)[:surplus]
    names = tuple(sorted(pod.name for pod in chosen))
    # What was seen of the pods may be old: none with a worker on it may be left out of the count.
    known = {pod.name for pod in pods}
    num_unseen = len({place.pod for place in pool.places if place.pod} - known)
    num_staying = len(staying) + num_unseen - len(chosen)
    return GroupSize(max(replicas, num_staying), (*going, *names))


def _empty(pods: Sequence[Pod], places: Sequence[Place]) -> list[Pod]:
    taken = {place.pod for place in places}
    return [pod for pod in pods if pod.name not in taken]


def _surplus(replicas: int, pods: Sequence[Pod], places: Sequence[Place]) -> int:
    """Pods that neither the pool's size nor a place without a pod will want."""
    num_homeless = sum(not place.pod for place in places)
    return max(0, min(len(pods) - replicas, len(_empty(pods, places)) - num_homeless))


def _least_wanted_first(pod: Pod) -> tuple[bool, str, str]:
    """Those that are not ready go first, then the oldest: what is new is of the newest version."""
    return pod.is_ready, pod.created_at, pod.name
