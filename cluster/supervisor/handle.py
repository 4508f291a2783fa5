"""The supervisor as those see it who start it, find it and end it: a named actor of the Ray that
this process is connected to. It outlives them all. Every method blocks on Ray.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from baton.config.cluster import ClusterConfig
from baton.errors import UnavailableError
from cluster.error_text import one_line
from cluster.supervisor.replica import NAMESPACE
from cluster.supervisor.supervisor import NAME, SupervisorActor

_ANSWER_WITHIN_S = 30.0
_ASK_AGAIN_S = 0.2
# Ray gives it to the head's node alone. Where that has gone the supervisor waits for the next one:
# in a pod of a pool it would go with that pod, and nobody would find its control service.
_HEAD = {"node:__internal_head__": 0.001}


class SupervisorHandle:
    """`start` it or `find` the one that is there, whoever started that."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def start(cls, config: ClusterConfig, run_dir: Path) -> Self:
        """Have Ray start it, and start it again for ever; where there is one, it stays as it is."""
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
        """Of its control service, as it announces it. Raises UnavailableError."""
        give_up_at = time.monotonic() + within_s
        while True:
            try:
                left_s = max(0.0, give_up_at - time.monotonic())
                address: str = ray.get(self._actor.address.remote(), timeout=left_s)
                return address
            except ActorUnavailableError as error:  # Ray is starting it again
                if time.monotonic() > give_up_at:
                    raise _not_there(error) from error
                time.sleep(_ASK_AGAIN_S)
            except RayError as error:
                raise _not_there(error) from error

    def pid(self) -> int:
        """Raises RayError while it is being started again."""
        pid: int = ray.get(self._actor.pid.remote(), timeout=_ANSWER_WITHIN_S)
        return pid

    def stop(self, within_s: float = _ANSWER_WITHIN_S) -> bool:
        """End every replica, then the supervisor; whether it said that no replica is left."""
        try:
            ray.get(self._actor.stop.remote(), timeout=within_s)
        except RayError:  # it is dead already, or does not answer: what ends Ray ends the rest
            return False
        self._actor.__ray_terminate__.remote()
        return True


def _not_there(error: RayError) -> UnavailableError:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return UnavailableError(f"the supervisor does not start: {one_line(cause)}")
