"""Which kinds an API server serves: not every one has what others install, or what came later."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Resource

_FRESH_S = 60.0
"""A kind that is installed later is noticed within this time."""


@dataclass(frozen=True)
class _Served:
    plurals: frozenset[str]
    at_s: float


class Discovery:
    """Own what was found out of one API server. Threads share it."""

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._clock = kube, clock
        self._served: dict[str, _Served] = {}
        self._version: tuple[int, int] | None = None

    @property
    def version(self) -> tuple[int, int]:
        """The API server's when it was asked first, such as (1, 31); raises KubeError."""
        if self._version is None:
            self._version = self._kube.version()
        return self._version

    def serves(self, resource: Resource) -> bool:
        """Raises KubeError."""
        name, now = resource.api_version, self._clock()
        known = self._served.get(name)
        if known is None or now >= known.at_s + _FRESH_S:
            known = self._served[name] = _Served(self._kube.served_plurals(resource), now)
        return resource.plural in known.plurals
