"""Starts, finds and stops the supervisor: a named Ray actor that outlives the caller. Every method
blocks on Ray, to which this process must be connected.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from baton.config.cluster import ClusterConfig
from baton.errors import UnavailableError
from cluster.errors import one_line
from cluster.supervisor.replica import NAMESPACE
from cluster.supervisor.supervisor import NAME, SupervisorActor

_ANSWER_WITHIN_S = 30.0
_ASK_AGAIN_S = 0.2
# Only the head's node has this resource. Without a head the supervisor waits for the next one. In a
# worker's pod it would end with that pod, and no client would find its control service.
_HEAD = {"node:__internal_head__": 0.001}


class SupervisorHandle:
    """A handle of the supervisor: `start` one, or `find` the one that runs."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def start(cls, config: ClusterConfig, run_dir: Path) -> Self:
        """Have Ray start it, and restart it for ever. An existing one stays as it is."""
        options = ray.remote(SupervisorActor).options(
            name=NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=4,
            num_cpus=0,
            resources=_HEAD,
        )
        return cls(options.remote(config, str(run_dir)))

    @classmethod
    def find(cls) -> Self | None:
        try:
            return cls(ray.get_actor(NAME, namespace=NAMESPACE))
        except ValueError:
            return None

    def address(self, within_s: float = _ANSWER_WITHIN_S) -> str:
        """The announced address of its control service. Raises UnavailableError."""
        give_up_at = time.monotonic() + within_s
        while True:
            try:
                left_s = max(0.0, give_up_at - time.monotonic())
                address: str = ray.get(self._actor.address.remote(), timeout=left_s)
                return address
            except ActorUnavailableError as error:  # Ray is restarting it
                if time.monotonic() > give_up_at:
                    raise _not_there(error) from error
                time.sleep(_ASK_AGAIN_S)
            except RayError as error:
                raise _not_there(error) from error

    def pid(self) -> int:
        """Its pid. Raises RayError while Ray restarts it."""
        pid: int = ray.get(self._actor.pid.remote(), timeout=_ANSWER_WITHIN_S)
        return pid

    def stop(self, within_s: float = _ANSWER_WITHIN_S) -> bool:
        """End every replica, then the supervisor. True: it confirmed that no replica is left."""
        try:
            ray.get(self._actor.stop.remote(), timeout=within_s)
        except RayError:  # dead, or no answer: the end of Ray ends the rest
            return False
        self._actor.__ray_terminate__.remote()
        return True


def _not_there(error: RayError) -> UnavailableError:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return UnavailableError(f"the supervisor does not start: {one_line(cause)}")
