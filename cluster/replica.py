"""Replicas as Ray sees them: a placement group and one actor per rank, all detached and named.

Every function here blocks on Ray and belongs off the event loop. A name is
`<pool>-<index>.g<generation>.r<rank>`: the generation makes a recreated replica's names new, as Ray
frees an old name only some time after its actor died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.rank import free_port
from cluster.worker_config import RankPlace, WorkerConfig
from cluster.worker_process import WorkerThread, set_up_logging
from kv_transfer.process import ProcessIdentity, is_gone, own_identity

log = logging.getLogger(__name__)

NAMESPACE = "baton"
_RANK_CPUS = 0.001  # Ray only counts them: cores are divided by thread counts
_CALL_TIMEOUT_S = 30.0
_LEAVE_S = 2.0
_LONGEST_ERROR = 600
_NAME = re.compile(r"(?P<pool>[A-Za-z0-9-]+)-(?P<index>\d+)\.g(?P<generation>\d+)\.r(?P<rank>\d+)$")


class RankActor:
    """The process of one rank. The worker lives in a thread; the actor's calls watch over it."""

    def __init__(self) -> None:
        self._worker: WorkerThread | None = None

    def identity(self) -> ProcessIdentity:
        return own_identity()

    def free_port(self, host: str) -> int:
        return free_port(host)

    def launch(self, config: WorkerConfig, place: RankPlace) -> None:
        """Start the rank; it registers by itself. A rank that fails ends this process."""
        set_up_logging(config.log_level, config.log_file(place.rank))
        self._worker = WorkerThread(config, place)
        self._worker.start()

    def leave(self) -> None:
        """End the rank now, in good order; what runs is lost."""
        if self._worker is not None:
            self._worker.stop()

    def join(self) -> str | None:
        """Return when the rank is over: why it failed, None when it has left in good order."""
        assert self._worker is not None, "launch comes first"
        return self._worker.wait()


@dataclass(frozen=True)
class ReplicaName:
    pool: str
    index: int
    generation: int

    @property
    def worker_id(self) -> str:
        return f"{self.pool}-{self.index}"

    def __str__(self) -> str:
        return f"{self.pool}-{self.index}.g{self.generation}"

    def rank(self, rank: int) -> str:
        return f"{self}.r{rank}"


@dataclass(frozen=True)
class Replica:
    """A running replica: its actors and processes by rank. `ends` are ready when a rank is over."""

    name: ReplicaName
    actors: tuple[Any, ...]
    processes: tuple[ProcessIdentity, ...]
    ends: tuple[Any, ...]


class ReplicaError(RuntimeError):
    """A replica could not be started."""


def new_name(pool: str, index: int) -> ReplicaName:
    return ReplicaName(pool, index, time.time_ns() // 1_000_000)


def start_replica(name: ReplicaName, config: WorkerConfig) -> Replica:
    """Place and launch all ranks. Raises ReplicaError, and leaves nothing then."""
    group = placement_group(
        [{"CPU": _RANK_CPUS}] * config.tp_size,
        strategy="STRICT_PACK",
        name=str(name),
        lifetime="detached",
    )
    actors: list[Any] = []
    try:
        if not group.wait(_CALL_TIMEOUT_S):
            raise ReplicaError(f"no room in the Ray cluster for {config.tp_size} ranks")
        actors = [_new_actor(name.rank(r), group, r) for r in range(config.tp_size)]
        processes = tuple(
            ray.get([actor.identity.remote() for actor in actors], timeout=_CALL_TIMEOUT_S)
        )
        port = ray.get(actors[0].free_port.remote(config.host), timeout=_CALL_TIMEOUT_S)
        places = [RankPlace(r, config.tp_size, f"{config.host}:{port}") for r in range(len(actors))]
        ray.get(
            [actor.launch.remote(config, place) for actor, place in zip(actors, places)],
            timeout=_CALL_TIMEOUT_S,
        )
    except (RayError, ReplicaError) as error:
        for actor in actors:
            ray.kill(actor, no_restart=True)
        remove_placement_group(group)
        raise ReplicaError(_one_line(error)) from error
    ends = tuple(actor.join.remote() for actor in actors)
    return Replica(name, tuple(actors), processes, ends)


def _new_actor(name: str, group: PlacementGroup, bundle: int) -> Any:
    return (
        ray.remote(RankActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            max_concurrency=8,
            num_cpus=_RANK_CPUS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            ),
        )
        .remote()
    )


