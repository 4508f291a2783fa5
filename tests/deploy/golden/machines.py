"""ServingClusters of four kinds of machines, and the RayClusters that the operator makes of them.

python -m tests.deploy.golden.machines: writes these anew, to be read before they are committed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from deploy.api.checked import read_spec
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.manifests.common import Object, Owner, Release
from deploy.controller.manifests.pods import PodContext
from deploy.controller.manifests.ray_cluster import (
    GroupSize,
    ray_cluster,
    sized,
    worker_group,
)
from deploy.controller.manifests.worker_pool import worker_pool
from deploy.controller.rollout.rollout import Record
from deploy.controller.rollout.units import unit_of

FOLDER = Path(__file__).parent
MACHINES = ("h100_infiniband", "a100_roce", "one_gpu", "cpu")
RELEASE = Release("baton/worker:1", "baton/router:1", "2.60.0")


def expected(machine: str) -> Path:
    return FOLDER / machine / "ray_cluster.yaml"


def serving_cluster(machine: str) -> Object:
    found: Object = yaml.safe_load((FOLDER / machine / "serving_cluster.yaml").read_text())
    return found


def ray_cluster_of(cluster: Object) -> Object:
    """What the operator applies when the ServingCluster has just been made."""
    metadata = cluster["metadata"]
    owner = Owner(metadata["name"], metadata["namespace"], "0b5e1d0e-0000-4000-8000-000000000000")
    spec = read_spec(ServingClusterSpec, cluster)
    made = {
        name: worker_pool(owner, name, template, "baton.dev/drain")
        for name, template in sorted(cluster["spec"]["pools"].items())
    }
    pools = {name: read_spec(WorkerPoolSpec, pool) for name, pool in made.items()}
    unit = unit_of(cluster["spec"], {name: pool["spec"] for name, pool in made.items()})
    context = PodContext(owner, spec, RELEASE, unit)
    groups = [
        sized(worker_group(context, pool), GroupSize(spec.pools[name].initial_replicas))
        for name, pool in pools.items()
    ]
    return ray_cluster(context, Record(), groups)


def text_of(ray: Object) -> str:
    return yaml.dump(ray, Dumper=_WithoutAliases, sort_keys=False, width=100)


class _WithoutAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def main() -> None:
    for machine in MACHINES:
        expected(machine).write_text(text_of(ray_cluster_of(serving_cluster(machine))))


if __name__ == "__main__":
    main()
