"""Replicas in Ray: a placement group and one actor per rank, all detached and named.

Every method blocks on Ray, so it must not run on an event loop. An actor's name is
`<pool>-<index>.g<generation>.r<rank>`. The generation makes a recreated replica's names new,
because Ray frees an old name only some time after its actor died.

Ray only asks a process to end, and a stopped or stuck process does not listen. In this machine and
pod the kernel ends it and proves the end. In another pod a Ray task does that there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from cluster.errors import PodLostError, ReplicaError, one_line
from cluster.supervisor import bundles
from cluster.supervisor.run_dir import ProcessTable, ReplicaProcesses
from cluster.worker.config import RankPosition, WorkerConfig
from cluster.worker.process import MAX_CALLS, RankActor, RankExit, RankStatus
from kv_transfer.process import ProcessIdentity, is_gone

log = logging.getLogger(__name__)

NAMESPACE = "baton"
_CALL_TIMEOUT_S = 30.0
_PROCESS_WITHIN_S = 120.0  # a process may read its libraries from a cold disk
_LOOK_S = 0.5
_LEAVE_S = 2.0
_KILLED_WITHIN_S = 1.0  # for a process that responds
_NAME = re.compile(r"(?P<pool>[A-Za-z0-9-]+)-(?P<index>\d+)\.g(?P<generation>\d+)")


@dataclass(frozen=True)
class ReplicaName:
    pool: str
    index: int
    generation: int

    @classmethod
    def new(cls, pool: str, index: int) -> ReplicaName:
        return cls(pool, index, time.time_ns() // 1_000_000)

    @classmethod
    def parse(cls, text: str) -> ReplicaName | None:
        match = _NAME.fullmatch(text)
        return match and cls(match["pool"], int(match["index"]), int(match["generation"]))

    @property
    def worker_id(self) -> str:
        return f"{self.pool}-{self.index}"

    def __str__(self) -> str:
        return f"{self.worker_id}.g{self.generation}"


@dataclass
class Replica:
    """A replica, or what there is of one: its actors by rank, and their processes."""

    name: ReplicaName
    actors: dict[int, Any] = field(default_factory=dict)
    processes: tuple[ProcessIdentity, ...] = ()
    serves: bool = False
    """It was found loaded and warmed up, so it registers again soon or never."""
    node_id: str | None = None
    """Ray's id of its node; None: unknown."""
    pod_name: str | None = None
    """The pod of a replica that was found, if known."""


class Replicas(Protocol):
    """Starts, finds and ends replicas. Every method blocks."""

    def reserve(
        self, name: ReplicaName, config: WorkerConfig, closed_pods: Collection[str] = ()
    ) -> str | None:
        """Reserve room for all ranks together, and return its pod's name; empty: not known, or no
        pod. None: no pod has room; the request stays open until `destroy`. Raises ReplicaError; an
        error leaves nothing behind."""

    def start(self, name: ReplicaName, config: WorkerConfig) -> Replica:
        """Launch all ranks in the reserved room. Raises ReplicaError, and PodLostError if the room
        is gone. An error leaves nothing behind."""

    def set_num_threads(self, replica: Replica, num_threads: int) -> None:
        """Send the number to every rank, without waiting: a stopped rank gets it when it
        resumes."""

    def find(self, tp_sizes: Mapping[str, int]) -> list[Replica]:
        """Adopt the newest complete replica of each slot of these pools.

        Everything else that is left of their replicas is ended, whether Ray lists it or not. Other
        pools' replicas are not touched. `tp_sizes`: pool -> ranks per replica."""

    def clear(self) -> None:
        """End everything that is left of any replica of any pool."""

    def destroy(self, replica: Replica) -> bool:
        """End every rank, wait until all are gone, and free their room. False: a process may be
        left, because Ray does not reach it or the kernel cannot end it."""


