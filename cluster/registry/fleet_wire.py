"""The registry's snapshot and its list of units as protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.v1 import common_pb2, control_pb2, worker_pb2
from cluster.pools.pool_table import Pool
from cluster.pools.role_plan import Role
from cluster.registry.registry import FleetEntry, FleetSnapshot, WorkerState
from cluster.registry.units import Unit

_STATES = {
    WorkerState.STARTING: control_pb2.WORKER_STATE_STARTING,
    WorkerState.LIVE: control_pb2.WORKER_STATE_LIVE,
    WorkerState.SUSPECT: control_pb2.WORKER_STATE_SUSPECT,
    WorkerState.DRAINING: control_pb2.WORKER_STATE_DRAINING,
    WorkerState.GONE: control_pb2.WORKER_STATE_GONE,
}
ROLES = {
    Role.PREFILL: common_pb2.WORKER_ROLE_PREFILL,
    Role.DECODE: common_pb2.WORKER_ROLE_DECODE,
    Role.MIXED: common_pb2.WORKER_ROLE_MIXED,
}


def fleet_message(snapshot: FleetSnapshot) -> control_pb2.WatchFleetResponse:
    return control_pb2.WatchFleetResponse(
        version=snapshot.version,
        workers=[
            control_pb2.FleetWorker(
                info=control_pb2.WorkerInfo.FromString(entry.registration.info),
                state=_STATES[entry.state],
                load=worker_pb2.WorkerLoad.FromString(entry.load),
                active_role=_active_role(entry),
            )
            for entry in snapshot.workers
        ],
        pools=[_pool_message(pool, snapshot.standings) for pool in snapshot.pools],
        silent_routers=[
            control_pb2.SilentRouter(router_id=each.router_id, silent_s=each.silent_s)
            for each in snapshot.silent_routers
        ],
        routers=[control_pb2.ReportRouterRequest.FromString(told) for told in snapshot.routers],
        keeps_pools=snapshot.keeps_pools,
        settles=snapshot.settles,
        model_fingerprint=snapshot.model_fingerprint,
    )


def units_message(units: Sequence[Unit]) -> control_pb2.WatchUnitsResponse:
    return control_pb2.WatchUnitsResponse(units=[control_pb2.Unit(**vars(u)) for u in units])


def read_units(message: control_pb2.SetUnitsRequest) -> list[Unit]:
    return [Unit(unit.code, unit.control_address, unit.share) for unit in message.units]


def _pool_message(pool: Pool, standings: Mapping[str, int]) -> control_pb2.PoolStatus:
    return control_pb2.PoolStatus(
        name=pool.name,
        role=ROLES[pool.role],
        desired_replicas=pool.desired_replicas,
        live_replicas=pool.live_replicas,
        last_error=pool.last_error,
        num_failed_starts=pool.num_failed_starts,
        pending_replicas=pool.pending_replicas,
        role_plan=_plan_message(pool),
        settings_digest=pool.settings_digest,
        places=[
            control_pb2.PoolPlace(
                worker_id=place.worker_id,
                pod_name=place.pod_name or "",
                standing=standings.get(place.worker_id),
            )
            for place in pool.slots
        ],
        comes_back_for=[ROLES[role] for role in pool.comes_back_for],
    )


def _active_role(entry: FleetEntry) -> common_pb2.WorkerRole.ValueType:
    role = entry.active_role
    return common_pb2.WORKER_ROLE_UNSPECIFIED if role is None else ROLES[role]


def _plan_message(pool: Pool) -> control_pb2.RolePlan | None:
    if pool.role is not Role.MIXED:
        return None
    return control_pb2.RolePlan(prefill=pool.role_plan.prefill, decode=pool.role_plan.decode)
