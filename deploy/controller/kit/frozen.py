"""JSON values that nobody can change: dicts and lists for all who read (and for `json.dumps`), but
every change is refused with TypeError. `copy.deepcopy` gives plain ones back, free to change.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn


class FrozenDict(dict[str, Any]):
    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a shared object must not be changed: copy.deepcopy it first")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}


class FrozenList(list[Any]):
    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a shared list must not be changed: copy.deepcopy it first")

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return [copy.deepcopy(item, memo) for item in self]


def frozen(value: Any) -> Any:
    """The same JSON value, all through unchangeable; a copy."""
    if isinstance(value, dict):
        return FrozenDict((key, frozen(item)) for key, item in value.items())
    if isinstance(value, list):
        return FrozenList(frozen(item) for item in value)
    return value
