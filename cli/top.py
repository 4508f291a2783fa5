"""`baton top`: how busy pools and workers are, once or as long as one looks."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.live import Live
from rich.text import Text

from baton import render
from baton.control_client import ControlClient
from baton.errors import UnavailableError
from baton.seen_by_clients import NOTHING_SEEN, seen_by_clients
from baton.v1 import control_pb2
from cli.operate import Fleet, kv_use, pool_and_role, role_name, state_name

_WATCH_S = 7 * 86400.0
_HERE = (control_pb2.WORKER_STATE_LIVE, control_pb2.WORKER_STATE_SUSPECT,
         control_pb2.WORKER_STATE_DRAINING)  # fmt: skip
_POOL_COLUMNS = (
    "pool", "role", ">live", ">pending", ">TTFT", ">ITL", ">KV used", ">running", ">waiting",
    ">queued", ">step", ">output", ">prefill",
)  # fmt: skip
_WORKER_COLUMNS = (
    "worker", "pool", "state", ">KV used", ">running", ">waiting", ">queued", ">step", ">output",
    ">prefill", ">handoff",
)  # fmt: skip


def top(arguments: argparse.Namespace) -> int:
    with ControlClient(arguments.control) as control:
        if arguments.watch:
            _watch(control)
        else:
            render.out().print(screen(control.fleet()))
    return 0


def _watch(control: ControlClient) -> None:
    """Until ctrl-C: a screen of its own on a terminal, one print after the other elsewhere."""
    console = render.out()
    with contextlib.suppress(KeyboardInterrupt):
        if not console.is_terminal:
            for fleet in control.watch_fleet(_WATCH_S):
                console.print(screen(fleet))
        else:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                for fleet in control.watch_fleet(_WATCH_S):
                    live.update(screen(fleet), refresh=True)
        raise UnavailableError("the control service ended the watch")


def screen(fleet: Fleet) -> Group:
    """All tables, the busiest worker of each pool first."""
    pools = [_pool_row(fleet, pool) for pool in fleet.pools]
    workers = [
        _worker_row(worker)
        for pool in fleet.pools
        for worker in sorted(_workers(fleet, pool.name), key=_busiest_first)
    ]
    return Group(
        render.table("Pools", _POOL_COLUMNS, pools),
        Text(_arrivals(fleet) + "\n"),
        render.table("Workers", _WORKER_COLUMNS, workers),
    )


@dataclass(frozen=True)
class Busy:
    """Of one worker or of several. Fractions and rates; None where nothing tells."""

    kv_use: float | None
    """Of the fullest worker."""
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    decode_step_s: float | None
    """Of the slowest worker."""
    output_tokens_per_s: float
    prefill_tokens_per_s: float
    """What the workers can do, as each has learned."""

    def cells(self) -> list[str]:
        return [
            "-" if self.kv_use is None else f"{self.kv_use:.0%}",
            str(self.num_running),
            str(self.num_waiting),
            f"{self.num_queued_tokens} tok",
            _milliseconds(self.decode_step_s),
            render.rate(self.output_tokens_per_s, "tok/s"),
            render.rate(self.prefill_tokens_per_s, "tok/s"),
        ]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else render.milliseconds(seconds * 1e3)


def busy_of(workers: Iterable[control_pb2.FleetWorker]) -> Busy:
    loads = [worker.load for worker in workers if worker.state in _HERE]
    uses = [use for load in loads if (use := kv_use(load)) is not None]
    decoding = [load for load in loads if load.num_running and load.decode_step_s]
    return Busy(
        kv_use=max(uses, default=None),
        num_running=sum(load.num_running for load in loads),
        num_waiting=sum(load.num_waiting for load in loads),
        num_queued_tokens=sum(load.num_queued_tokens for load in loads),
        decode_step_s=max((load.decode_step_s for load in decoding), default=None),
        output_tokens_per_s=sum(load.num_running / load.decode_step_s for load in decoding),
        prefill_tokens_per_s=sum(load.prefill_tokens_per_s for load in loads),
    )


def _workers(fleet: Fleet, pool: str) -> Sequence[control_pb2.FleetWorker]:
    return [worker for worker in fleet.workers if worker.info.pool == pool]


def _busiest_first(worker: control_pb2.FleetWorker) -> tuple[int, str]:
    busy = busy_of([worker])
    return -(busy.num_running + busy.num_waiting), worker.info.ref.worker_id


def _pool_row(fleet: Fleet, pool: control_pb2.PoolStatus) -> list[str]:
    live = f"{pool.live_replicas} of {pool.desired_replicas}"
    seen = seen_by_clients(fleet.routers).get(pool.name, NOTHING_SEEN)
    return [
        pool.name,
        role_name(pool.role),
        live,
        str(pool.pending_replicas or "-"),
        _milliseconds(seen.ttft_s),
        _milliseconds(seen.itl_s),
        *busy_of(_workers(fleet, pool.name)).cells(),
    ]


def _worker_row(worker: control_pb2.FleetWorker) -> list[str]:
    return [
        worker.info.ref.worker_id,
        pool_and_role(worker),
        state_name(worker.state),
        *busy_of([worker]).cells(),
        render.bandwidth(worker.load.handoff_bytes_per_s if worker.state in _HERE else 0, 1e3),
    ]


def _arrivals(fleet: Fleet) -> str:
    """What the routers told last, as a line."""
    routers = fleet.routers
    silent_s = [each.silent_s for each in fleet.silent_routers]
    silent = [f"silent {len(silent_s)}, for {max(silent_s):.0f} s"] if silent_s else []
    if not routers:
        return " · ".join(["no router reports", *silent])
    held = sum(router.num_held for router in routers)
    parts = [
        f"routers {len(routers)}",
        *silent,
        f"arriving {sum(router.requests_per_s for router in routers):.1f} requests/s",
        f"{sum(router.uncached_tokens_per_s for router in routers):,.0f} uncached tok/s",
        f"waiting for prefill {sum(r.waiting_for_prefill.num_requests for r in routers)}",
        f"for decode {sum(r.waiting_for_decode.num_requests for r in routers)}",
    ]
    return " · ".join(parts + ([f"held, for want of workers, {held}"] if held else []))
