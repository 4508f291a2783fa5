"""How a supervisor hears that a rank is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from cluster.error_text import one_line
from cluster.supervisor.replica import Replica, ReplicaName
from cluster.worker.rank_actor import Over

_ASK_S = 1.0
_UNAVAILABLE_S = 0.1


@dataclass(frozen=True)
class RankEnd:
    """A rank is over. `failure` is why, None when it has left in good order."""

    replica: ReplicaName
    rank: int
    failure: str | None


_Place = tuple[ReplicaName, int]


class EndWatch:
    """Asks every rank that it watches whether it is over, one call after the other.

    Each call waits for the end, but for `_ASK_S` only: a call outlives its caller, and would hold
    one of the rank's few threads for every supervisor there ever was.
    """

    def __init__(self) -> None:
        self._calls: dict[_Place, Any] = {}

    def wait(self, replicas: Sequence[Replica], timeout_s: float) -> list[RankEnd]:
        """The ranks of these replicas that are over; waits for the first. Blocks on Ray."""
        give_up_at = time.monotonic() + timeout_s
        actors = {(r.name, rank): actor for r in replicas for rank, actor in r.actors.items()}
        self._calls = {place: call for place, call in self._calls.items() if place in actors}
        while True:
            for place, actor in actors.items():
                if place not in self._calls:
                    self._calls[place] = actor.wait_until_over.remote(_ASK_S)
            left_s = max(0.0, give_up_at - time.monotonic())
            if not self._calls:
                time.sleep(left_s)
                return []
            ends = self._look(left_s)
            if ends or time.monotonic() >= give_up_at:
                return ends

    def _look(self, timeout_s: float) -> list[RankEnd]:
        calls = list(self._calls.values())
        ready, _ = ray.wait(calls, num_returns=1, timeout=timeout_s, fetch_local=False)
        if ready:  # all that are
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0, fetch_local=False)
        places = {call: place for place, call in self._calls.items()}
        ends = []
        for call in ready:
            name, rank = places[call]
            del self._calls[name, rank]
            over = _answer(call)
            if over is not None:
                ends.append(RankEnd(name, rank, over.failure))
        return ends


def _answer(call: Any) -> Over | None:
    try:
        over: Over | None = ray.get(call)  # it is there
    except ActorUnavailableError:  # cut off: whether it is over is not known yet
        time.sleep(_UNAVAILABLE_S)
        return None
    except RayError as error:  # the process died and told nothing
        return Over(one_line(error))
    return over