def find_replicas(tp_sizes: dict[str, int]) -> list[Replica]:
    """Adopt what a former supervisor left: whole replicas. What is not whole is cleared away."""
    ranks: dict[ReplicaName, dict[int, str]] = defaultdict(dict)
    for listed in ray.util.list_named_actors(all_namespaces=True):
        match = _NAME.match(listed["name"])
        if listed["namespace"] == NAMESPACE and match is not None:
            name = ReplicaName(match["pool"], int(match["index"]), int(match["generation"]))
            ranks[name][int(match["rank"])] = listed["name"]
    found = []
    for name, names in ranks.items():
        replica = _adopt(name, names)
        if replica is not None and len(replica.actors) == tp_sizes.get(name.pool):
            found.append(replica)
        else:
            log.warning("%s is not whole: clearing it away", name)
            for actor in _actors(names):
                ray.kill(actor, no_restart=True)
            _remove_group(name)
    return found


def _actors(names: dict[int, str]) -> list[Any]:
    actors = []
    for _, name in sorted(names.items()):
        with contextlib.suppress(ValueError):  # it died since it was listed
            actors.append(ray.get_actor(name, namespace=NAMESPACE))
    return actors


def _adopt(name: ReplicaName, names: dict[int, str]) -> Replica | None:
    actors = _actors(names)
    try:
        processes = ray.get([a.identity.remote() for a in actors], timeout=_CALL_TIMEOUT_S)
    except RayError:
        return None
    ends = tuple(actor.join.remote() for actor in actors)
    return Replica(name, tuple(actors), tuple(processes), ends)


@dataclass(frozen=True)
class RankEnd:
    """A rank is over. `failure` is why, None when it has left in good order."""

    replica: ReplicaName
    rank: int
    failure: str | None


def wait_for_end(replicas: list[Replica], timeout_s: float) -> list[RankEnd]:
    """The ranks that are over; waits for the first."""
    owners = {end: (r.name, rank) for r in replicas for rank, end in enumerate(r.ends)}
    if not owners:
        time.sleep(timeout_s)
        return []
    ready, _ = ray.wait(list(owners), num_returns=1, timeout=timeout_s, fetch_local=False)
    return [RankEnd(*owners[end], _failure_of(end)) for end in ready]


def _failure_of(end: Any) -> str | None:
    try:
        failure: str | None = ray.get(end, timeout=_CALL_TIMEOUT_S)
    except RayError as error:  # the process died and told nothing
        return _one_line(error)
    return failure


def _one_line(error: Exception) -> str:
    """Ray's messages run over many lines, the cause somewhere among them."""
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]} ..."


def destroy_replica(replica: Replica, timeout_s: float = 10.0) -> bool:
    """End every rank by Ray and by pid, wait until all are gone, and free their place.

    False when a process may be left: on another machine, or one that even the kernel cannot end.
    """
    _let_leave(replica)
    for actor in replica.actors:
        with contextlib.suppress(RayError):  # it is over already
            ray.kill(actor, no_restart=True)
    give_up_at = time.monotonic() + timeout_s
    for process in replica.processes:
        # Ray only asks; a stopped or stuck process does not listen. None: on another machine.
        while is_gone(process) is False and time.monotonic() < give_up_at:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.02)
    _remove_group(replica.name)
    return all(map(is_gone, replica.processes))


def _let_leave(replica: Replica) -> None:
    """Give ranks that still listen a moment to give back what they hold."""
    with contextlib.suppress(RayError):  # dead, or too busy to listen: it is killed then
        ray.get([actor.leave.remote() for actor in replica.actors], timeout=_LEAVE_S)
        ray.get(list(replica.ends), timeout=_LEAVE_S)
        for actor in replica.actors:
            actor.__ray_terminate__.remote()
        give_up_at = time.monotonic() + _LEAVE_S
        while time.monotonic() < give_up_at and not all(map(is_gone, replica.processes)):
            time.sleep(0.02)


def _remove_group(name: ReplicaName) -> None:
    with contextlib.suppress(ValueError, RayError):  # there is none any more
        remove_placement_group(ray.util.get_placement_group(str(name)))
