"""`baton status`, `scale`, `roles`, `drain`: everything asked of the control service."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from baton import render
from baton.control_client import ControlClient
from baton.errors import BatonError, DeadlineError, NotFoundError
from baton.v1 import common_pb2, control_pb2, worker_pb2
from cli.progress import Steps
from cluster.pools.role_plan import RolePlan
from cluster.registry.pairing import unpaired

Fleet = control_pb2.WatchFleetResponse

_SERVING = (control_pb2.WORKER_STATE_LIVE, control_pb2.WORKER_STATE_SUSPECT)
_FAILED_STARTS = 2  # a first one may be bad luck


def status(arguments: argparse.Namespace) -> int:
    with ControlClient(arguments.control) as control:
        fleet = control.fleet()
    print_fleet(fleet)
    return 0


def print_fleet(fleet: Fleet) -> None:
    if fleet.model_fingerprint:
        render.out().print(f"model fingerprint {fleet.model_fingerprint.hex()}", style="dim")
    _print_pools(fleet)
    registered = {worker.info.ref.worker_id for worker in fleet.workers}
    for pool in fleet.pools:
        for place in pool.places:
            if place.pod_name and place.worker_id not in registered:
                starting = f"{place.worker_id} starts on pod {place.pod_name}"
                render.out().print(starting, style="dim", markup=False)
        if pool.pending_replicas:
            pending = f"{pool.name}: {pool.pending_replicas} wait for a pod with room"
            render.out().print(pending, style="yellow", markup=False)
        if pool.last_error:
            failed = f"{pool.name}: {pool.num_failed_starts} failed starts, the last: "
            render.out().print(failed + pool.last_error, style="red", markup=False)
    for line in unpaired(fleet).values():
        render.out().print(line, style="red", markup=False)
    workers = sorted(
        fleet.workers, key=lambda worker: (worker.info.pool, worker.info.ref.worker_id)
    )
    columns = (
        "worker", "pool", "state", ">running", ">waiting", ">reserved", ">queued", ">KV used",
        ">prefill", ">step", ">handoff", ">quarantined", "address",
    )  # fmt: skip
    if workers:
        render.print_table("Workers", columns, [_worker_row(worker) for worker in workers])
    else:
        render.out().print("no worker has registered yet", style="dim")


def _print_pools(fleet: Fleet) -> None:
    rows = [
        [pool.name, role_name(pool.role), f"{pool.live_replicas} of {pool.desired_replicas}"]
        for pool in fleet.pools
    ]
    render.print_table("Pools", ("pool", "role", ">live"), rows)


def _worker_row(worker: control_pb2.FleetWorker) -> list[str]:
    is_gone = worker.state == control_pb2.WORKER_STATE_GONE  # what it last told is history
    info, load = worker.info, worker_pb2.WorkerLoad() if is_gone else worker.load
    share = kv_use(load)
    return [
        info.ref.worker_id,
        pool_and_role(worker),
        state_name(worker.state),
        str(load.num_running),
        str(load.num_waiting),
        str(load.num_reserved),
        f"{load.num_queued_tokens} tok",
        "-" if share is None else f"{share:.0%} of {load.num_blocks}",
        render.rate(load.prefill_tokens_per_s, "tok/s"),
        render.milliseconds(load.decode_step_s * 1e3) if load.decode_step_s else "-",
        render.bandwidth(load.handoff_bytes_per_s, 1e3),
        f"{load.num_quarantined_blocks} blocks",
        info.address,
    ]


def kv_use(load: worker_pb2.WorkerLoad) -> float | None:
    """The part of KV memory that holds something; None where there is none."""
    used = load.num_blocks - load.num_free_blocks - load.num_quarantined_blocks
    return used / load.num_blocks if load.num_blocks else None


def pool_and_role(worker: control_pb2.FleetWorker) -> str:
    """With the role in force, of a worker that could do more."""
    role = worker.active_role
    is_split = role not in (common_pb2.WORKER_ROLE_UNSPECIFIED, common_pb2.WORKER_ROLE_MIXED)
    return f"{worker.info.pool} as {role_name(role)}" if is_split else worker.info.pool


def state_name(state: control_pb2.WorkerState.ValueType) -> str:
    return control_pb2.WorkerState.Name(state).rpartition("STATE_")[2].lower()


def role_name(role: common_pb2.WorkerRole.ValueType) -> str:
    return common_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()


def scale(arguments: argparse.Namespace) -> int:
    pool, replicas = arguments.pool, arguments.replicas
    with ControlClient(arguments.control) as control:
        known = [entry.name for entry in control.fleet().pools]
        if pool not in known:
            raise NotFoundError(f"no pool {pool!r}; there are: {', '.join(known) or 'none'}")
        previous = control.set_replicas(pool, replicas)
        render.out().print(f"{pool}: {previous} → {replicas}")
        if arguments.no_wait:
            return 0
        return _wait(control, lambda fleet: _scaled(fleet, pool, replicas), arguments.timeout)


def _scaled(fleet: Fleet, pool: str, replicas: int) -> _Progress:
    """How far a pool is. Raises BatonError when its workers do not start."""
    now = next((entry for entry in fleet.pools if entry.name == pool), control_pb2.PoolStatus())
    if now.live_replicas < replicas and now.num_failed_starts >= _FAILED_STARTS:
        raise BatonError(f"the {pool} pool does not start: {now.last_error}")
    leaving = sum(
        worker.info.pool == pool and worker.state == control_pb2.WORKER_STATE_DRAINING
        for worker in fleet.workers
    )
    message = f"{pool}: {now.live_replicas} live, {replicas} wanted"
    if leaving:
        message += f", {leaving} leaving"
    return _Progress(message, now.live_replicas == replicas and not leaving)


def roles(arguments: argparse.Namespace) -> int:
    """Takes effect with the next request: no process restarts, and what runs ends where it is."""
    pool, prefill, decode = arguments.pool, arguments.prefill, arguments.decode
    plan = RolePlan(prefill, decode)
    with ControlClient(arguments.control) as control:
        num_there = sum(
            worker.info.pool == pool and worker.state in _SERVING
            for worker in control.fleet().workers
        )
        control.set_role_plan(pool, prefill, decode)
    told = f"{pool}: {prefill} prefill alone, {decode} decode alone, the rest act as both"
    if plan != RolePlan() and not plan.leaves_both_roles(num_there):
        told += f"; of {num_there} workers that leaves not one for each role: all act as both"
    render.out().print(told)
    return 0


def drain(arguments: argparse.Namespace) -> int:
    name = arguments.worker
    with ControlClient(arguments.control) as control:
        here = _incarnations(control.fleet())
        if name not in here:
            raise NotFoundError(f"no worker {name!r}; there are: {', '.join(here) or 'none'}")
        control.drain(name)
        if arguments.no_wait:
            return 0
        status = _wait(
            control,
            lambda fleet: _Progress(
                f"{name}: finishing what it runs", _incarnations(fleet).get(name) != here[name]
            ),
            arguments.timeout,
        )
        render.out().print(f"{name} has left", markup=False)
        return status


def _incarnations(fleet: Fleet) -> dict[str, int]:
    """Which start of each worker that is not gone is in the fleet."""
    return {
        worker.info.ref.worker_id: worker.info.ref.incarnation
        for worker in sorted(fleet.workers, key=lambda worker: worker.info.ref.worker_id)
        if worker.state != control_pb2.WORKER_STATE_GONE
    }


@dataclass(frozen=True)
class _Progress:
    """What is said of a change under way, and whether it is over."""

    message: str
    is_done: bool


def _wait(
    control: ControlClient, progress_of: Callable[[Fleet], _Progress], timeout_s: float
) -> int:
    """Follow the fleet until it is as wanted; say how far it is whenever that changes."""
    told = "waiting for the control service"
    with Steps(render.err()) as steps:
        try:
            for fleet in control.watch_fleet(timeout_s):
                progress = progress_of(fleet)
                if progress.message != told:
                    told = progress.message
                    steps(told)
                if progress.is_done:
                    return 0
        except DeadlineError as error:
            raise BatonError(
                f"{told}: not done after {timeout_s:g} s; it goes on, see `baton status`"
            ) from error
    raise BatonError("the control service ended the watch; see `baton status`")
