"""What a setting may hold, written beside the type of its field: `Annotated[int, at_least(1)]`.

It is checked when the settings are made, and shown in the schemas of the custom resources. Standard
library only: settings are read where neither torch nor a YAML parser is installed.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

_HOLDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le}


@dataclass(frozen=True)
class Bounds:
    """What a value must be; None bounds nothing. A bounded number is finite, too."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    pattern: str | None = None
    max_size: int | None = None
    """Characters, members of a list or keys of a mapping. An API server refuses a CEL rule over
    values without it: it cannot bound the rule's cost."""

    def problem(self, value: Any) -> str | None:
        """Say what is wrong with a value; None: nothing."""
        if self.pattern is not None and not re.search(self.pattern, value, re.ASCII):
            return f"must match {self.pattern}, not {value!r}"
        if self.max_size is not None and len(value) > self.max_size:
            return f"must not be longer than {self.max_size}, not {len(value)}"
        limits = {"at least": self.minimum, "above": self.above, "at most": self.maximum}
        given = {word: limit for word, limit in limits.items() if limit is not None}
        shown = round(value, 6) if isinstance(value, float) else value  # messages have float32
        if given and not all(_HOLDS[word](value, limit) for word, limit in given.items()):
            if self.minimum is not None and self.maximum is not None:
                return f"must be between {self.minimum} and {self.maximum}, not {shown}"
            said = " and ".join(f"{word} {limit}" for word, limit in given.items())
            return f"must be {said}, not {shown}"
        return f"must be finite, not {shown}" if given and not math.isfinite(value) else None


def at_least(low: float) -> Bounds:
    return Bounds(minimum=low)


def between(low: float, high: float) -> Bounds:
    return Bounds(minimum=low, maximum=high)


def sized(max_size: int, pattern: str | None = None) -> Bounds:
    return Bounds(max_size=max_size, pattern=pattern)


Positive = Annotated[float, Bounds(above=0)]
NotNegative = Annotated[float, at_least(0)]
Share = Annotated[float, Bounds(above=0, maximum=1)]
Whole = Annotated[int, at_least(0)]
Count = Annotated[int, at_least(1)]
Port = Annotated[int, between(0, 65535)]


@dataclass(frozen=True)
class Ranged:
    """Settings that raise ValueError, the field's name first, for a value out of its bounds."""

    def __post_init__(self) -> None:
        for name, beside in annotations_of(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            for bounds in beside if value is not None else ():
                if isinstance(bounds, Bounds) and (problem := bounds.problem(value)):
                    raise ValueError(f"{name} {problem}")


@functools.cache
def annotations_of(cls: type) -> Mapping[str, tuple[Any, ...]]:
    """Return what stands beside each field's type, in `Annotated`."""
    kinds = typing.get_type_hints(cls, include_extras=True)
    return {name: _beside(kind) for name, kind in kinds.items()}


def _beside(kind: Any) -> tuple[Any, ...]:
    """Return what stands beside a type, or within one that may be None."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return tuple(each for part in typing.get_args(kind) for each in _beside(part))
    return getattr(kind, "__metadata__", ())
