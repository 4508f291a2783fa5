"""`baton status` and `baton top`: what the control services report, as tables.

`status` shows each worker once. `top` shows how busy pools and workers are, once or until ctrl-C.
One unit serves, or two while one version of the model takes the place of another. Each has a
control service of its own, and each of these has the list of all units. While there are two, both
commands show a table of units, and the unit of each pool and worker.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from rich.console import Group
from rich.live import Live
from rich.text import Text

from baton import render
from baton.control_client import NOTHING_SEEN, ControlClient, seen_by_clients
from baton.errors import BatonError
from baton.v1 import common_pb2, control_pb2, worker_pb2
from cluster.registry.pairing import unpaired

# --- the fleets of all units ----------------------------------------------------------------------


Fleet = control_pb2.WatchFleetResponse

_ANSWER_S = 3.0  # of one unit of several: a silent one must not hold up the others' figures


@dataclass(frozen=True)
class UnitFleet:
    """`share`: of the requests; `fleet`: None while the unit's control service is silent."""

    code: str
    share: float
    fleet: Fleet | None

    @property
    def num_live(self) -> int | None:
        """Live workers of all pools."""
        return None if self.fleet is None else sum(pool.live_replicas for pool in self.fleet.pools)


class Fleets:
    """Ask the control services of all units, again and again over the same connections."""

    def __init__(self, control: str, reached: Mapping[str, str] | None = None) -> None:
        """`control`: address of a control service. `reached`: addresses of units by code, where
        those of the list lead nowhere from here. A unit that it lacks counts as silent."""
        self._control, self._reached = control, dict(reached or {})
        self._clients: dict[str, ControlClient] = {}

    def read(self) -> list[UnitFleet]:
        """The oldest unit first. Raises BatonError when no control service answers."""
        units = self._units()
        if len(units) == 1:
            return [UnitFleet(units[0].code, 1.0, self._client(self._control).fleet())]
        with ThreadPoolExecutor(len(units)) as threads:
            answers = list(threads.map(self._ask, map(self._address, units)))
        errors = [each for each in answers if isinstance(each, BatonError)]
        if len(errors) == len(answers):
            raise errors[0]
        return [
            UnitFleet(unit.code, unit.share, None if isinstance(answer, BatonError) else answer)
            for unit, answer in zip(units, answers, strict=True)
        ]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _units(self) -> Sequence[control_pb2.Unit]:
        """The list, and units that can be reached and get no requests yet."""
        listed = self._listed()
        codes = {unit.code for unit in listed}
        return [*listed, *(control_pb2.Unit(code=c) for c in self._reached if c not in codes)]

    def _listed(self) -> Sequence[control_pb2.Unit]:
        """From the first control service that answers."""
        errors = []
        for address in dict.fromkeys((self._control, *self._reached.values())):
            try:
                return self._client(address).units()
            except BatonError as error:
                errors.append(error)
        raise errors[0]

    def _address(self, unit: control_pb2.Unit) -> str | None:
        if self._reached:
            return self._reached.get(unit.code)
        return unit.control_address or self._control

    def _ask(self, address: str | None) -> Fleet | BatonError:
        if address is None:
            return BatonError("no address leads to the unit's control service")
        try:
            return self._client(address).fleet()
        except BatonError as error:
            return error

    def _client(self, address: str) -> ControlClient:
        if address not in self._clients:
            timeout_s = {"call_timeout_s": _ANSWER_S} if address != self._control else {}
            self._clients[address] = ControlClient(address, **timeout_s)
        return self._clients[address]


# --- one unit or two ------------------------------------------------------------------------------


_WATCH_EVERY_S = 1.0
_HERE = (control_pb2.WORKER_STATE_LIVE, control_pb2.WORKER_STATE_SUSPECT,
         control_pb2.WORKER_STATE_DRAINING)  # fmt: skip
