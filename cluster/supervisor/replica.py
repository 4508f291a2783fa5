"""Replicas as Ray sees them: a placement group and one actor per rank, all detached and named.

Every method here blocks on Ray and belongs off the event loop. A name is
`<pool>-<index>.g<generation>.r<rank>`: the generation makes a recreated replica's names new, as Ray
frees an old name only some time after its actor died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.error_text import one_line
from cluster.errors import PodLostError, ReplicaError
from cluster.supervisor import bundles as places
from cluster.supervisor.bundles import Spot
from cluster.supervisor.process_ends import end_processes
from cluster.supervisor.process_table import Entry, ProcessBook
from cluster.worker.config import RankPlace, WorkerConfig
from cluster.worker.rank_actor import MAX_CALLS, RankActor, Standing
from kv_transfer.process import ProcessIdentity, is_gone

log = logging.getLogger(__name__)

NAMESPACE = "baton"
_CALL_TIMEOUT_S = 30.0
_PROCESS_WITHIN_S = 120.0  # to read its libraries from a disk that has never been asked for them
_LOOK_S = 0.5
_LEAVE_S = 2.0
_KILLED_WITHIN_S = 1.0  # a process that listens
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


@dataclass(frozen=True)
class Replica:
    """A replica, or what is left of one: its actors by rank, and the processes they are."""

    name: ReplicaName
    actors: Mapping[int, Any]
    processes: tuple[ProcessIdentity, ...]
    serves: bool = False
    """Found loaded and warmed up: it will register again soon, or never."""
    node_id: str | None = None
    """Ray's, of where it runs; None: not known."""
    pod_name: str | None = None
    """Of one that was found: where it runs, if that is a pod of a known name."""


