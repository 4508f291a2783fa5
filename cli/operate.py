"""`baton scale`, `roles`, `drain` change a running cluster; `deploy` prints a manifest."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import yaml

from baton import render
from baton.config.cluster import ClusterConfig, load_config
from baton.control.client import ControlClient
from baton.errors import BatonError, DeadlineError, NotFoundError
from baton.v1 import control_pb2
from cli.progress import Steps
from cli.status import Fleet
from cluster.role_plan import RolePlan

_SERVING = (control_pb2.WORKER_STATE_LIVE, control_pb2.WORKER_STATE_SUSPECT)
_FAILED_STARTS = 2  # a first one may be bad luck


def scale(arguments: argparse.Namespace) -> int:
    pool, replicas = arguments.pool, arguments.replicas
    with ControlClient(arguments.control, identity=arguments.identity) as control:
        known = [entry.name for entry in control.fleet().pools]
        if pool not in known:
            raise NotFoundError(f"no pool {pool!r}; there are: {', '.join(known) or 'none'}")
        previous = control.set_replicas(pool, replicas)
        render.out().print(f"{pool}: {previous} → {replicas}")
        if arguments.no_wait:
            return 0
        return _wait(control, lambda fleet: _scaled(fleet, pool, replicas), arguments.timeout)


def _scaled(fleet: Fleet, pool: str, replicas: int) -> tuple[str, bool]:
    """Say how far a pool's change is, and whether it is over. Raises BatonError when its workers do
    not start."""
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
    return message, now.live_replicas == replicas and not leaving


def roles(arguments: argparse.Namespace) -> int:
    """Split a mixed pool's roles from the next request on. No process restarts, and running
    requests end where they are."""
    pool, prefill, decode = arguments.pool, arguments.prefill, arguments.decode
    plan = RolePlan(prefill, decode)
    with ControlClient(arguments.control, identity=arguments.identity) as control:
        num_there = sum(
            worker.info.pool == pool and worker.state in _SERVING
            for worker in control.fleet().workers
        )
        control.set_role_plan(pool, prefill, decode)
    message = f"{pool}: {prefill} prefill alone, {decode} decode alone, the rest act as both"
    if plan != RolePlan() and not plan.leaves_both_roles(num_there):
        message += f"; too few workers ({num_there}) for both roles, so all act as both"
    render.out().print(message)
    return 0


def drain(arguments: argparse.Namespace) -> int:
    name = arguments.worker
    with ControlClient(arguments.control, identity=arguments.identity) as control:
        here = _incarnations(control.fleet())
        if name not in here:
            raise NotFoundError(f"no worker {name!r}; there are: {', '.join(here) or 'none'}")
        control.drain(name)
        if arguments.no_wait:
            return 0
        doing = f"{name}: finishing what it runs"
        status = _wait(
            control,
            lambda fleet: (doing, _incarnations(fleet).get(name) != here[name]),
            arguments.timeout,
        )
        render.out().print(f"{name} has left", markup=False)
        return status


def _incarnations(fleet: Fleet) -> dict[str, int]:
    """Return the incarnation of each worker that is not gone."""
    return {
        worker.info.ref.worker_id: worker.info.ref.incarnation
        for worker in sorted(fleet.workers, key=lambda worker: worker.info.ref.worker_id)
        if worker.state != control_pb2.WORKER_STATE_GONE
    }


def _wait(
    control: ControlClient, progress_of: Callable[[Fleet], tuple[str, bool]], timeout_s: float
) -> int:
    """Follow the fleet until the change is done, and print each progress."""
    message = "waiting for the control service"
    with Steps(render.err()) as steps:
        try:
            for fleet in control.watch_fleet(timeout_s):
                former = message
                message, is_done = progress_of(fleet)
                if message != former:
                    steps(message)
                if is_done:
                    return 0
        except DeadlineError as error:
            raise BatonError(
                f"{message}: not done after {timeout_s:g} s; the change goes on, see `baton status`"
            ) from error
    raise BatonError("the control service ended the watch; see `baton status`")


def deploy(arguments: argparse.Namespace) -> int:
    """Print a cluster file as a manifest for `kubectl apply -f -`."""
    from deploy.api.write import secrets_to_make, serving_cluster

    config = load_config(arguments.file) if arguments.file else ClusterConfig()
    manifest = serving_cluster(config, arguments.name, arguments.namespace)
    for command in secrets_to_make(config, arguments.name):
        namespace = f" -n {arguments.namespace}" if arguments.namespace else ""
        print(f"# first: {command}{namespace}")
    print(yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True), end="")
    return 0