class RayReplicas:
    """Replicas as Ray actors. Knows their processes even after Ray has forgotten them."""

    def __init__(self, run_dir: Path, answer_within_s: float = _CALL_TIMEOUT_S) -> None:
        self._processes = ProcessTable(run_dir)
        self._answer_within_s = answer_within_s

    def reserve(
        self, name: ReplicaName, config: WorkerConfig, closed_pods: Collection[str] = ()
    ) -> str | None:
        with self._nothing_left(Replica(name)):
            return bundles.ask(str(name), config, closed_pods)

    def start(self, name: ReplicaName, config: WorkerConfig) -> Replica:
        begun, resources = Replica(name), bundles.rank_resources(config)
        with self._nothing_left(begun):
            group = bundles.find(str(name))
            node_id = None if group is None else bundles.node_of(group)
            if group is None or node_id is None:
                raise PodLostError("its node is gone")
            for rank in range(config.shape.tensor_parallel):
                begun.actors[rank] = _new_actor(name, group, rank, resources)
            try:
                self._launch(config, group, begun)
            except RayError as error:
                if bundles.node_of(group) != node_id:
                    raise PodLostError(f"its node is gone: {one_line(error)}") from error
                raise
        return begun

    @contextlib.contextmanager
    def _nothing_left(self, begun: Replica) -> Iterator[None]:
        """Destroy the begun replica after an error. Ray's errors become a ReplicaError."""
        try:
            yield
        except BaseException as error:
            self.destroy(begun)
            if isinstance(error, RayError):
                raise ReplicaError(one_line(error)) from error
            raise

    def _launch(self, config: WorkerConfig, group: PlacementGroup, begun: Replica) -> None:
        actors = begun.actors.values()
        entry = _entry_of(_first_statuses(begun.actors, group))
        begun.processes, begun.node_id = entry.processes, entry.node_id
        self._processes.add(str(begun.name), entry)
        meeting, tp_size = "", config.shape.tensor_parallel
        if tp_size > 1:
            port = ray.get(begun.actors[0].listen.remote(config.host), timeout=_CALL_TIMEOUT_S)
            meeting = f"{config.host}:{port}"
        positions = [RankPosition(rank, tp_size, meeting) for rank in begun.actors]
        launches = [
            actor.launch.remote(config, position) for actor, position in zip(actors, positions)
        ]
        ray.get(launches, timeout=_CALL_TIMEOUT_S)

    def set_num_threads(self, replica: Replica, num_threads: int) -> None:
        for actor in replica.actors.values():
            actor.set_num_threads.remote(num_threads)

    # --- replicas of a previous supervisor ------------------------------------------------------

    def find(self, tp_sizes: Mapping[str, int]) -> list[Replica]:
        newest: dict[str, Replica] = {}
        remains: list[Replica] = []
        left = self._left(tp_sizes.keys())
        for replica in sorted(left, key=lambda replica: replica.name.generation):
            if len(replica.actors) != tp_sizes[replica.name.pool]:
                log.warning("%s is incomplete: ending it", replica.name)
                remains.append(replica)
                continue
            older = newest.get(replica.name.worker_id)
            if older is not None:
                log.warning("%s is not the newest of its slot: ending it", older.name)
                remains.append(older)
            newest[replica.name.worker_id] = replica
        self._end(remains)
        kept = {str(replica.name) for replica in newest.values()}
        for name in _names_of_groups() - kept:
            if _name_of(name).pool in tp_sizes:
                bundles.free(name)
        pods = bundles.pods_by_node()
        for replica in newest.values():
            replica.pod_name = pods.get(replica.node_id or "")
        return list(newest.values())

    def clear(self) -> None:
        names = {*_listed_actors(), *self._processes.read()}
        self._end(self._left({_name_of(name).pool for name in names}))
        for name in _names_of_groups():
            bundles.free(name)

    def _end(self, remains: Sequence[Replica]) -> None:
        with ThreadPoolExecutor(MAX_CALLS) as threads:
            for replica, gone in zip(remains, threads.map(self.destroy, remains)):
                if not gone:
                    log.error("%s: not every process has provably ended", replica.name)

    def _left(self, pools: Collection[str]) -> list[Replica]:
        """Every replica of these pools with anything left: with the ranks that answer and were
        launched."""
        known, listed = self._processes.read(), _listed_actors()
        names = {text for text in {*listed, *known} if _name_of(text).pool in pools}
        actors = {text: listed[text] for text in names}
        answers = self._answers(actors)
        left = []
        for text in names:
            name, statuses = _name_of(text), answers[text]
            entry = known.get(text) or (_entry_of(list(statuses.values())) if statuses else None)
            ranks = {
                r: a for r, a in actors[text].items() if r in statuses and statuses[r].launched
            }
            for rank in actors[text].keys() - ranks.keys():
                _kill(actors[text][rank])
            replica = Replica(name, ranks, serves=0 in ranks and statuses[0].serves)
            if entry is not None:
                replica.processes, replica.node_id = entry.processes, entry.node_id
            left.append(replica)
        return left

    def _answers(self, actors: Mapping[str, Mapping[int, Any]]) -> dict[str, dict[int, RankStatus]]:
        """The ranks' statuses, requested from all at once."""
        calls = {
            actor.status.remote(): (name, rank)
            for name, ranks in actors.items()
            for rank, actor in ranks.items()
        }
        answers: dict[str, dict[int, RankStatus]] = defaultdict(dict)
        if calls:
            ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=self._answer_within_s)
            for call in ready:
                name, rank = calls[call]
                with contextlib.suppress(RayError):  # it has ended
                    answers[name][rank] = ray.get(call)
        return answers

    # --- the end --------------------------------------------------------------------------------

    def destroy(self, replica: Replica) -> bool:
        _let_leave(replica)
        for actor in replica.actors.values():
            _kill(actor)
        # By Ray first, else Ray would report a crashed worker.
        _wait_until_gone(replica.processes, _KILLED_WITHIN_S)
        ended = end_processes(replica.processes, replica.node_id)
        bundles.free(str(replica.name))
        if ended:
            self._processes.remove(str(replica.name))
        return ended


