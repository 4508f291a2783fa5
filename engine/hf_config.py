"""A Hugging Face config.json as the engine reads it: each value is checked, each error names its
key.

A null counts as missing: the reader's default, if any, applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from engine.errors import UnsupportedModelError

_LARGEST = 2**31 - 1
_LARGEST_NUMBER = 1e38  # of float32, which positions and norms are computed in


class HfConfig:
    """The content of one JSON object of the file `source`; all methods raise UnsupportedModelError
    naming file and key."""

    def __init__(self, values: Mapping[str, Any], source: str, section: str = "") -> None:
        self._values = values
        self._source = source
        self._section = section

    def __bool__(self) -> bool:
        """Whether it has any key."""
        return bool(self._values)

    def over(self, defaults: Mapping[str, Any]) -> HfConfig:
        """Return the same with `defaults` for missing keys. They do not replace a null, which means
        something for a window or for key-value heads."""
        return HfConfig({**defaults, **self._values}, self._source, self._section)

    def raw(self, key: str, default: object = None) -> Any:
        """Return the unchecked value."""
        return self._values.get(key, default)

    def size(self, key: str, default: int | None = None, most: int = _LARGEST) -> int:
        """Read a whole number from 1 to `most`; one without a default must be there."""
        value = self._whole(key, 1, most)
        if value is None:
            value = default
        if value is None:
            self.wrong(key, "a whole number is expected, not null")
        return value

    def size_or_none(self, key: str) -> int | None:
        return self._whole(key, 1, _LARGEST)

    def count(self, key: str, default: int) -> int:
        """Read a whole number that may be 0."""
        value = self._whole(key, 0, _LARGEST)
        return default if value is None else value

    def positive(self, key: str, default: float | None = None) -> float:
        """Read a finite number above 0; one without a default must be there."""
        value = self.number_or_none(key)
        if value is None:
            value = default
        if value is None:
            self.wrong(key, "a number is expected, not null")
        if value <= 0:
            self.wrong(key, f"a number above 0 is expected, not {value!r}")
        return value

    def number_or_none(self, key: str) -> float | None:
        """Read a finite number; None where it is missing."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.wrong(key, f"a number is expected, not {value!r}")
        if not abs(value) <= _LARGEST_NUMBER:  # NaN too
            self.wrong(key, f"a finite number is expected, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(key, f"true or false is expected, not {value!r}")
        return value

    def list_of(self, key: str, kind: type) -> list[Any] | None:
        """Read a list of this type; None where it is missing."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            self.wrong(key, f"a list of {kind.__name__} is expected, not {value!r}")
        return value

    def section(self, key: str) -> HfConfig:
        """Return a JSON object in this one; an empty one where it is missing."""
        value = self._values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            self.wrong(key, f"a JSON object is expected, not {value!r}")
        return HfConfig(value, self._source, f"{self._section}{key}.")

    def wrong(self, key: str, what: str) -> NoReturn:
        raise UnsupportedModelError(f"{self._source}: {self._section}{key}: {what}")

    def _whole(self, key: str, least: int, most: int) -> int | None:
        value = self._values.get(key)
        if value is None:
            return None
        if type(value) is not int or not least <= value <= most:
            self.wrong(key, f"a whole number from {least} to {most} is expected, not {value!r}")
        return value
