"""A container's probes: startup first, then readiness and liveness, as often as they ask for."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_STOP_S = 5.0
_CLOSEST_LOOK_S = 0.05
_UNREADY_PERIOD_S = 0.5
"""A readiness probe that has not succeeded is tried so often at least: tests wait for it."""

RunInside = Callable[[tuple[str, ...], float], int | None]
"""Runs a command in the container with a timeout in seconds: its status, None if it did not end."""


class ProbeKind(Enum):
    STARTUP = "startupProbe"
    READINESS = "readinessProbe"
    LIVENESS = "livenessProbe"


@dataclass(frozen=True)
class Target:
    """What a probe asks."""

    address: str
    ports: Mapping[str, int]
    """The container's, by name."""
    run: RunInside

    def port(self, said: int | str) -> int:
        return self.ports[said] if isinstance(said, str) and not said.isdigit() else int(said)


@dataclass(frozen=True)
class Probe:
    action: Mapping[str, Any]
    """Holds one of `grpc`, `tcpSocket`, `httpGet`, `exec`."""
    period_s: float
    timeout_s: float
    num_failures: int

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Probe:
        """With Kubernetes' defaults."""
        return cls(
            said,
            float(said.get("periodSeconds") or 10),
            float(said.get("timeoutSeconds") or 1),
            int(said.get("failureThreshold") or 3),
        )

    def succeeds(self, target: Target) -> bool:
        if (asked := self.action.get("grpc")) is not None:
            return _serves_grpc(target.address, target.port(asked["port"]), self.timeout_s)
        if (asked := self.action.get("tcpSocket")) is not None:
            return _listens(target.address, target.port(asked["port"]), self.timeout_s)
        if (asked := self.action.get("httpGet")) is not None:
            return _answers_http(target, asked, self.timeout_s)
        if (asked := self.action.get("exec")) is not None:
            return target.run(tuple(asked["command"]), self.timeout_s) == 0
        raise AssertionError(f"no API server takes such a probe: {self.action}")


def probes_of(container: Mapping[str, Any]) -> dict[ProbeKind, Probe]:
    found = {kind: container.get(kind.value) for kind in ProbeKind}
    return {kind: Probe.of(said) for kind, said in found.items() if said}


class _Record:
    """What one probe has shown so far."""

    def __init__(self, kind: ProbeKind, probe: Probe, started_at: float) -> None:
        self._kind = kind
        self.probe = probe
        self.is_good = kind is ProbeKind.LIVENESS
        self.due_at = started_at
        self._num_failed = 0
        self.has_failed = False
        """Once it has been bad often enough."""

    def take(self, succeeded: bool, now: float) -> None:
        self._num_failed = 0 if succeeded else self._num_failed + 1
        self.has_failed = self._num_failed >= self.probe.num_failures
        if succeeded or self.has_failed:
            self.is_good = succeeded
        self.due_at = now + self.probe.period_s
        if self._kind is ProbeKind.READINESS and not self.is_good:
            self.due_at = now + min(self.probe.period_s, _UNREADY_PERIOD_S)


class Prober:
    """Own the thread that probes one run of a container."""

    def __init__(
        self, probes: Mapping[ProbeKind, Probe], target: Target, changed: Callable[[], None]
    ) -> None:
        """`changed` is called on the thread when what it shows has changed."""
        now = time.monotonic()
        self._target = target
        self._changed = changed
        self._records = {kind: _Record(kind, probe, now) for kind, probe in probes.items()}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._probe, name="prober", daemon=True)
        self._thread.start()

    @property
    def is_started(self) -> bool:
        return self._is_good(ProbeKind.STARTUP)

    @property
    def is_ready(self) -> bool:
        return self.is_started and self._is_good(ProbeKind.READINESS)

    @property
    def is_alive(self) -> bool:
        """False: the container has to be started again."""
        fatal = (ProbeKind.STARTUP, ProbeKind.LIVENESS)
        return not any(kind in self._records and self._records[kind].has_failed for kind in fatal)

    def stop(self) -> None:
        """Does not wait for a probe that is under way; `join` does."""
        self._stopping.set()

    def join(self) -> None:
        longest_s = max((r.probe.timeout_s for r in self._records.values()), default=0.0)
        self._thread.join(longest_s + _STOP_S)
        assert not self._thread.is_alive(), "a probe does not end"

    def _is_good(self, kind: ProbeKind) -> bool:
        record = self._records.get(kind)
        return record is None or record.is_good

    def _probe(self) -> None:
        while self._records and not self._stopping.is_set():
            kinds = (ProbeKind.READINESS, ProbeKind.LIVENESS)
            asked = kinds if self.is_started else (ProbeKind.STARTUP,)
            records = [self._records[kind] for kind in asked if kind in self._records]
            if not records:
                return
            record = min(records, key=lambda record: record.due_at)
            wait_s = max(record.due_at - time.monotonic(), _CLOSEST_LOOK_S)
            if self._stopping.wait(wait_s):
                return
            before = (self.is_started, self.is_ready, self.is_alive)
            record.take(record.probe.succeeds(self._target), time.monotonic())
            if (self.is_started, self.is_ready, self.is_alive) != before:
                self._changed()


def _serves_grpc(address: str, port: int, timeout_s: float) -> bool:
    with grpc.insecure_channel(f"{address}:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _listens(address: str, port: int, timeout_s: float) -> bool:
    try:
        socket.create_connection((address, port), timeout_s).close()
    except OSError:
        return False
    return True


def _answers_http(target: Target, asked: Mapping[str, Any], timeout_s: float) -> bool:
    port = target.port(asked["port"])
    connection = http.client.HTTPConnection(target.address, port, timeout=timeout_s)
    try:
        connection.request("GET", asked.get("path") or "/")
        return 200 <= connection.getresponse().status < 400
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
