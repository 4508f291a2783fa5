"""Doing several things of which each may be refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from deploy.controller.kit.errors import KubeError


def each(parts: Iterable[Callable[[], object]]) -> list[KubeError]:
    """What failed: one that the API server refuses keeps no other from being done."""
    failed = []
    for part in parts:
        try:
            part()
        except KubeError as error:
            failed.append(error)
    return failed