_UNIT_COLUMNS = ("unit", ">requests", ">live workers")
_POOL_COLUMNS = ("pool", "role", ">live")
_WORKER_COLUMNS = (
    "worker", "pool", "state", ">running", ">waiting", ">reserved", ">queued", ">KV used",
    ">prefill", ">step", ">handoff", ">quarantined", "address",
)  # fmt: skip
_BUSY_POOL_COLUMNS = (
    "pool", "role", ">live", ">pending", ">TTFT", ">ITL", ">KV used", ">running", ">waiting",
    ">queued", ">step", ">output", ">prefill",
)  # fmt: skip
_BUSY_WORKER_COLUMNS = (
    "worker", "pool", "state", ">KV used", ">running", ">waiting", ">queued", ">step", ">output",
    ">prefill", ">handoff",
)  # fmt: skip


def _reading(arguments: argparse.Namespace) -> Fleets:
    return Fleets(arguments.control, dict(arguments.unit or ()))


def _units_table(units: Sequence[UnitFleet]) -> Group:
    rows = [
        [_name(each), f"{each.share:.0%}", "silent" if each.fleet is None else str(each.num_live)]
        for each in units
    ]
    return render.table("Units", _UNIT_COLUMNS, rows)


def _table(
    title: str,
    columns: Sequence[str],
    units: Sequence[UnitFleet],
    rows_of: Callable[[Fleet], Iterable[list[str]]],
) -> Group:
    """The rows of all units that answer. Their unit is the first column while there are several."""
    if len(units) == 1:
        rows = [row for _, fleet in _answering(units) for row in rows_of(fleet)]
        return render.table(title, columns, rows)
    rows = [[_name(unit), *row] for unit, fleet in _answering(units) for row in rows_of(fleet)]
    return render.table(title, ("unit", *columns), rows)


def _answering(units: Sequence[UnitFleet]) -> Iterator[tuple[UnitFleet, Fleet]]:
    return ((unit, unit.fleet) for unit in units if unit.fleet is not None)


def _name(unit: UnitFleet) -> str:
    return unit.code or "-"


def _said_of(unit: UnitFleet, units: Sequence[UnitFleet]) -> str:
    """What a line about one unit begins with."""
    return f"unit {_name(unit)}: " if len(units) > 1 else ""


# --- status ---------------------------------------------------------------------------------------


def status(arguments: argparse.Namespace) -> int:
    with _reading(arguments) as fleets:
        units = fleets.read()
    print_status(units)
    return 0


def print_status(units: Sequence[UnitFleet]) -> None:
    out = render.out()
    for unit, fleet in _answering(units):
        if fleet.model_fingerprint:
            line = f"{_said_of(unit, units)}model fingerprint {fleet.model_fingerprint.hex()}"
            out.print(line, style="dim", markup=False)
    if len(units) > 1:
        out.print(_units_table(units))
    out.print(_table("Pools", _POOL_COLUMNS, units, _pool_rows))
    for unit, fleet in _answering(units):
        for line, style in _remarks(fleet):
            out.print(_said_of(unit, units) + line, style=style, markup=False)
    if any(fleet.workers for _, fleet in _answering(units)):
        out.print(_table("Workers", _WORKER_COLUMNS, units, _worker_rows))
    else:
        out.print("no worker has registered yet", style="dim")


def _pool_rows(fleet: Fleet) -> list[list[str]]:
    return [
        [pool.name, role_name(pool.role), f"{pool.live_replicas} of {pool.desired_replicas}"]
        for pool in fleet.pools
    ]


def _remarks(fleet: Fleet) -> Iterator[tuple[str, str]]:
    """What starts, waits and fails: lines, each with its style."""
    registered = {worker.info.ref.worker_id for worker in fleet.workers}
    for pool in fleet.pools:
        for place in pool.places:
            if place.pod_name and place.worker_id not in registered:
                yield f"{place.worker_id} starts on pod {place.pod_name}", "dim"
        if pool.pending_replicas:
            yield f"{pool.name}: {pool.pending_replicas} wait for a pod with room", "yellow"
        if pool.last_error:
            failed = f"{pool.name}: {pool.num_failed_starts} failed starts, the last: "
            yield failed + pool.last_error, "red"
    for line in unpaired(fleet).values():
        yield line, "red"


