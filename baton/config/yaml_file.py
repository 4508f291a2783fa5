"""Read a YAML file and refuse repeated keys: YAML itself would take the last."""

from __future__ import annotations

from typing import Any

import yaml


class RepeatedKeyError(yaml.YAMLError):
    """`key` is given in two lines (counted from 1) of one mapping."""

    def __init__(self, key: str, first_line: int, line: int) -> None:
        super().__init__(f"{key} is given twice, in lines {first_line} and {line}")
        self.key = key


class _Loader(yaml.SafeLoader):
    """Check keys as written. A key that `<<` merges in may be given again."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise RepeatedKeyError(key.value, lines[key.value], line)
            lines[key.value] = line
        return node


def load(text: str) -> Any:
    """The value in a text; raises yaml.YAMLError, of which RepeatedKeyError is one."""
    return yaml.load(text, Loader=_Loader)
