"""What operators ask of the registry: the fleet, a pool's size, the units, a worker's drain.

`seen_by_clients` reads one part of its answers: the latencies that routers report for each pool.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc

from baton import status
from baton.control.calls import control_channel, control_stub
from baton.errors import BatonError, UnauthenticatedError, UnavailableError
from baton.grpc_options import DIRECT, sends_pings
from baton.identity.identity import Identity, operator_of
from baton.v1 import control_pb2

DEFAULT_ADDRESS = "127.0.0.1:7101"
_CALL_TIMEOUT_S = 10.0
_KEEPALIVE_S = 5.0  # a registry whose host hangs or vanished is left within twice this
# A pool shared by the process would also share its back-off, which grows to minutes.
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    *sends_pings(_KEEPALIVE_S),
    *DIRECT,
)
_UNREAD = "deserializing"  # gRPC's word for an answer that is not signed
_ADD_POOL_TIMEOUT_S = 90.0  # a dtype may have to be chosen, by a process that reads torch first


class ControlClient(contextlib.AbstractContextManager["ControlClient"]):
    """A client of the control service. It raises the errors of `baton.errors`."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        call_timeout_s: float = _CALL_TIMEOUT_S,
        identity: Identity | str | None = None,
    ) -> None:
        """Call as `identity`, or else as the operator that `operator_of` finds in this folder.
        Raises ConfigError where it finds none."""
        self.address, self._call_timeout_s = address, call_timeout_s
        own = identity if isinstance(identity, Identity) else operator_of(address, identity)
        self._identity = own
        self._opening, self._certificate = threading.Lock(), self._certificate_now()
        self._channel = self._open()

    def _open(self) -> Any:
        return control_channel(grpc, self.address, _CHANNEL_OPTIONS, self._identity)

    def _certificate_now(self) -> object:
        return None if self._identity.tls is None else self._identity.tls.now

    @property
    def _stub(self) -> Any:
        """Make a stub with the certificate of the moment: a channel keeps the one with which it was
        made."""
        with self._opening:
            if (now := self._certificate_now()) is not self._certificate:
                self._channel.close()
                self._certificate, self._channel = now, self._open()
            return control_stub(self._channel, self._identity)

    def fleet(self) -> control_pb2.WatchFleetResponse:
        answer: control_pb2.WatchFleetResponse = self._call(
            "WatchFleet", control_pb2.WatchFleetRequest(), is_stream=True
        )
        return answer

    def watch_fleet(self, timeout_s: float) -> Iterator[control_pb2.WatchFleetResponse]:
        """Yield the whole fleet on every change. Raises DeadlineError after `timeout_s`."""
        call = self._stub.WatchFleet(control_pb2.WatchFleetRequest(), timeout=timeout_s)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._error_of(cast(status.RpcFailure, error)) from error
        finally:
            call.cancel()

    def set_replicas(self, pool: str, replicas: int) -> int:
        """Set a pool's size. Returns the number of replicas that it had before."""
        request = control_pb2.SetReplicasRequest(pool=pool, replicas=replicas)
        return int(self._call("SetReplicas", request).previous_replicas)

    def set_role_plan(self, pool: str, prefill: int, decode: int) -> None:
        """Set how many of a mixed pool's workers only prefill, and how many only decode."""
        plan = control_pb2.RolePlan(prefill=prefill, decode=decode)
        self._call("SetRolePlan", control_pb2.SetRolePlanRequest(pool=pool, plan=plan))

    def add_pool(self, pool: str, config: str, replicas: int) -> None:
        """Add a pool. `config` is a cluster file, in YAML, that defines the pool and names the
        cluster's model."""
        request = control_pb2.AddPoolRequest(pool=pool, config=config, replicas=replicas)
        self._call("AddPool", request, _ADD_POOL_TIMEOUT_S)

    def close_pods(self, pod_names: Iterable[str]) -> None:
        """Have nothing placed on these pods any more, and open all others."""
        self._call("ClosePods", control_pb2.ClosePodsRequest(pod_names=pod_names))

    def agree_dtype(self, pool: str, dtype: str) -> str:
        """Return the dtype in which a pool's workers compute. `dtype` is what one of them proposes
        before it loads the model."""
        request = control_pb2.AgreeDtypeRequest(pool=pool, dtype=dtype)
        return str(self._call("AgreeDtype", request).dtype)

    def remove_pool(self, pool: str) -> None:
        """Forget a pool whose size is 0 and whose slots are empty."""
        self._call("RemovePool", control_pb2.RemovePoolRequest(pool=pool))

    def units(self) -> Sequence[control_pb2.Unit]:
        """Return the units that routers send requests to, with their shares, the oldest first."""
        answer = self._call("WatchUnits", control_pb2.WatchUnitsRequest(), is_stream=True)
        return list(answer.units)

    def set_units(self, units: Iterable[control_pb2.Unit]) -> None:
        """Set the units that routers send requests to, the oldest first."""
        self._call("SetUnits", control_pb2.SetUnitsRequest(units=units))

    def drain(self, worker_id: str) -> None:
        self._call("Drain", control_pb2.ControlServiceDrainRequest(worker_id=worker_id))

    def close(self) -> None:
        self._channel.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(
        self, method: str, request: Any, timeout_s: float | None = None, is_stream: bool = False
    ) -> Any:
        """Make a call and return its answer. `is_stream`: the first message of a stream."""
        timeout_s = self._call_timeout_s if timeout_s is None else timeout_s
        try:
            answer = getattr(self._stub, method)(request, timeout=timeout_s)
            if not is_stream:
                return answer
            try:
                return next(answer)
            finally:
                answer.cancel()
        except grpc.RpcError as error:
            failure = cast(status.RpcFailure, error)
            if status.is_out_of_time(failure):
                silent = f"no answer from {self.address} within {timeout_s:g} s"
                raise UnavailableError(silent) from error
            raise self._error_of(failure) from error

    def _error_of(self, failure: status.RpcFailure) -> BatonError:
        if failure.code() is grpc.StatusCode.INTERNAL and _UNREAD in (failure.details() or ""):
            return UnauthenticatedError(
                f"what answers at {self.address} does not prove that it is this cluster's control "
                "service"
            )
        return status.from_rpc_error(failure, self.address)


# --- what clients see -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SeenByClients:
    """What clients saw of a pool in the last minute: 95th percentiles in seconds, None where
    nothing was seen."""

    ttft_s: float | None = None
    """Time to first token of prompts that the pool prefilled."""
    itl_s: float | None = None
    """Gap between tokens of streams that the pool decodes."""


NOTHING_SEEN = SeenByClients()


def seen_by_clients(
    routers: Iterable[control_pb2.ReportRouterRequest],
) -> dict[str, SeenByClients]:
    """Return the worst figures of each pool that a router reported."""
    by_pool: dict[str, list[control_pb2.PoolFigures]] = {}
    for router in routers:
        for figures in router.pools:
            by_pool.setdefault(figures.pool, []).append(figures)
    return {
        pool: SeenByClients(
            max((each.ttft_p95_s for each in all_ if each.HasField("ttft_p95_s")), default=None),
            max((each.itl_p95_s for each in all_ if each.HasField("itl_p95_s")), default=None),
        )
        for pool, all_ in by_pool.items()
    }
