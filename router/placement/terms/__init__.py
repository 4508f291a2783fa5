"""The terms of a placement's cost that concern one worker: a file each, found by its name.

A file here has `AT`, which says for which workers of a placement its seconds count, and
`of(fleet, query)`, which returns them for every slot, or None if it has nothing to say about this
request. It reads the columns and writes none. A worker for which it says infinity is not chosen.
What depends on both workers, the transfer, is in `choice.cpp`.
"""

from __future__ import annotations

import enum
import importlib
import pkgutil
from typing import Protocol, cast

from router.fleet.fleet_arrays import FleetArrays, Floats
from router.placement.placement import PlacementQuery

__all__ = ["TERMS", "At", "FleetArrays", "Floats", "PlacementQuery", "Term", "load_terms"]


class At(enum.IntEnum):
    """The workers of a placement for which a term counts, in the order of an explanation."""

    PREFILL = 0
    """The one that prefills."""
    DECODE = 1
    """The one that decodes."""
    ITSELF = 2
    """One that prefills for itself while another could."""
    EACH = 3
    """Each that takes part; once where it does both."""


class Term(Protocol):
    AT: At

    def of(self, fleet: FleetArrays, query: PlacementQuery) -> Floats | None: ...


def load_terms() -> dict[str, Term]:
    """The terms by name, in the order of an explanation."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    found = {name: cast(Term, importlib.import_module(f"{__name__}.{name}")) for name in names}
    return dict(sorted(found.items(), key=lambda item: (item[1].AT, item[0])))


TERMS = load_terms()