def _worker_rows(fleet: Fleet) -> list[list[str]]:
    workers = sorted(
        fleet.workers, key=lambda worker: (worker.info.pool, worker.info.ref.worker_id)
    )
    return [_worker_row(worker) for worker in workers]


def _worker_row(worker: control_pb2.FleetWorker) -> list[str]:
    is_gone = worker.state == control_pb2.WORKER_STATE_GONE  # its last report is history
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
    """The share of KV memory in use; None without KV memory."""
    used = load.num_blocks - load.num_free_blocks - load.num_quarantined_blocks
    return used / load.num_blocks if load.num_blocks else None


def pool_and_role(worker: control_pb2.FleetWorker) -> str:
    """The pool, with the role in force if the worker could do more."""
    role = worker.active_role
    is_split = role not in (common_pb2.WORKER_ROLE_UNSPECIFIED, common_pb2.WORKER_ROLE_MIXED)
    return f"{worker.info.pool} as {role_name(role)}" if is_split else worker.info.pool


def state_name(state: control_pb2.WorkerState.ValueType) -> str:
    return control_pb2.WorkerState.Name(state).rpartition("STATE_")[2].lower()


def role_name(role: common_pb2.WorkerRole.ValueType) -> str:
    return common_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()


# --- top ------------------------------------------------------------------------------------------


def top(arguments: argparse.Namespace) -> int:
    with _reading(arguments) as fleets:
        if arguments.watch:
            _watch(fleets)
        else:
            render.out().print(screen(fleets.read()))
    return 0


def _watch(fleets: Fleets) -> None:
    """Until ctrl-C: a screen of its own on a terminal, one print after the other elsewhere. Raises
    BatonError when no control service answers any more."""
    console = render.out()
    with contextlib.suppress(KeyboardInterrupt):
        if not console.is_terminal:
            for group in _screens(fleets):
                console.print(group)
        else:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                for group in _screens(fleets):
                    live.update(group, refresh=True)


def _screens(fleets: Fleets) -> Iterator[Group]:
    while True:
        yield screen(fleets.read())
        time.sleep(_WATCH_EVERY_S)


def screen(units: Sequence[UnitFleet]) -> Group:
    """All tables, the busiest worker of each pool first."""
    arrivals = [_said_of(unit, units) + _arrivals(fleet) for unit, fleet in _answering(units)]
    return Group(
        *([_units_table(units)] if len(units) > 1 else ()),
        _table("Pools", _BUSY_POOL_COLUMNS, units, _busy_pool_rows),
        Text("\n".join(arrivals) + "\n"),
        _table("Workers", _BUSY_WORKER_COLUMNS, units, _busy_worker_rows),
    )


def _busy_pool_rows(fleet: Fleet) -> list[list[str]]:
    return [_busy_pool_row(fleet, pool) for pool in fleet.pools]


def _busy_worker_rows(fleet: Fleet) -> list[list[str]]:
    return [
        _busy_worker_row(worker)
        for pool in fleet.pools
        for worker in sorted(_workers(fleet, pool.name), key=_busiest_first)
    ]


@dataclass(frozen=True)
class Busy:
    """Of one worker or of several. Fractions and rates; None: unknown."""

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


def _busy_pool_row(fleet: Fleet, pool: control_pb2.PoolStatus) -> list[str]:
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


def _busy_worker_row(worker: control_pb2.FleetWorker) -> list[str]:
    return [
        worker.info.ref.worker_id,
        pool_and_role(worker),
        state_name(worker.state),
        *busy_of([worker]).cells(),
        render.bandwidth(worker.load.handoff_bytes_per_s if worker.state in _HERE else 0, 1e3),
    ]


def _arrivals(fleet: Fleet) -> str:
    """What the routers reported last, as a line."""
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