def _first_statuses(actors: Mapping[int, Any], group: PlacementGroup) -> list[RankStatus]:
    """Statuses of ranks whose processes are starting. Raises ReplicaError, PodLostError,
    RayError."""
    calls = [actor.status.remote() for actor in actors.values()]
    give_up_at = time.monotonic() + _PROCESS_WITHIN_S
    while ray.wait(calls, num_returns=len(calls), timeout=_LOOK_S)[1]:
        if bundles.node_of(group) is None:
            raise PodLostError("its node is gone")
        if time.monotonic() > give_up_at:
            raise ReplicaError(f"its processes did not start within {_PROCESS_WITHIN_S:g} s")
    statuses: list[RankStatus] = ray.get(calls)
    return statuses


def _entry_of(statuses: Sequence[RankStatus]) -> ReplicaProcesses:
    """The table's entry of a replica, whose ranks all run on one node."""
    return ReplicaProcesses(tuple(status.process for status in statuses), statuses[0].node_id)


def _new_actor(
    name: ReplicaName, group: PlacementGroup, rank: int, resources: Mapping[str, float]
) -> Any:
    return (
        ray.remote(RankActor)
        .options(
            name=f"{name}.r{rank}",
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            max_concurrency=MAX_CALLS,
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            resources={k: v for k, v in resources.items() if k not in ("CPU", "GPU")},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=rank
            ),
        )
        .remote()
    )


def _listed_actors() -> defaultdict[str, dict[int, Any]]:
    """Ray's rank actors: replica name -> rank -> actor."""
    actors: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    for listed in ray.util.list_named_actors(all_namespaces=True):
        name, _, rank = listed["name"].rpartition(".r")
        if listed["namespace"] == NAMESPACE and rank.isdigit() and ReplicaName.parse(name):
            with contextlib.suppress(ValueError):  # it died after it was listed
                actors[name][int(rank)] = ray.get_actor(listed["name"], namespace=NAMESPACE)
    return actors


def _kill(actor: Any) -> None:
    with contextlib.suppress(RayError):  # it has already ended
        ray.kill(actor, no_restart=True)


def _let_leave(replica: Replica) -> None:
    """Give ranks that still respond a moment to exit in order."""
    actors = replica.actors.values()
    if not actors:
        return
    with contextlib.suppress(RayError):  # dead or too busy: it is killed next
        ray.get([actor.leave.remote() for actor in actors], timeout=_LEAVE_S)
        over = [actor.wait_for_exit.remote(_LEAVE_S) for actor in actors]
        if not all(ray.get(over, timeout=_LEAVE_S)):
            return
        for actor in actors:
            actor.__ray_terminate__.remote()
        _wait_until_gone(replica.processes, _LEAVE_S)


def _wait_until_gone(processes: Sequence[ProcessIdentity], within_s: float) -> None:
    """Wait for the processes that can be checked from here."""
    give_up_at = time.monotonic() + within_s
    here = [process for process in processes if is_gone(process) is not None]
    while time.monotonic() < give_up_at and not all(map(is_gone, here)):
        time.sleep(0.02)


