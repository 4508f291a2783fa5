"""Of several operators one acts: whoever holds the Lease.

1. Each candidate attempts to take the lease every `retry_s`; the holder renews it as often.
2. `on_gained` once it is held. From then `is_leading` says whether to act: at each key, at each
   write (`Kube.guarded(elector.is_leading)`) and at each order to a supervisor, since a process may
   stand still between any two.
3. A holder that could not renew within `renew_deadline_s`, or finds another one in its place, has
   lost: `is_leading` is false from that moment, `on_lost` follows. It is a candidate again.
4. `stop` ends leading, waits for `on_lost`, then gives the lease back: the next one takes it at its
   next attempt.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from deploy.controller.kit.candidate import Candidate, Clock, ElectionSettings, uptime_s
from deploy.controller.kit.errors import KubeError
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key

log = logging.getLogger(__name__)

_USUAL = ElectionSettings()


class Elector:
    """Own the thread that keeps one candidate in the race."""

    def __init__(
        self,
        kube: Kube,
        lease: Key,
        identity: str,
        settings: ElectionSettings = _USUAL,
        clock: Clock = uptime_s,
    ) -> None:
        self._candidate = Candidate(kube, lease, identity, settings, clock)
        self._identity = identity
        self._settings = settings
        self._rng = random.Random()
        self._on_gained: Callable[[], None] = lambda: None
        self._on_lost: Callable[[], None] = lambda: None
        self._is_acting = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"elector-{identity}", daemon=True)

    def start(self, on_gained: Callable[[], None], on_lost: Callable[[], None]) -> None:
        """Both are called on the elector's thread, in turns, and must not block: while they do,
        nothing is renewed. `on_lost` comes after a `stop`, too."""
        self._on_gained, self._on_lost = on_gained, on_lost
        self._thread.start()

    def is_leading(self) -> bool:
        return self._candidate.is_leading()

    @property
    def holder(self) -> str | None:
        """Who led when it was seen last."""
        return self._candidate.holder

    def stop(self) -> bool:
        """First end what acts: the next leader starts as soon as the lease is given back. False
        where something did not end, or the server did not answer, in time; the lease runs out
        then."""
        self._stopping.set()
        self._thread.join(self._settings.renew_deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._candidate.attempt()
            except KubeError as error:
                log.warning("lease: %s", error)
            except Exception:
                log.exception("lease: an attempt failed")
            self._tell()
            self._wait()
        self._release()

    def _tell(self) -> None:
        is_leading = self._candidate.is_leading()
        if is_leading == self._is_acting:
            return
        self._is_acting = is_leading
        log.info("%s %s the lease", self._identity, "holds" if is_leading else "has lost")
        if is_leading:
            self._on_gained()
        else:
            self._on_lost()

    def _wait(self) -> None:
        """Until the next attempt; where leading ends before it, that is told at its end."""
        retry_s = self._settings.retry_s * self._rng.uniform(1.0, 1.2)
        if not self._is_acting:
            self._stopping.wait(retry_s)
            return
        leads_for_s = self._candidate.leads_for_s()
        self._stopping.wait(min(retry_s, leads_for_s))
        self._tell()

    def _release(self) -> None:
        self._candidate.resign()
        self._tell()
        try:
            self._candidate.release()
        except KubeError as error:
            log.warning("lease: not given back, it runs out by itself: %s", error)
