"""What a unit's supervisor is asked for: pools, sizes, role plans, pods that go, and where requests
go.

Each look asks for what is not as it is wanted: a supervisor that has lost everything gets all of it
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from baton.control.client import ControlClient
from baton.errors import BatonError
from baton.v1 import control_pb2
from deploy.controller.manifests.ray_cluster import settings_in
from deploy.controller.observed.view import PoolView, UnitView
from deploy.controller.reconcile.kuberay import size_of

_Call = tuple[str, Callable[[], object]]
"""About which pool, or empty: about none that there is."""


def supervise(
    client: ControlClient,
    unit: UnitView,
    routes: Sequence[control_pb2.Unit],
    check_may_call: Callable[[str], None],
) -> dict[str, str]:
    """Ask a supervisor for what is wanted. Returns what it refused, by pool. `routes`: the units
    and their shares; `check_may_call` raises what keeps a call from being made."""
    refused: dict[str, list[str]] = {}
    for pool, call in _calls(client, unit, routes):
        check_may_call("a call to the supervisor")
        try:
            call()
        except BatonError as error:
            refused.setdefault(pool, []).append(error.message)
    return {pool: "; ".join(messages) for pool, messages in refused.items()}


def _calls(
    client: ControlClient, unit: UnitView, routes: Sequence[control_pb2.Unit]
) -> Iterator[_Call]:
    """Yield the calls that a supervisor needs: none while it is silent."""
    if unit.fleet is None:
        return
    # A group that is left as it is has names, too.
    named = (group["scaleStrategy"]["workersToDelete"] for group in unit.groups.values())
    closing = frozenset[str]().union(*named, *(size_of(p).to_close for p in unit.pools.values()))
    if closing != unit.fleet.closed_pods:  # before any pool gets larger
        yield "", partial(client.close_pods, sorted(closing))
    if routes:
        yield "", partial(client.set_units, routes)
    for name, pool in unit.pools.items():
        yield from ((name, call) for call in _pool_calls(client, name, pool))
    known = unit.pools.keys() | unit.groups.keys()
    for name in sorted(unit.fleet.pools.keys() - known):  # nobody asks for it any more
        if unit.fleet.pools[name].desired_replicas:
            yield "", partial(client.set_replicas, name, 0)
        elif not unit.fleet.pools[name].slots:
            yield "", partial(client.remove_pool, name)


def _pool_calls(client: ControlClient, name: str, pool: PoolView) -> Iterator[Callable[[], object]]:
    known = pool.fleet
    if known is None:
        if pool.group is not None and not pool.is_over:
            yield partial(client.add_pool, name, settings_in(pool.group), pool.size)
        return
    if known.desired_replicas != pool.size:
        yield partial(client.set_replicas, name, pool.size)
    if known.role_plan != pool.role_plan:
        yield partial(client.set_role_plan, name, *pool.role_plan)
    if pool.is_over and not known.desired_replicas:
        yield partial(client.remove_pool, name)
