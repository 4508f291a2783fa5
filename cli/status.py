"""`baton status` and `baton top`: what the control services report, as tables.

Both show how busy pools and workers are. `status` adds what starts, waits and fails. `top` adds
what arrives, and may go on until ctrl-C. One unit serves, or two while one version takes the place
of another. Each has a control service of its own, and each of these has the list of all
units. While there are two, both commands show a table of units, and the unit of each pool and
worker.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from baton import render
from baton.control.client import NOTHING_SEEN, ControlClient, seen_by_clients
from baton.errors import BatonError
from baton.v1 import common_pb2, control_pb2, worker_pb2
from cluster.registry.pairing import unpaired

# --- the fleets of all units ----------------------------------------------------------------------


Fleet = control_pb2.WatchFleetResponse

_ANSWER_S = 3.0  # of one unit of several: a silent one must not hold up the others' figures


@dataclass(frozen=True)
class UnitFleet:
    """A unit, its `share` of the requests, and its `fleet`: None while its control service is
    silent."""

    code: str
    share: float
    fleet: Fleet | None

    @property
    def num_live(self) -> int | None:
        """Count the live workers of all pools."""
        return None if self.fleet is None else sum(pool.live_replicas for pool in self.fleet.pools)


class Fleets(contextlib.AbstractContextManager["Fleets"]):
    """Ask the control services of all units, again and again over the same connections."""

    def __init__(
        self,
        control: str,
        reached: Mapping[str, str] | None = None,
        identity: str | None = None,
    ) -> None:
        """Ask the control service at `control`. `reached` has addresses of units by code, where
        those of the list lead nowhere from here; a unit that it lacks counts as silent. `identity`
        is the folder that the command names."""
        self._control, self._reached, self._identity = control, dict(reached or {}), identity
        self._clients: dict[str, ControlClient] = {}

    def read(self) -> list[UnitFleet]:
        """Read all units, the oldest first. Raises BatonError when no control service answers."""
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

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    def _units(self) -> Sequence[control_pb2.Unit]:
        """Return the listed units, and those that can be reached and get no requests yet."""
        listed = self._listed()
        codes = {unit.code for unit in listed}
        return [*listed, *(control_pb2.Unit(code=c) for c in self._reached if c not in codes)]

    def _listed(self) -> Sequence[control_pb2.Unit]:
        """Return the list of the first control service that answers."""
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
            client = ControlClient(address, identity=self._identity, **timeout_s)
            self._clients[address] = client
        return self._clients[address]


# --- tables ---------------------------------------------------------------------------------------


_WATCH_EVERY_S = 1.0
_HERE = (control_pb2.WORKER_STATE_LIVE, control_pb2.WORKER_STATE_SUSPECT,
         control_pb2.WORKER_STATE_DRAINING)  # fmt: skip
_UNIT_COLUMNS = ("unit", ">requests", ">live workers")
_BUSY_COLUMNS = (
    ">KV used", ">running", ">waiting", ">queued", ">step", ">output", ">prefill", ">handoff",
)  # fmt: skip
_POOL_COLUMNS = ("pool", "role", ">live", ">pending", ">TTFT", ">ITL", *_BUSY_COLUMNS)
_WORKER_COLUMNS = (
    "worker", "pool", "state", *_BUSY_COLUMNS, ">reserved", ">quarantined", "address",
)  # fmt: skip


def _tables(units: Sequence[UnitFleet], between: Text) -> Group:
    """Print all units, pools and workers; `between` stands between pools and workers."""
    parts: list[RenderableType] = [_table("Pools", _POOL_COLUMNS, units, _pool_rows), between]
    if len(units) > 1:
        parts.insert(0, _units_table(units))
    if any(fleet.workers for _, fleet in _answering(units)):
        parts.append(_table("Workers", _WORKER_COLUMNS, units, _worker_rows))
    else:
        parts.append(Text("no worker has registered yet", style="dim"))
    return Group(*parts)


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
    """Make a table of all units that answer. Their unit is the first column while there are
    several."""
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
    """Return what a line about one unit begins with."""
    return f"unit {_name(unit)}: " if len(units) > 1 else ""


def _pool_rows(fleet: Fleet) -> Iterator[list[str]]:
    seen_in = seen_by_clients(fleet.routers)
    for pool in fleet.pools:
        seen = seen_in.get(pool.name, NOTHING_SEEN)
        workers = [worker for worker in fleet.workers if worker.info.pool == pool.name]
        yield [
            pool.name,
            _role_name(pool.role),
            f"{pool.live_replicas} of {pool.desired_replicas}",
            str(pool.pending_replicas or "-"),
            _milliseconds(seen.ttft_s),
            _milliseconds(seen.itl_s),
            *_busy_cells(map(_load, workers)),
        ]


def _worker_rows(fleet: Fleet) -> Iterator[list[str]]:
    """List the workers' rows, the busiest of each pool first."""
    for worker in sorted(fleet.workers, key=_busiest_of_pool_first):
        info, load = worker.info, _load(worker)
        yield [
            info.ref.worker_id,
            _pool_and_role(worker),
            control_pb2.WorkerState.Name(worker.state).rpartition("STATE_")[2].lower(),
            *_busy_cells([load]),
            str(load.num_reserved),
            f"{load.num_quarantined_blocks} of {load.num_blocks} blocks",
            info.address,
        ]