class Replicas:
    """Starts, finds and ends replicas; knows their processes even after Ray has forgotten them."""

    def __init__(self, run_dir: Path, answer_within_s: float = _CALL_TIMEOUT_S) -> None:
        self._book = ProcessBook(run_dir / "processes")
        self._answer_within_s = answer_within_s

    def place(self, name: ReplicaName, config: WorkerConfig) -> Spot | None:
        """Ask for room for all ranks together, and tell where it is. None: no pod has it; it is
        asked for until `destroy`. Raises ReplicaError; nothing is left after an error."""
        with self._nothing_left(_Begun(name)):
            return places.ask(str(name), config)

    def start(self, name: ReplicaName, config: WorkerConfig) -> Replica:
        """Launch all ranks where they have room. Raises ReplicaError, and PodLostError where they
        have it no more; nothing is left after an error."""
        begun, resources = _Begun(name), places.rank_resources(config)
        with self._nothing_left(begun):
            group = places.find(str(name))
            node_id = None if group is None else places.node_of(group)
            if group is None or node_id is None:
                raise PodLostError("its place is gone")
            for rank in range(config.tp_size):
                begun.actors[rank] = _new_actor(name, group, rank, resources)
            try:
                self._launch(config, group, begun)
            except RayError as error:
                if places.node_of(group) != node_id:
                    raise PodLostError(f"its place is gone: {one_line(error)}") from error
                raise
        return begun.replica()

    @contextlib.contextmanager
    def _nothing_left(self, begun: _Begun) -> Iterator[None]:
        """After an error, which is a ReplicaError then where it was Ray's."""
        try:
            yield
        except BaseException as error:
            self.destroy(begun.replica())
            if isinstance(error, RayError):
                raise ReplicaError(one_line(error)) from error
            raise

    def _launch(self, config: WorkerConfig, group: PlacementGroup, begun: _Begun) -> None:
        actors = begun.actors.values()
        begun.entry = _entry_of(_first_standings(begun.actors, group))
        self._book.enter(str(begun.name), begun.entry)
        meeting = ""
        if config.tp_size > 1:
            port = ray.get(begun.actors[0].listen.remote(config.host), timeout=_CALL_TIMEOUT_S)
            meeting = f"{config.host}:{port}"
        places = [RankPlace(rank, config.tp_size, meeting) for rank in begun.actors]
        launches = [actor.launch.remote(config, place) for actor, place in zip(actors, places)]
        ray.get(launches, timeout=_CALL_TIMEOUT_S)

    def set_num_threads(self, replica: Replica, num_threads: int) -> None:
        """Tell every rank. Not waited for: one that is stopped hears it when it goes on."""
        for actor in replica.actors.values():
            actor.set_num_threads.remote(num_threads)

    # --- what a former supervisor left ----------------------------------------------------------

    def find(self, tp_sizes: Mapping[str, int]) -> list[Replica]:
        """Adopt whole replicas, one of a place: the newest. All else that is left of replicas of
        these pools, listed by Ray or not, is ended; other pools' may be adopted yet. `tp_sizes`:
        ranks of one replica of each pool.
        """
        newest: dict[str, Replica] = {}
        remains: list[Replica] = []
        left = self._left(tp_sizes.keys())
        for replica in sorted(left, key=lambda replica: replica.name.generation):
            if len(replica.actors) != tp_sizes[replica.name.pool]:
                log.warning("%s is not whole: clearing it away", replica.name)
                remains.append(replica)
                continue
            older = newest.get(replica.name.worker_id)
            if older is not None:
                log.warning("%s is not the newest of its place: ending it", older.name)
                remains.append(older)
            newest[replica.name.worker_id] = replica
        self._end(remains)
        kept = {str(replica.name) for replica in newest.values()}
        for name in _names_of_groups() - kept:
            if _name_of(name).pool in tp_sizes:
                places.free(name)
        pods = places.pods_by_node()
        return [
            dataclasses.replace(replica, pod_name=pods.get(replica.node_id or ""))
            for replica in newest.values()
        ]

    def clear(self) -> None:
        """End all that is left of any replica of any pool."""
        names = {*_listed_actors(), *self._book.read()}
        self._end(self._left({_name_of(name).pool for name in names}))
        for name in _names_of_groups():
            places.free(name)

    def _end(self, remains: Sequence[Replica]) -> None:
        with ThreadPoolExecutor(MAX_CALLS) as threads:
            for replica, gone in zip(remains, threads.map(self.destroy, remains)):
                if not gone:
                    log.error("%s: not every process is known to be over", replica.name)

    def _left(self, pools: Collection[str]) -> list[Replica]:
        """Every replica of these pools of which anything is left, with the ranks that answer and
        were launched."""
        booked, listed = self._book.read(), _listed_actors()
        names = {text for text in {*listed, *booked} if _name_of(text).pool in pools}
        actors = {text: listed[text] for text in names}
        answers = self._answers(actors)
        left = []
        for text in names:
            name, told = _name_of(text), answers[text]
            entry = booked.get(text) or (_entry_of(list(told.values())) if told else None)
            ranks = {r: a for r, a in actors[text].items() if r in told and told[r].launched}
            for rank in actors[text].keys() - ranks.keys():
                _kill(actors[text][rank])
            serves = 0 in ranks and told[0].serves
            left.append(_replica(name, ranks, entry, serves))
        return left

    def _answers(self, actors: Mapping[str, Mapping[int, Any]]) -> dict[str, dict[int, Standing]]:
        """What the ranks say of themselves, all asked at once."""
        calls = {
            actor.standing.remote(): (name, rank)
            for name, ranks in actors.items()
            for rank, actor in ranks.items()
        }
        answers: dict[str, dict[int, Standing]] = defaultdict(dict)
        if calls:
            ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=self._answer_within_s)
            for call in ready:
                name, rank = calls[call]
                with contextlib.suppress(RayError):  # it is over
                    answers[name][rank] = ray.get(call)
        return answers

    # --- the end --------------------------------------------------------------------------------

    def destroy(self, replica: Replica) -> bool:
        """End every rank by Ray and by pid, wait until all are gone, and free their place.

        False when a process may be left: where Ray does not reach it, or one that even the kernel
        cannot end.
        """
        _let_leave(replica)
        for actor in replica.actors.values():
            _kill(actor)
        # By Ray, or it would tell everybody of a worker that died.
        _wait_until_gone(replica.processes, _KILLED_WITHIN_S)
        ended = end_processes(replica.processes, replica.node_id)
        places.free(str(replica.name))
        if ended:
            self._book.strike(str(replica.name))
        return ended