def _names_of_groups() -> set[str]:
    """Names of replicas' placement groups. An interrupted start may leave one without actors."""
    groups = ray.util.placement_group_table().values()
    names = {group["name"] for group in groups if group["state"] != "REMOVED"}
    return {name for name in names if ReplicaName.parse(name)}


def _name_of(text: str) -> ReplicaName:
    """Parse a replica's name."""
    name = ReplicaName.parse(text)
    assert name is not None, text
    return name


_ASK_S = 1.0
_UNAVAILABLE_S = 0.1


@dataclass(frozen=True)
class RankEnd:
    """A rank has ended. `failure`: why; None: it left in order."""

    replica: ReplicaName
    rank: int
    failure: str | None


class RankWatch:
    """Asks every watched rank whether it has ended, one call after the other.

    Each call waits at most `_ASK_S`. A call outlives its caller, so a longer wait would hold one of
    the rank's few threads for every past supervisor.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[ReplicaName, int], Any] = {}

    def wait(self, replicas: Sequence[Replica], timeout_s: float) -> list[RankEnd]:
        """Wait for the first answers of these replicas' ranks. Returns the ranks that have ended,
        which may be none."""
        self._calls = {
            (replica.name, rank): self._calls.get((replica.name, rank))
            or actor.wait_for_exit.remote(_ASK_S)
            for replica in replicas
            for rank, actor in replica.actors.items()
        }
        if not self._calls:
            time.sleep(timeout_s)
            return []
        calls = list(self._calls.values())
        ray.wait(calls, num_returns=1, timeout=timeout_s, fetch_local=False)
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0, fetch_local=False)
        ends = []
        for (name, rank), call in list(self._calls.items()):
            if call in ready:
                del self._calls[name, rank]
                if (over := _answer(call)) is not None:
                    ends.append(RankEnd(name, rank, over.failure))
        return ends


def _answer(call: Any) -> RankExit | None:
    try:
        over: RankExit | None = ray.get(call)  # it is there
    except ActorUnavailableError:  # unreachable: whether it has ended is unknown
        time.sleep(_UNAVAILABLE_S)
        return None
    except RayError as error:  # the process died without an error report
        return RankExit(one_line(error))
    return over


# --- ending processes ---------------------------------------------------------------------------

_GONE_WITHIN_S = 10.0
_TASK_WITHIN_S = 20.0  # Ray must start a process there first


def end_processes(processes: Sequence[ProcessIdentity], node_id: str | None) -> bool:
    """Kill all and wait until they are gone. False: that could not be proved.

    `node_id`: Ray's id of their node, if known."""
    far = [process for process in processes if is_gone(process) is None]
    left = kill_by_pid(processes)
    return not left and (not far or _end_far(far, node_id))


def kill_by_pid(processes: Sequence[ProcessIdentity]) -> list[ProcessIdentity]:
    """Kill all that run here and wait until they are gone. Returns those that are not."""
    give_up_at = time.monotonic() + _GONE_WITHIN_S
    while True:
        left = [process for process in processes if is_gone(process) is False]
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if not left or time.monotonic() >= give_up_at:
            return left
        time.sleep(0.02)


def _end_there(processes: Sequence[ProcessIdentity]) -> bool:
    """The Ray task that ends processes in their own pod."""
    return not kill_by_pid(processes) and all(map(is_gone, processes))


def _end_far(processes: Sequence[ProcessIdentity], node_id: str | None) -> bool:
    if node_id is None:
        return False
    if _is_leaving(node_id):
        return True
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(_end_there).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    try:
        ended: bool = ray.get(task.remote(processes), timeout=_TASK_WITHIN_S)
    except RayError:
        return _is_leaving(node_id)
    return ended


def _is_leaving(node_id: str) -> bool:
    """Whether the pod is gone or drains. Nothing new starts in a draining pod, and what is left
    ends with its raylet, which exits once nothing is placed there."""
    nodes: list[dict[str, object]] = ray.nodes()  # type: ignore[no-untyped-call]
    if not any(node["NodeID"] == node_id and node["Alive"] for node in nodes):
        return True
    return node_id in ray._private.state.state.get_draining_nodes()
