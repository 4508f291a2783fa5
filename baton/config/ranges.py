"""What numbers and words a setting may hold, written beside the type of its field.

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
    """Raises ValueError, naming the field first, for a value outside its range or choices."""

    def __post_init__(self) -> None:
        for name, checks in _checks(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            if value is None:
                continue
            for check in checks:
                if problem := _problem(value, check):
                    raise ValueError(f"{name} must be {problem}, not {value}")


def _problem(value: Any, check: Range | tuple[str, ...]) -> str | None:
    if isinstance(check, tuple):
        return None if value in check else f"one of {', '.join(check)}"
    if check.holds(value):
        return None if math.isfinite(value) else "finite"
    return check.limits


@functools.cache
def _checks(cls: type) -> Mapping[str, list[Range | tuple[str, ...]]]:
    kinds = typing.get_type_hints(cls, include_extras=True)
    return {name: list(_checks_of(kind)) for name, kind in kinds.items()}


def _checks_of(kind: Any) -> typing.Iterator[Range | tuple[str, ...]]:
    """Ranges and choices in a type, also those beside None."""
    if typing.get_origin(kind) is typing.Literal:
        yield typing.get_args(kind)
        return
    yield from (extra for extra in getattr(kind, "__metadata__", ()) if isinstance(extra, Range))
    for part in typing.get_args(kind):
        yield from _checks_of(part)
