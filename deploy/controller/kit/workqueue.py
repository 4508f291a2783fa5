"""Keys to be worked on, each at most once at a time, and the threads that work on them.

- A key that waits and is added again waits once. A key that is added while it is worked on comes
  again when that work is done. So nobody works on a key twice at once, and no change is missed that
  came after the work had looked.
- Work may ask for its key again later; the earliest time counts. Work that begins sooner replaces
  it, and says anew when to look again.
- A key whose work failed comes back later and later, until its work succeeds once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Generic, TypeVar

from baton.pacing import Backoff
from deploy.controller.kit.errors import KubeError, StatusError

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
Clock = Callable[[], float]

RETRIES = Backoff(first_s=0.2, longest_s=120.0)


class WorkQueue(Generic[K]):
    """Own which key is due when, and which is being worked on: informers add, workers take. The
    number of keys bounds it."""

    def __init__(self, retries: Backoff = RETRIES, clock: Clock = time.monotonic) -> None:
        self._retries, self._clock = retries, clock
        self._due: dict[K, float] = {}
        self._under_way: set[K] = set()
        self._backoffs: dict[K, Backoff] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def add(self, key: K) -> None:
        with self._changed:
            self._add(key, 0.0)
            self._changed.notify()

    def take(self) -> K | None:
        """Wait for the key that is due for longest. The caller gives it back by `succeeded` or
        `failed`. None once the queue is closed, also when keys wait in it."""
        with self._changed:
            while not self._is_closed:
                free = {key: at for key, at in self._due.items() if key not in self._under_way}
                key = min(free, key=free.__getitem__, default=None)
                left_s = None if key is None else free[key] - self._clock()
                if key is not None and left_s is not None and left_s <= 0:
                    del self._due[key]
                    self._under_way.add(key)
                    return key
                self._changed.wait(left_s)
            return None

    def succeeded(self, key: K, again_after_s: float | None = None) -> None:
        """Forget its failures; `again_after_s`: work on it again by then."""
        with self._changed:
            self._backoffs.pop(key, None)
            self._end(key, again_after_s)

    def failed(self, key: K, at_least_s: float = 0.0, at_most_s: float = math.inf) -> float:
        """Put a key back whose work failed. Returns the seconds after which it comes again."""
        with self._changed:
            backoff = self._backoffs.setdefault(key, replace(self._retries))
            delay_s = max(min(backoff.next_s(), at_most_s), at_least_s)
            self._end(key, delay_s)
            return delay_s

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        """Count the keys whose time has come."""
        with self._changed:
            return sum(due_at <= self._clock() for due_at in self._due.values())

    def _end(self, key: K, again_after_s: float | None) -> None:
        self._under_way.remove(key)
        if again_after_s is not None:
            self._add(key, again_after_s)
        self._changed.notify()

    def _add(self, key: K, after_s: float) -> None:
        due_at = self._clock() + after_s
        self._due[key] = min(due_at, self._due.get(key, due_at))


_REFUSED_S = 5.0
"""One part may be refused for long. The others (rollouts, planning) need regular looks; see
`PoolMemory.add` of the planner."""
Reconcile = Callable[[K], float | None]
"""Brings the key's object one step nearer to what is wanted. Returns in how many seconds to look
again unasked, or None. What it raises brings the key back, later and later; a KubeError at least
every `_REFUSED_S`, unless the server wants to be left alone."""
ReportFault = Callable[[K, Exception], None]
"""Reports what a reconcile never should have raised, before the key may be taken again."""


class Workers(Generic[K]):
    """Own `num_workers` threads on one queue."""

    def __init__(
        self,
        queue: WorkQueue[K],
        reconcile: Reconcile[K],
        num_workers: int,
        name: str,
        report_fault: ReportFault[K] = lambda key, error: None,
    ) -> None:
        self._queue = queue
        self._reconcile, self._report_fault = reconcile, report_fault
        self._name = name
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(num_workers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Begin no further key. Returns whether those under way have ended in time."""
        self._queue.close()
        ends_at = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (key := self._queue.take()) is not None:
            try:
                again_after_s = self._reconcile(key)
            except KubeError as error:
                wanted_s = error.retry_after_s if isinstance(error, StatusError) else None
                delay_s = self._queue.failed(key, wanted_s or 0.0, _REFUSED_S)
                log.warning("%s: %s: %s: again in %.1f s", self._name, key, error, delay_s)
            except Exception as error:
                log.exception("%s: %s failed", self._name, key)
                self._fault(key, error)
                delay_s = self._queue.failed(key)
                log.warning("%s: %s: again in %.1f s", self._name, key, delay_s)
            else:
                self._queue.succeeded(key, again_after_s)

    def _fault(self, key: K, error: Exception) -> None:
        """Report a fault. No worker ends when the report fails."""
        try:
            self._report_fault(key, error)
        except KubeError as refusal:
            log.warning("%s: %s: its failure is not reported: %s", self._name, key, refusal)
        except Exception:
            log.exception("%s: %s: its failure is not reported", self._name, key)
