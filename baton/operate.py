"""`baton status`, `baton scale`, `baton drain`: everything asked of the control service."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from baton import render
from baton.control_client import ControlClient
from baton.errors import BatonError, DeadlineError, NotFoundError
from baton.progress import Steps
from baton.v1 import common_pb2, control_pb2

Fleet = control_pb2.WatchFleetResponse


def status(arguments: argparse.Namespace) -> int:
    with ControlClient(arguments.control) as control:
        fleet = control.fleet()
    print_fleet(fleet)
    return 0


def print_fleet(fleet: Fleet) -> None:
    pools = [
        [pool.name, _role(pool.role), f"{pool.live_replicas} of {pool.desired_replicas}"]
        for pool in fleet.pools
    ]
    render.print_table("Pools", ("pool", "role", ">live"), pools)
    for pool in fleet.pools:
        if pool.last_error:
            failed = f"{pool.name}: {pool.num_failed_starts} failed starts, the last: "
            render.out().print(failed + pool.last_error, style="red", markup=False)
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


def _worker_row(worker: control_pb2.FleetWorker) -> list[str]:
    info, load = worker.info, worker.load
    used = load.num_blocks - load.num_free_blocks - load.num_quarantined_blocks
    share = f"{used / load.num_blocks:.0%}" if load.num_blocks else "-"
    return [
        info.ref.worker_id,
        info.pool,
        _name(control_pb2.WorkerState.Name(worker.state)),
        str(load.num_running),
        str(load.num_waiting),
        str(load.num_reserved),
        f"{load.num_queued_tokens} tok",
        f"{share} of {load.num_blocks}" if load.num_blocks else "-",
        render.rate(load.prefill_tokens_per_s, "tok/s"),
        render.milliseconds(load.decode_step_s * 1e3) if load.decode_step_s else "-",
        render.bandwidth(load.handoff_bytes_per_s, 1e3),
        f"{load.num_quarantined_blocks} blocks",
        info.address,
    ]


def _name(constant: str) -> str:
    return constant.rpartition("STATE_")[2].lower()


def _role(role: common_pb2.WorkerRole.ValueType) -> str:
    return common_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()


def scale(arguments: argparse.Namespace) -> int:
    pool, replicas = arguments.pool, arguments.replicas
    with ControlClient(arguments.control) as control:
        known = [entry.name for entry in control.fleet().pools]
        if pool not in known:
            raise NotFoundError(f"no pool {pool!r}; there are: {', '.join(known) or 'none'}")
        previous = control.set_replicas(pool, replicas)
        render.out().print(f"{pool}: {previous} → {replicas}")
        if arguments.no_wait or previous == replicas:
            return 0
        return _wait(
            control,
            f"{pool}: waiting for {replicas} live",
            lambda fleet: _live(fleet, pool) == replicas,
            arguments.timeout,
        )


def _live(fleet: Fleet, pool: str) -> int | None:
    return next((entry.live_replicas for entry in fleet.pools if entry.name == pool), None)


def drain(arguments: argparse.Namespace) -> int:
    name = arguments.worker
    with ControlClient(arguments.control) as control:
        incarnation = _incarnation(control.fleet(), name)
        if incarnation is None:
            raise NotFoundError(f"no worker {name!r}")
        control.drain(name)
        if arguments.no_wait:
            return 0
        return _wait(
            control,
            f"{name}: finishing what it runs",
            lambda fleet: _incarnation(fleet, name) != incarnation,
            arguments.timeout,
        )


def _incarnation(fleet: Fleet, worker_id: str) -> int | None:
    """Which start of a worker is in the fleet; None when none is."""
    for worker in fleet.workers:
        if worker.info.ref.worker_id == worker_id:
            gone = worker.state == control_pb2.WORKER_STATE_GONE
            return None if gone else worker.info.ref.incarnation
    return None


def _wait(
    control: ControlClient, message: str, is_done: Callable[[Fleet], bool], timeout_s: float
) -> int:
    """Follow the fleet until it is as wanted."""
    with Steps(render.err()) as steps:
        steps(message)
        try:
            for fleet in control.watch_fleet(timeout_s):
                if is_done(fleet):
                    return 0
        except DeadlineError as error:
            raise BatonError(
                f"{message}: not done after {timeout_s:g} s; it goes on, see `baton status`"
            ) from error
    raise BatonError("the control service ended the watch; see `baton status`")
