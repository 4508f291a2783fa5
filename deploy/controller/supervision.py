"""What the supervisor is told of pools: each revision is a pool of its own to it. Of levels: it is
told what it does not have as it is wanted, so one that has lost everything is told all of it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from baton.control_client import ControlClient
from baton.errors import BatonError
from deploy.controller.manifests.ray_cluster import settings_in
from deploy.controller.observed import FleetPool
from deploy.controller.rolling import PoolRolling, Rolling
from deploy.controller.view import ClusterView, PoolView, RevisionView


class Supervision:
    """One look's calls; `refused` has what the supervisor did not take, by the WorkerPool's name in
    the cluster, or empty for what is of no one pool."""

    def __init__(self, client: ControlClient, check_may_tell: Callable[[str], None]) -> None:
        """`check_may_tell` raises what keeps a call from being made."""
        self._client, self._check_may_tell = client, check_may_tell
        self.refused: dict[str, str] = {}

    def tell(self, view: ClusterView, rolling: Rolling) -> None:
        """Shares go over before workers come or leave: none leave in a look that has not told them.
        Pools whose supervisor is silent are left alone."""
        if view.fleet is None:
            return
        is_weighed = self._weigh(view, rolling.weights)
        for name, pool in view.pools.items():
            decided = rolling.pools[name]
            for revision in pool.revisions.values():
                if revision.fleet is None and revision.group and not _is_over(revision, decided):
                    self._add(name, revision, decided.sizes[revision.revision.name])
        for name, pool in view.pools.items():
            self._size(name, pool, rolling.pools[name], may_shrink=is_weighed)
        known = view.revisions.keys() | view.groups.keys()
        for name in sorted(view.fleet.pools.keys() - known if is_weighed else ()):
            self._give_up(name, view.fleet.pools[name])

    def _add(self, pool: str, revision: RevisionView, size: int) -> None:
        assert revision.group is not None
        wanted, config = revision.revision, settings_in(revision.group)
        self._try(pool, partial(self._client.add_pool, wanted.name, config, size, wanted.cohort))

    def _weigh(self, view: ClusterView, weights: Mapping[str, int]) -> bool:
        """Whether shares are what they are to be."""
        assert view.fleet is not None
        told = {pool.cohort: pool.cohort_weight for pool in view.fleet.pools.values()}
        added = {each.revision.cohort: 0 for each in view.revisions.values() if each.group}
        if all(weights.get(cohort, 0) == weight for cohort, weight in (added | told).items()):
            return True
        return self._try("", partial(self._client.set_cohort_weights, weights))

    def _size(self, name: str, pool: PoolView, rolling: PoolRolling, *, may_shrink: bool) -> None:
        for revision in pool.revisions.values():
            own, known = revision.revision.name, revision.fleet
            if known is None:
                continue
            size = rolling.sizes[own] if may_shrink else max(rolling.sizes[own], revision.size)
            if known.desired_replicas != size:
                self._try(name, partial(self._client.set_replicas, own, size))
            plan = role_plan(pool, size)
            if known.role_plan != plan:
                self._try(name, partial(self._client.set_role_plan, own, *plan))
            if not known.desired_replicas and _is_over(revision, rolling):
                self._try(name, partial(self._client.remove_pool, own))

    def _give_up(self, name: str, pool: FleetPool) -> None:
        """Nothing speaks for it any more."""
        if pool.desired_replicas:
            self._try("", partial(self._client.set_replicas, name, 0))
        elif not pool.places:
            self._try("", partial(self._client.remove_pool, name))

    def _try(self, pool: str, call: Callable[[], object]) -> bool:
        """Whether it was taken."""
        self._check_may_tell("a call to the supervisor")
        try:
            call()
        except BatonError as error:
            before = f"{self.refused[pool]}; " if pool in self.refused else ""
            self.refused[pool] = f"{before}{error.message}"
            return False
        return True


def _is_over(revision: RevisionView, rolling: PoolRolling) -> bool:
    """Nothing is left of it, and nothing is to come."""
    own = revision.revision.name
    return not rolling.sizes[own] and own not in rolling.kept and revision.is_empty


def role_plan(pool: PoolView, size: int) -> tuple[int, int]:
    """A revision's part of its pool's plan, by how many of the workers it is to have: those that
    the division leaves over act in both roles."""
    prefill, decode = pool.role_plan
    if not pool.replicas or size >= pool.replicas:
        return prefill, decode
    return prefill * size // pool.replicas, decode * size // pool.replicas