@dataclass
class _Begun:
    """How far a start has come."""

    name: ReplicaName
    actors: dict[int, Any] = field(default_factory=dict)
    entry: Entry | None = None

    def replica(self) -> Replica:
        return _replica(self.name, self.actors, self.entry)


def _replica(
    name: ReplicaName, actors: Mapping[int, Any], entry: Entry | None, serves: bool = False
) -> Replica:
    if entry is None:
        return Replica(name, actors, (), serves)
    return Replica(name, actors, entry.processes, serves, entry.node_id)


def _first_standings(actors: Mapping[int, Any], group: PlacementGroup) -> list[Standing]:
    """Of processes that are only being started. Raises ReplicaError, PodLostError, RayError."""
    calls = [actor.standing.remote() for actor in actors.values()]
    give_up_at = time.monotonic() + _PROCESS_WITHIN_S
    while ray.wait(calls, num_returns=len(calls), timeout=_LOOK_S)[1]:
        if places.node_of(group) is None:
            raise PodLostError("its place is gone")
        if time.monotonic() > give_up_at:
            raise ReplicaError(f"no process within {_PROCESS_WITHIN_S:g} s")
    standings: list[Standing] = ray.get(calls)
    return standings


def _entry_of(standings: Sequence[Standing]) -> Entry:
    """All ranks of a replica run in one place."""
    return Entry(tuple(standing.process for standing in standings), standings[0].node_id)


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
    """Ray's actors that are ranks, by the replica's name and rank."""
    actors: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    for listed in ray.util.list_named_actors(all_namespaces=True):
        name, _, rank = listed["name"].rpartition(".r")
        if listed["namespace"] == NAMESPACE and rank.isdigit() and ReplicaName.parse(name):
            with contextlib.suppress(ValueError):  # it died since it was listed
                actors[name][int(rank)] = ray.get_actor(listed["name"], namespace=NAMESPACE)
    return actors


def _kill(actor: Any) -> None:
    with contextlib.suppress(RayError):  # it is over already
        ray.kill(actor, no_restart=True)


def _let_leave(replica: Replica) -> None:
    """Give ranks that still listen a moment to give back what they hold."""
    actors = replica.actors.values()
    if not actors:
        return
    with contextlib.suppress(RayError):  # dead, or too busy to listen: it is killed then
        ray.get([actor.leave.remote() for actor in actors], timeout=_LEAVE_S)
        over = [actor.wait_until_over.remote(_LEAVE_S) for actor in actors]
        if not all(ray.get(over, timeout=_LEAVE_S)):
            return
        for actor in actors:
            actor.__ray_terminate__.remote()
        _wait_until_gone(replica.processes, _LEAVE_S)


def _wait_until_gone(processes: Sequence[ProcessIdentity], within_s: float) -> None:
    """Those that can be looked at from here, for this long at most."""
    give_up_at = time.monotonic() + within_s
    here = [process for process in processes if is_gone(process) is not None]
    while time.monotonic() < give_up_at and not all(map(is_gone, here)):
        time.sleep(0.02)


def _names_of_groups() -> set[str]:
    """Of replicas: a start that was cut off may have left one without an actor in it."""
    groups = ray.util.placement_group_table().values()
    names = {group["name"] for group in groups if group["state"] != "REMOVED"}
    return {name for name in names if ReplicaName.parse(name)}


def _name_of(text: str) -> ReplicaName:
    """Of a replica, as it was written."""
    name = ReplicaName.parse(text)
    assert name is not None, text
    return name
