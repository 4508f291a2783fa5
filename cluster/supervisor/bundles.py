"""Where the ranks of a replica run: a placement group of its name, a bundle for each rank. Blocks.

It is detached: Ray keeps it, and looks for room for it, whoever asked for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from baton.config.workers import POD_LABEL, pod_resource
from cluster.errors import ReplicaError
from cluster.supervisor.room import num_free
from cluster.worker.config import WorkerConfig
from cluster.worker.rank_gpus import needs_gpu

_RANK_CPUS = 0.001  # Ray only counts them: cores are divided by thread counts
_ROOM_BACK_WITHIN_S = 2.0  # what a removed placement group held is free again long before
_POD_FOUND_WITHIN_S = 1.0  # where one is free
_MACHINE_FOUND_WITHIN_S = 30.0


def rank_resources(config: WorkerConfig) -> dict[str, float]:
    """What a rank takes of a machine or pod, as Ray counts it."""
    resources = {"CPU": _RANK_CPUS} | ({"GPU": 1.0} if needs_gpu(config.engine) else {})
    return resources | ({pod_resource(config.pool): 1.0} if config.in_pod else {})


@dataclass(frozen=True)
class Spot:
    """Where all ranks of a replica have their room."""

    node_id: str
    """Ray's."""
    pod_name: str | None = None
    """None for a machine, and for a pod whose node does not tell its name."""


def ask(name: str, config: WorkerConfig) -> Spot | None:
    """Room for all ranks of a replica on one machine, or in one pod of the pool, which they fill.

    None: there is no such pod yet; it stays asked for. Raises ReplicaError where the machines have
    no room."""
    num_ranks, resources = config.tp_size, rank_resources(config)
    if not config.in_pod:
        _check_machines(num_ranks, resources)
        group = _new_group(name, num_ranks, resources)
        _wait_for_place(group, num_ranks, resources)
        return _spot_of(group)
    asked = find(name)
    if asked is None:
        asked = _new_group(name, num_ranks, resources)
        asked.wait(_POD_FOUND_WITHIN_S)
    return _spot_of(asked)


def _spot_of(group: PlacementGroup) -> Spot | None:
    node_id = node_of(group)
    return None if node_id is None else Spot(node_id, pods_by_node().get(node_id))


def pods_by_node() -> dict[str, str]:
    """Names of the pods that are Ray's nodes, as these tell them, by Ray's node ids."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    names = {node["NodeID"]: node["Labels"].get(POD_LABEL) for node in nodes if node["Alive"]}
    return {node_id: name for node_id, name in names.items() if name}


def _check_machines(num_ranks: int, resources: Mapping[str, float]) -> None:
    """Raises ReplicaError where no place that comes free could hold it."""
    if "GPU" in resources:
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        most = int(max(node["Resources"].get("GPU", 0) for node in nodes if node["Alive"]))
        if most < num_ranks:
            raise ReplicaError(f"{num_ranks} ranks need a GPU each; the largest machine has {most}")


def _new_group(name: str, num_ranks: int, resources: Mapping[str, float]) -> PlacementGroup:
    group: PlacementGroup = placement_group(
        [dict(resources)] * num_ranks, strategy="STRICT_PACK", name=name, lifetime="detached"
    )
    return group


def node_of(group: PlacementGroup) -> str | None:
    """Where it has its room, which can go and be another's then; None: it has none."""
    told: dict[str, Any] = ray.util.placement_group_table(group)
    return str(told["bundles_to_node_id"][0]) if told["state"] == "CREATED" else None


def _wait_for_place(group: PlacementGroup, num_ranks: int, resources: Mapping[str, float]) -> None:
    """Raises ReplicaError: soon when too little is free, late when Ray only is slow."""
    began_at = time.monotonic()
    while not group.wait(_ROOM_BACK_WITHIN_S):
        full = any(num_free(what) < num_ranks * amount for what, amount in resources.items())
        is_late = time.monotonic() - began_at > _MACHINE_FOUND_WITHIN_S
        if (full or is_late) and not group.wait(0):  # it may just have taken what was free
            text = f"no machine has room for {num_ranks} ranks"
            if "GPU" in resources:
                text += f" with a GPU each; free on all together: {num_free('GPU'):g}"
            raise ReplicaError(text)


def find(name: str) -> PlacementGroup | None:
    try:
        group: PlacementGroup = ray.util.get_placement_group(name)
    except ValueError:
        return None
    return group


def free(name: str) -> None:
    with contextlib.suppress(RayError):  # it is there no more
        group = find(name)
        if group is not None:
            remove_placement_group(group)
