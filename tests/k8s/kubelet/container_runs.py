"""The runs of a pod's container, one after the other, and when the next one may begin."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from deploy.controller.kit.errors import KubeError
from tests.k8s.kubelet.container import ContainerRun, Ended
from tests.k8s.kubelet.errors import ContainerError
from tests.k8s.kubelet.pod_status import ContainerState

_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 5.0
"""A fraction of Kubernetes' 10 s and 5 min, since tests wait for it."""
_RETRY_S = 0.5

Start = Callable[[Mapping[str, Any], int], ContainerRun]
"""Starts a container's run of that number. Raises ContainerError, KubeError."""


class ContainerRuns:
    """Own a container's runs. `look` moves it on; one thread looks."""

    def __init__(self, pod_spec: Mapping[str, Any], spec: Mapping[str, Any], is_init: bool) -> None:
        """An init container that has succeeded never runs again."""
        restart_policy = pod_spec.get("restartPolicy") or "Always"
        self._grace_s = float(pod_spec.get("terminationGracePeriodSeconds") or 30)
        self._spec = spec
        self._policy = "OnFailure" if is_init and restart_policy == "Always" else restart_policy
        self._run: ContainerRun | None = None
        self._num_runs = 0
        self._last_end: Ended | None = None
        self._due_at: float | None = None
        """When the next run may begin; None: now, or when the one there is has ended."""
        self._problem = ""
        self._is_over = False

    @property
    def name(self) -> str:
        return str(self._spec["name"])

    @property
    def run(self) -> ContainerRun | None:
        """The newest."""
        return self._run

    @property
    def has_succeeded(self) -> bool:
        ended = None if self._run is None else self._run.ended
        return self._is_over and ended is not None and ended.status == 0

    def look(self, start: Start, ends_at: Callable[[], float]) -> None:
        """`ends_at`: the pod's end, in monotonic time. A run that hangs is stopped first."""
        run = self._run
        if run is not None and run.ended is None:
            if not run.is_alive:
                own_end = time.monotonic() + self._grace_s
                run.stop(lambda: min(own_end, ends_at()))
            return
        if run is not None and run.ended is not None and self._due_at is None:
            run.end()
            self._last_end = run.ended
            self._is_over = not self._is_started_again(run.ended.status)
            backoff_s = min(_FIRST_BACKOFF_S * 2 ** (self._num_runs - 1), _LONGEST_BACKOFF_S)
            self._due_at = time.monotonic() + backoff_s
        if not self._is_over and (self._due_at is None or time.monotonic() >= self._due_at):
            self._begin(start)

    def next_look_at(self) -> float | None:
        """A monotonic time; None: when something has changed."""
        return None if self._is_over else self._due_at

    def state(self) -> ContainerState:
        run, image = self._run, str(self._spec.get("image", ""))
        if run is None:
            reason = "CreateContainerConfigError" if self._problem else "ContainerCreating"
            return ContainerState(self.name, image, waits_for=reason, message=self._problem)
        num_restarts = self._num_runs - 1
        if run.ended is None:
            return ContainerState(
                self.name,
                image,
                running_since=run.started_at,
                ended=self._last_end,
                is_started=run.is_started,
                is_ready=run.is_ready,
                num_restarts=num_restarts,
            )
        return ContainerState(
            self.name,
            image,
            ended=run.ended,
            num_restarts=num_restarts,
            waits_for=None if self._is_over else "CrashLoopBackOff",
            is_over=self._is_over,
        )

    def _is_started_again(self, status: int) -> bool:
        return self._policy == "Always" or (self._policy == "OnFailure" and status != 0)

    def _begin(self, start: Start) -> None:
        try:
            self._run = start(self._spec, self._num_runs)
        except (ContainerError, KubeError) as error:
            self._problem = str(error)
            self._due_at = time.monotonic() + _RETRY_S
            return
        self._num_runs += 1
        self._due_at = None
        self._problem = ""
