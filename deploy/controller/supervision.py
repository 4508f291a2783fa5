"""What a unit's supervisor is asked for: pools, sizes, role plans, and where requests go.

Each look asks for what is not as it is wanted: one that has lost everything gets all of it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from baton.control_client import ControlClient
from baton.errors import BatonError
from baton.v1 import control_pb2
from deploy.controller.manifests.ray_cluster import settings_in
from deploy.controller.observed import FleetPool
from deploy.controller.view import PoolView, UnitView


class Supervision:
    """One look's calls; `refused` has what the supervisor did not take, by pool, or empty for what
    is of no pool that there is."""

    def __init__(self, client: ControlClient, check_may_tell: Callable[[str], None]) -> None:
        """`check_may_tell` raises what keeps a call from being made."""
        self._client, self._check_may_tell = client, check_may_tell
        self.refused: dict[str, str] = {}

    def tell(self, unit: UnitView, routes: Sequence[control_pb2.Unit]) -> None:
        """A supervisor that is silent is left alone. `routes`: the units and their shares."""
        if unit.fleet is None:
            return
        if routes:
            self._try("", partial(self._client.set_units, routes))
        for name, pool in unit.pools.items():
            if pool.fleet is not None:
                self._size(name, pool, pool.fleet)
            elif pool.group is not None and not pool.is_over:
                settings = settings_in(pool.group)
                self._try(name, partial(self._client.add_pool, name, settings, pool.size))
        known = unit.pools.keys() | unit.groups.keys()
        for name in sorted(unit.fleet.pools.keys() - known):
            self._give_up(name, unit.fleet.pools[name])

    def _size(self, name: str, pool: PoolView, known: FleetPool) -> None:
        if known.desired_replicas != pool.size:
            self._try(name, partial(self._client.set_replicas, name, pool.size))
        if known.role_plan != pool.role_plan:
            self._try(name, partial(self._client.set_role_plan, name, *pool.role_plan))
        if pool.is_over and not known.desired_replicas:
            self._try(name, partial(self._client.remove_pool, name))

    def _give_up(self, name: str, pool: FleetPool) -> None:
        """Nothing speaks for it any more."""
        if pool.desired_replicas:
            self._try("", partial(self._client.set_replicas, name, 0))
        elif not pool.places:
            self._try("", partial(self._client.remove_pool, name))

    def _try(self, pool: str, call: Callable[[], object]) -> None:
        self._check_may_tell("a call to the supervisor")
        try:
            call()
        except BatonError as error:
            before = f"{self.refused[pool]}; " if pool in self.refused else ""
            self.refused[pool] = f"{before}{error.message}"
