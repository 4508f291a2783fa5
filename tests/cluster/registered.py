"""Workers that register with a registry by hand, on a clock that the test moves."""

from __future__ import annotations

from baton.clock import ManualClock
from baton.v1 import common_pb2, control_pb2
from cluster.progress import Progress
from cluster.registry.registry import Registration, Registry, Stream
from tests.cluster.memory_replicas import process_of


def register(registry: Registry, pool: str, index: int) -> Stream:
    """Register a worker that is not live yet."""
    worker_id = f"{pool}-{index}"
    ref = common_pb2.WorkerRef(worker_id=worker_id, incarnation=1)
    info = control_pb2.WorkerInfo(ref=ref, pool=pool).SerializeToString()
    processes = frozenset({process_of(index)})
    stream = registry.register(Registration(worker_id, 1, pool, info, processes=processes))
    assert stream is not None
    return stream


def beat(registry: Registry, stream: Stream, draining: bool = False) -> None:
    registry.heartbeat(stream, Progress(False, 0.0, 0.01), b"", draining=draining)


def serve(registry: Registry, pool: str, index: int) -> None:
    """Register a live worker."""
    beat(registry, register(registry, pool, index))


def pass_s(clock: ManualClock, registry: Registry, seconds: float) -> None:
    """Let time pass while the registry is refreshed as often as it must be."""
    until_s = clock.now_s() + seconds
    while clock.now_s() < until_s:
        clock.advance(min(registry.config.look_s, until_s - clock.now_s()))
        registry.refresh()
