"""Threads that work on a queue's keys."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from deploy.controller.kit.errors import KubeError, StatusError
from deploy.controller.kit.workqueue import WorkQueue

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

_REFUSED_S = 5.0
"""What is refused of one part is refused for long, perhaps; what is done of the others, such as to
roll and to plan, goes by looks (see `PoolMemory.add` of the planner)."""
Reconcile = Callable[[K], float | None]
"""Brings the key's object one step nearer to what is wanted; answers in how many seconds to look
again without being told, None: when told. What it raises brings the key back, later and later; a
KubeError at least every `_REFUSED_S`, unless the server wants to be left alone."""
TellFault = Callable[[K, Exception], None]
"""Hears what a reconcile has raised that it never should, before the key may be taken again."""


def _tell_nobody(key: object, error: Exception) -> None:
    """The log has it."""


class Workers(Generic[K]):
    """Own `num_workers` threads on one queue."""

    def __init__(
        self,
        queue: WorkQueue[K],
        reconcile: Reconcile[K],
        num_workers: int,
        name: str,
        tell_fault: TellFault[K] = _tell_nobody,
    ) -> None:
        self._queue = queue
        self._reconcile, self._tell_fault = reconcile, tell_fault
        self._name = name
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(num_workers)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """No key is begun any more; those under way have `timeout_s` to end. Whether they did."""
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
        """Whatever becomes of telling it: no worker ends of that."""
        try:
            self._tell_fault(key, error)
        except KubeError as refusal:
            log.warning("%s: %s: its failure is not told: %s", self._name, key, refusal)
        except Exception:
            log.exception("%s: %s: its failure is not told", self._name, key)
