"""What room Ray's machines have, told before anybody waits for it. Blocks on Ray."""

from __future__ import annotations

from collections.abc import Mapping

import ray

from baton.errors import NoCapacityError
from cluster.pools.pool_settings import PoolSettings, num_gpus_wanted


def check_room(pool: str, pools: Mapping[str, PoolSettings], replicas: Mapping[str, int]) -> None:
    """Raise NoCapacityError where `pool`, which is to grow, would take a GPU that is not there.

    `replicas`: every pool's size then. Cores never run out: they are divided by thread counts. Pods
    that are not there yet may still come.
    """
    if pools[pool].config.runs_on == "pods" or not pools[pool].gpus_per_replica:
        return
    wanted = num_gpus_wanted(pools, replicas)
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    found = int(resources.get("GPU", 0))
    if wanted > found:
        free = num_free("GPU")
        raise NoCapacityError(
            f"no room for {replicas[pool]} replicas of {pool}: all pools together would need "
            f"{wanted} GPUs, one for each rank; there are {found}, {free:g} of them free",
            field="replicas",
        )


def num_free(resource: str) -> float:
    """What no placement group or actor holds, on all machines together: "GPU", "CPU"."""
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return free.get(resource, 0)
