"""How new requests are divided among cohorts: the workers that share weights, quantisation and
block size, and so can go on with each other's streams.

1. A request that nobody has seen a token of draws its cohort, by the registry's weights, among
   those that can serve it. It draws by its id: a retry or another router draws alike, and when
   weights change only those requests draw another that the change is about.
2. One that has put out a token stays in its cohort for good, whatever becomes of the weights.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Collection, Mapping

log = logging.getLogger(__name__)

Cohort = str  # as the registry names it; "" is the one that the cluster started with


def draw(wire_id: str, weights: Mapping[Cohort, int]) -> Cohort:
    """One of at least one cohort, of weights above 0; any id draws by the weights. Pure.

    Weighted rendezvous hashing (Schindelhauer and Schomaker, 2005, the logarithmic method).
    """
    if len(weights) == 1:
        return next(iter(weights))
    return min(weights, key=lambda cohort: -math.log(_uniform(wire_id, cohort)) / weights[cohort])


def _uniform(wire_id: str, cohort: Cohort) -> float:
    """In (0, 1), the same in every process."""
    digest = hashlib.blake2b(f"{wire_id}\0{cohort}".encode(), digest_size=6).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2**48


class Cohorts:
    """Own the weights that the registry told last."""

    def __init__(self) -> None:
        self._weights: Mapping[Cohort, int] = {}
        self._said_even: frozenset[Cohort] = frozenset()
        self.version = 0
        """Of the weights."""

    @property
    def told(self) -> Collection[Cohort]:
        """All that the registry has pools of."""
        return self._weights.keys()

    @property
    def weights(self) -> Mapping[Cohort, int]:
        return self._weights

    def update(self, weights: Mapping[Cohort, int]) -> bool:
        """Take in every cohort's weight; whether anything is new."""
        if weights == self._weights:
            return False
        self._weights, self._said_even = dict(weights), frozenset()
        self.version += 1
        return True

    def shares(self, able: Collection[Cohort]) -> dict[Cohort, float]:
        """Of new requests that these can serve, the part that each gets."""
        weights = self._weights_of(able)
        return {cohort: weights.get(cohort, 0) / sum(weights.values()) for cohort in able}

    def draw(self, wire_id: str, able: Collection[Cohort]) -> Cohort:
        """The cohort of a request that these, one at least, can serve."""
        if len(able) == 1 and len(self._weights) < 2:
            return next(iter(able))
        return draw(wire_id, self._weights_of(able))

    def _weights_of(self, able: Collection[Cohort]) -> dict[Cohort, int]:
        """Even ones where nobody who can serve has any: weights must not make an outage."""
        weights = {cohort: self._weights.get(cohort, 0) for cohort in able}
        weighted = {cohort: weight for cohort, weight in weights.items() if weight}
        if weighted:
            return weighted
        if len(self._weights) > 1 and self._said_even != weights.keys():
            self._said_even = frozenset(weights)
            names = ", ".join(repr(cohort) for cohort in sorted(weights))
            log.warning("no cohort that can serve has a weight: requests go to %s", names)
        return dict.fromkeys(weights, 1)
