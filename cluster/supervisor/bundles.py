"""Room for a replica's ranks: a Ray placement group with the replica's name and a bundle per rank.

The group is detached: Ray keeps it, and keeps looking for room, after its creator has gone. Every
function blocks on Ray.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from baton.config.workers import POD_LABEL, pod_resource
from baton.errors import NoCapacityError
from cluster.errors import ReplicaError
from cluster.pools.pool_settings import PoolSettings, num_gpus_wanted
from cluster.worker.config import WorkerConfig

_RANK_CPUS = 0.001  # Ray only counts CPUs: thread counts divide the cores
_ROOM_BACK_WITHIN_S = 2.0  # Ray frees a removed placement group's room much sooner
_POD_FOUND_WITHIN_S = 1.0  # if one is free
_MACHINE_FOUND_WITHIN_S = 30.0


def rank_resources(config: WorkerConfig) -> dict[str, float]:
    """The Ray resources of one rank."""
    resources = {"CPU": _RANK_CPUS} | ({"GPU": 1.0} if config.engine.needs_gpu else {})
    return resources | ({pod_resource(config.pool): 1.0} if config.in_pod else {})


def ask(name: str, config: WorkerConfig, closed_pods: Collection[str]) -> str | None:
    """Request room for all ranks of a replica on one machine, or in one pod of the pool: none that
    was closed when it was first asked for.

    Returns the pod's name; empty for a machine, and for a pod whose node has no name label. None:
    no pod has room yet; the request stays open. Raises ReplicaError if no machine has room."""
    num_ranks, resources = config.shape.tensor_parallel, rank_resources(config)
    if not config.in_pod:
        group = _new_group(name, num_ranks, resources)
        _wait_for_place(group, num_ranks, resources)
        return ""
    asked = find(name)
    if asked is None:
        asked = _new_group(name, num_ranks, resources, closed_pods)
        asked.wait(_POD_FOUND_WITHIN_S)
    node_id = node_of(asked)
    return None if node_id is None else pods_by_node().get(node_id, "")


def pods_by_node() -> dict[str, str]:
    """Ray node id -> pod name, for nodes with a pod name label."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    names = {node["NodeID"]: node["Labels"].get(POD_LABEL) for node in nodes if node["Alive"]}
    return {node_id: name for node_id, name in names.items() if name}


def _new_group(
    name: str, num_ranks: int, resources: Mapping[str, float], closed_pods: Collection[str] = ()
) -> PlacementGroup:
    elsewhere = [{POD_LABEL: f"!in({','.join(sorted(closed_pods))})"}] * num_ranks
    group: PlacementGroup = placement_group(
        [dict(resources)] * num_ranks,
        strategy="STRICT_PACK",
        name=name,
        lifetime="detached",
        bundle_label_selector=elsewhere if closed_pods else None,
    )
    return group


def node_of(group: PlacementGroup) -> str | None:
    """Ray's id of the node that holds the group now; None: no node does."""
    status: dict[str, Any] = ray.util.placement_group_table(group)
    return str(status["bundles_to_node_id"][0]) if status["state"] == "CREATED" else None


def _wait_for_place(group: PlacementGroup, num_ranks: int, resources: Mapping[str, float]) -> None:
    """Wait until a machine holds the group. Raises ReplicaError: soon if too little is free, late
    if Ray is only slow."""
    began_at = time.monotonic()
    while not group.wait(_ROOM_BACK_WITHIN_S):
        full = any(num_free(what) < num_ranks * amount for what, amount in resources.items())
        is_late = time.monotonic() - began_at > _MACHINE_FOUND_WITHIN_S
        if (full or is_late) and not group.wait(0):  # the group itself may hold what was free
            text = f"no machine has room for {num_ranks} ranks"
            if "GPU" in resources:
                text += f" with a GPU each; free GPUs on all machines: {num_free('GPU'):g}"
            raise ReplicaError(text)


def find(name: str) -> PlacementGroup | None:
    try:
        group: PlacementGroup = ray.util.get_placement_group(name)
    except ValueError:
        return None
    return group


def free(name: str) -> None:
    with contextlib.suppress(RayError):  # already gone
        group = find(name)
        if group is not None:
            remove_placement_group(group)


def check_room(pool: str, pools: Mapping[str, PoolSettings], replicas: Mapping[str, int]) -> None:
    """Raise NoCapacityError if growing `pool` takes more GPUs than there are.

    `replicas`: every pool's size afterwards. Cores never run out, because thread counts divide
    them. On pods nothing is checked: pods may still be added.
    """
    if pools[pool].config.runs_on == "pods" or not pools[pool].gpus_per_replica:
        return
    if lack := lacking_gpus(pools, replicas):
        text = f"no room for {replicas[pool]} replicas of {pool}: {lack}"
        raise NoCapacityError(text, field="replicas")


def lacking_gpus(pools: Mapping[str, PoolSettings], replicas: Mapping[str, int]) -> str:
    """Say that these sizes take more GPUs than there are; empty: they do not."""
    wanted = num_gpus_wanted(pools, replicas)
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    found = int(resources.get("GPU", 0))
    if wanted <= found:
        return ""
    return (
        f"all pools together would need {wanted} GPUs, one for each rank; there are {found}, "
        f"{num_free('GPU'):g} of them free. Make the pools smaller, or one pool of role mixed, or "
        "set engine.device: cpu"
    )


def num_free(resource: str) -> float:
    """Amount of a Ray resource ("GPU", "CPU") that nothing holds, on all machines together."""
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return free.get(resource, 0)
