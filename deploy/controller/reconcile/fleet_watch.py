"""One watch of each control service, which reports pools and workers.

A thread for each follows the stream and keeps the newest answer. A stream that breaks, or that
is silent for a whole window, makes the fleet unknown until the next answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from baton.control.client import ControlClient
from baton.errors import BatonError, DeadlineError
from baton.identity.identity import Identity
from deploy.controller.kit.objects import Key
from deploy.controller.observed.fleet import NOTHING_HEARD, Heard, fleet_of

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_WINDOW_S = 10.0


@dataclass
class _Followed:
    """One control service's stream."""

    cluster: Key
    client: ControlClient
    stopping: threading.Event = field(default_factory=threading.Event)
    heard: Heard = NOTHING_HEARD


class FleetWatch:
    """Own the watches. `on_change` gets the cluster's key whenever what is known of it changed, on
    the watch's thread."""

    def __init__(self, on_change: Callable[[Key], None]) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._followed: dict[str, _Followed] = {}
        """The watched services, by address."""

    def follow(self, cluster: Key, identity: Identity | None, addresses: Collection[str]) -> None:
        """Follow these control services of a cluster alone; none without an identity."""
        wanted = set(addresses) if identity is not None else set[str]()
        with self._lock:
            known = {name for name, each in self._followed.items() if each.cluster == cluster}
            ended = [self._followed.pop(address) for address in known - wanted]
            begun = {
                address: _Followed(cluster, ControlClient(address, identity=identity))
                for address in wanted - known
            }
            self._followed |= begun
        for followed in ended:
            followed.stopping.set()
            followed.client.close()
        for address, followed in begun.items():
            name = f"fleet-{address}"
            threading.Thread(target=self._run, args=(followed,), name=name, daemon=True).start()

    def heard(self, address: str) -> Heard:
        with self._lock:
            followed = self._followed.get(address)
        return NOTHING_HEARD if followed is None else followed.heard

    def client(self, address: str) -> ControlClient | None:
        with self._lock:
            followed = self._followed.get(address)
            return None if followed is None else followed.client

    def stop(self) -> None:
        with self._lock:
            clusters = {followed.cluster for followed in self._followed.values()}
        for cluster in clusters:
            self.follow(cluster, None, ())

    def _run(self, followed: _Followed) -> None:
        while not followed.stopping.is_set():
            if not self._follow(followed):
                self._know(followed, Heard(is_certain=True))
                followed.stopping.wait(_RETRY_S)

    def _follow(self, followed: _Followed) -> bool:
        """Follow a window of the stream. Returns whether the supervisor answers at its end."""
        answers = False
        try:
            for answer in followed.client.watch_fleet(_WINDOW_S):
                newest = (answer, time.monotonic())
                self._know(followed, Heard(fleet_of(answer), newest, is_certain=True))
                answers = True
        except DeadlineError:
            return answers
        except BatonError as error:
            if followed.heard.fleet is not None:
                log.warning("%s: the supervisor is lost: %s", followed.cluster, error)
        except ValueError:  # gRPC raises it for a channel that was closed
            if not followed.stopping.is_set():
                raise
        return False

    def _know(self, followed: _Followed, heard: Heard) -> None:
        before, followed.heard = followed.heard, heard
        if _decisive(before) != _decisive(heard) and not followed.stopping.is_set():
            self._on_change(followed.cluster)


def _decisive(heard: Heard) -> object:
    """Return what is acted on. Figures change with every answer and can wait for the next look."""
    fleet = heard.fleet
    if fleet is None:
        return heard.is_certain
    pools = {
        name: (
            pool.desired_replicas,
            pool.role_plan,
            pool.last_error,
            [(slot.worker_id, slot.pod, slot.state) for slot in pool.slots],
        )
        for name, pool in fleet.pools.items()
    }
    return fleet.holds_requests, heard.settles, fleet.closed_pods, pools
