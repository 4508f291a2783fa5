"""Of several operators one acts: whoever holds the Lease.

1. Each candidate attempts to take the lease every `retry_s`; the holder renews it as often.
2. `is_leading` says whether to act: at each key, at each write (`Kube.guarded(elector.is_leading)`)
   and at each order to a supervisor, since a process may stand still between any two.
3. A holder that could not renew within `renew_deadline_s`, or finds another holder, has lost:
   `is_leading` is false from that moment. It is a candidate again.
4. `stop` gives the lease back, once its owner has ended what acts: the next one takes it at its
   next attempt.

No clock is ever compared with another machine's. A candidate notes, by its own clock, when it last
saw the lease's record change. It takes the lease over once the record has stayed unchanged for as
long as its holder claimed it. A holder leads for less than that, and counts from before it asked:
others can see a renewal no earlier. So the former leader has stopped before the next one starts, as
long as clocks run equally fast within the margin of `lease_duration_s` over `renew_deadline_s`.

Leading is a matter of the clock, not of a thread that would have to notice in time: a process that
was stopped and goes on does not lead any more when it takes its first look.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from deploy.controller.kit.connection import Timeouts
from deploy.controller.kit.errors import ConflictError, KubeError, NotFoundError
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Object, Resource, resource_version_of

log = logging.getLogger(__name__)

LEASES = Resource("coordination.k8s.io", "v1", "leases")
Clock = Callable[[], float]


def uptime_s() -> float:
    """Read a clock that goes on while the machine sleeps, unlike `time.monotonic`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class ElectionSettings:
    lease_duration_s: int = 15
    """How long others leave the lease alone after a renewal; the API takes whole seconds."""
    renew_deadline_s: float = 10.0
    """How long a holder leads after it asked for a renewal that was granted."""
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.lease_duration_s > self.renew_deadline_s > 2 * self.retry_s > 0:
            raise ValueError(f"lease_duration_s > renew_deadline_s > 2 * retry_s > 0, not {self}")


@dataclass(frozen=True)
class _Seen:
    """A record, and when it was seen for the first time as it is."""

    spec: Mapping[str, Any]
    at: float

    @property
    def holder(self) -> str:
        return self.spec.get("holderIdentity") or ""

    def is_over(self, now: float) -> bool:
        return not self.holder or now >= self.at + (self.spec.get("leaseDurationSeconds") or 0)


class Candidate:
    """Own one process's claim to a lease, without a thread: the caller of `attempt` says when."""

    def __init__(
        self,
        kube: Kube,
        lease: Key,
        identity: str,
        settings: ElectionSettings,
        clock: Clock = uptime_s,
    ) -> None:
        """`kube`: not one that writes for leaders only; `identity`: no other process has it."""
        longest_s = settings.renew_deadline_s / 4  # two tries before leading ends
        self._kube = kube.within(Timeouts(connect_s=longest_s, read_s=longest_s))
        self._lease, self._identity, self._settings = lease, identity, settings
        self._clock = clock
        self._seen: _Seen | None = None
        self._held_version: str | None = None
        """The lease as we wrote it; None: not ours, or somebody else has changed it."""
        self._leads_until = float("-inf")

    def is_leading(self) -> bool:
        return self._clock() < self._leads_until

    def attempt(self) -> None:
        """Renew the lease, or take it where it may be taken. Raises KubeError where the server
        cannot be asked."""
        asked_at = self._clock()
        try:
            lease = self._renewed() or self._taken()
        except NotFoundError:
            lease = self._created()
        if lease is not None:
            self._see(lease)
            self._held_version = resource_version_of(lease)
            self._leads_until = asked_at + self._settings.renew_deadline_s

    def release(self) -> None:
        """Stop leading, then let others take the lease at once, where it is ours. Raises KubeError
        where the server cannot be reached: the lease runs out then."""
        self._leads_until = float("-inf")
        version, self._held_version = self._held_version, None
        if version is None:
            return
        try:
            self._write({"holderIdentity": "", "leaseDurationSeconds": 1}, version)
        except (ConflictError, NotFoundError):
            log.info("lease %s: not ours any more, nothing to release", self._lease)

    def _renewed(self) -> Object | None:
        """Renew the lease and return it; None where it is not as we left it: to be looked at."""
        if self._held_version is None:
            return None
        try:
            return self._write(self._claim(), self._held_version)
        except ConflictError:
            self._held_version = None
            return None

    def _taken(self) -> Object | None:
        """Take the lease and return it; None where another one holds it, or was faster."""
        lease = self._kube.get(LEASES, self._lease)
        self._see(lease)
        assert self._seen is not None
        if self._seen.holder != self._identity:
            self._leads_until = float("-inf")
            if not self._seen.is_over(self._clock()):
                return None
        try:
            return self._write(self._claim(), resource_version_of(lease))
        except ConflictError:
            return None

    def _created(self) -> Object | None:
        """Make the lease, ours, and return it; None where another one was faster."""
        lease = {
            "apiVersion": LEASES.api_version,
            "kind": "Lease",
            "metadata": {"name": self._lease.name, "namespace": self._lease.namespace},
            "spec": self._claim(),
        }
        try:
            return self._kube.create(LEASES, lease)
        except ConflictError:
            self._leads_until = float("-inf")
            return None

    def _see(self, lease: Object) -> None:
        """Note what the lease says, after the answer has come: to see a change late is to wait
        longer."""
        spec = lease.get("spec") or {}
        if self._seen is None or self._seen.spec != spec:
            self._seen = _Seen(spec, self._clock())

    def _claim(self) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # for people; nobody compares it
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._settings.lease_duration_s,
            "renewTime": now,
        }

    def _write(self, spec: Mapping[str, Any], version: str) -> Object:
        patch = {"metadata": {"resourceVersion": version}, "spec": spec}
        return self._kube.merge_patch(LEASES, self._lease, patch)


_USUAL = ElectionSettings()


class Elector:
    """Own the thread that keeps one candidate in the race."""

    def __init__(
        self,
        kube: Kube,
        lease: Key,
        identity: str,
        settings: ElectionSettings = _USUAL,
    ) -> None:
        self._candidate = Candidate(kube, lease, identity, settings)
        self._identity = identity
        self._settings = settings
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"elector-{identity}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_leading(self) -> bool:
        return self._candidate.is_leading()

    def stop(self) -> bool:
        """Give the lease back. The owner has ended what acts: the next leader starts at once. False
        where the server did not answer in time; the lease runs out then."""
        self._stopping.set()
        self._thread.join(self._settings.renew_deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        led = False
        while not self._stopping.is_set():
            try:
                self._candidate.attempt()
            except KubeError as error:
                log.warning("lease: %s", error)
            except Exception:
                log.exception("lease: an attempt failed")
            if (leads := self.is_leading()) != led:
                log.info("%s %s the lease", self._identity, "holds" if leads else "has lost")
                led = leads
            self._stopping.wait(self._settings.retry_s * random.uniform(1.0, 1.2))
        try:
            self._candidate.release()
        except KubeError as error:
            log.warning("lease: not given back, it runs out by itself: %s", error)
