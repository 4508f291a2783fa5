"""What numbers a setting may hold, written beside the type of its field.

Standard library only: settings are read where neither torch nor a YAML parser is installed.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    """Finite numbers within `limits`."""

    limits: str
    holds: Callable[[float], bool]


def at_least(low: float) -> Range:
    return Range(f"at least {low:g}", lambda value: value >= low)


def between(low: float, high: float) -> Range:
    return Range(f"between {low} and {high}", lambda value: low <= value <= high)


Positive = Annotated[float, Range("above 0", lambda value: value > 0)]
NotNegative = Annotated[float, at_least(0)]
Share = Annotated[float, Range("above 0 and at most 1", lambda value: 0 < value <= 1)]
Whole = Annotated[int, at_least(0)]
Count = Annotated[int, at_least(1)]
Port = Annotated[int, between(0, 65535)]


@dataclass(frozen=True)
class Ranged:
    """A dataclass whose numbers are checked when it is made. A number outside its range raises
    ValueError, which names the field first."""

    def __post_init__(self) -> None:
        for name, ranges in _ranges(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            for each in ranges if value is not None else ():
                if not each.holds(value):
                    raise ValueError(f"{name} must be {each.limits}, not {value}")
                if not math.isfinite(value):
                    raise ValueError(f"{name} must be finite, not {value}")


@functools.cache
def _ranges(cls: type) -> Mapping[str, list[Range]]:
    kinds = typing.get_type_hints(cls, include_extras=True)
    return {name: list(_ranges_of(kind)) for name, kind in kinds.items()}


def _ranges_of(kind: Any) -> typing.Iterator[Range]:
    """Return the ranges in a type, also those beside None."""
    yield from (extra for extra in getattr(kind, "__metadata__", ()) if isinstance(extra, Range))
    for part in typing.get_args(kind):
        yield from _ranges_of(part)
