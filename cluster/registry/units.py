"""The units that routers send requests to. The registry keeps the list and acts on none of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequestError

MAX_UNITS = 2
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Unit:
    """One complete version of a model."""

    code: str = ""
    control_address: str = ""
    """host:port; empty: of the registry that was asked."""
    share: float = 1.0
    """Of the requests."""


_LONE = Unit()


class UnitList:
    """Own the list, the oldest unit first."""

    def __init__(self, own: Unit = _LONE, given: Sequence[Unit] = ()) -> None:
        """`own`: the unit that this registry is part of. It is the only one until `set`."""
        self._own = (own,)
        self.given = tuple(given)
        """As it was set; empty: nobody has."""

    @property
    def all(self) -> tuple[Unit, ...]:
        return self.given or self._own

    def set(self, units: Sequence[Unit]) -> None:
        """Raises InvalidRequestError."""
        _check(units)
        self.given = tuple(units)


def _check(units: Sequence[Unit]) -> None:
    if not 1 <= len(units) <= MAX_UNITS:
        raise InvalidRequestError(
            f"units: 1 to {MAX_UNITS} are expected, not {len(units)}", field="units"
        )
    for index, unit in enumerate(units):
        if unit.code in [other.code for other in units[:index]]:
            raise InvalidRequestError(
                f"units: two have the code {unit.code!r}", field=f"units[{index}].code"
            )
        if not 0 <= unit.share <= 1:  # nor is NaN
            raise InvalidRequestError(
                f"units: a share is from 0 to 1, not {unit.share}", field=f"units[{index}].share"
            )
    total = math.fsum(unit.share for unit in units)
    if abs(total - 1) > _ROUNDING:
        raise InvalidRequestError(f"units: the shares sum to {total}, not 1", field="units")