def _load(worker: control_pb2.FleetWorker) -> worker_pb2.WorkerLoad:
    """Return what a worker reported last; nothing for one that is not here."""
    return worker.load if worker.state in _HERE else worker_pb2.WorkerLoad()


def _busiest_of_pool_first(worker: control_pb2.FleetWorker) -> tuple[str, int, str]:
    load = _load(worker)
    return worker.info.pool, -(load.num_running + load.num_waiting), worker.info.ref.worker_id


def _busy_cells(workers: Iterable[worker_pb2.WorkerLoad]) -> list[str]:
    """Show how busy one worker is, or several: the KV of the fullest, the step of the slowest, what
    all put out, and what they can prefill, as each has learned."""
    loads = list(workers)
    uses = [
        1 - (load.num_free_blocks + load.num_quarantined_blocks) / load.num_blocks
        for load in loads
        if load.num_blocks
    ]
    decoding = [load for load in loads if load.num_running and load.decode_step_s]
    output_per_s = sum(load.num_running / load.decode_step_s for load in decoding)
    return [
        f"{max(uses):.0%}" if uses else "-",
        str(sum(load.num_running for load in loads)),
        str(sum(load.num_waiting for load in loads)),
        f"{sum(load.num_queued_tokens for load in loads)} tok",
        _milliseconds(max((load.decode_step_s for load in decoding), default=None)),
        render.rate(output_per_s, "tok/s"),
        render.rate(sum(load.prefill_tokens_per_s for load in loads), "tok/s"),
        render.bandwidth(sum(load.handoff_bytes_per_s for load in loads), 1e3),
    ]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else render.milliseconds(seconds * 1e3)


def _pool_and_role(worker: control_pb2.FleetWorker) -> str:
    """The pool, with the role in force if the worker could do more."""
    role = worker.active_role
    is_split = role not in (common_pb2.WORKER_ROLE_UNSPECIFIED, common_pb2.WORKER_ROLE_MIXED)
    return f"{worker.info.pool} as {_role_name(role)}" if is_split else worker.info.pool


def _role_name(role: common_pb2.WorkerRole.ValueType) -> str:
    return common_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()


# --- status ---------------------------------------------------------------------------------------


def status(arguments: argparse.Namespace) -> int:
    with _reading(arguments) as fleets:
        render.out().print(status_screen(fleets.read()))
    return 0


def status_screen(units: Sequence[UnitFleet]) -> Group:
    models, remarks = Text(end=""), Text(end="")
    for unit, fleet in _answering(units):
        said_of = _said_of(unit, units)
        if fleet.model_fingerprint:
            fingerprint = f"{said_of}model fingerprint {fleet.model_fingerprint.hex()}\n"
            models.append(fingerprint, style="dim")
        for line, style in _remarks(fleet):
            remarks.append(f"{said_of}{line}\n", style=style)
    return Group(models, _tables(units, remarks))


def _remarks(fleet: Fleet) -> Iterator[tuple[str, str]]:
    """List what starts, waits and fails: lines, each with its style."""
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


# --- top ------------------------------------------------------------------------------------------


def top(arguments: argparse.Namespace) -> int:
    with _reading(arguments) as fleets:
        if arguments.watch:
            _watch(fleets)
        else:
            render.out().print(top_screen(fleets.read()))
    return 0


def _reading(arguments: argparse.Namespace) -> Fleets:
    return Fleets(arguments.control, dict(arguments.unit or ()), arguments.identity)


def _watch(fleets: Fleets) -> None:
    """Print until ctrl-C: on a screen of its own on a terminal, one print after the other
    elsewhere. Raises BatonError when no control service answers any more."""
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
        yield top_screen(fleets.read())
        time.sleep(_WATCH_EVERY_S)


def top_screen(units: Sequence[UnitFleet]) -> Group:
    arrivals = [_said_of(unit, units) + _arrivals(fleet) for unit, fleet in _answering(units)]
    return _tables(units, Text("\n".join(arrivals) + "\n"))


def _arrivals(fleet: Fleet) -> str:
    """Say in a line what the routers reported last."""
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
