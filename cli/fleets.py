"""The fleets of all units, as their control services report them.

One unit serves, or two while one version of the model takes the place of another. Each has a
control service of its own, and each of these has the list of all units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from baton.control_client import ControlClient
from baton.errors import BatonError
from baton.v1 import control_pb2

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
