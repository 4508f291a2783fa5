"""The WorkerPool of a ServingCluster's pool, as the operator applies it: without its size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploy.api.naming import API_VERSION
from deploy.controller.manifests.common import POOL_LABEL, ROLE_LABEL, Object, Owner, manifest


def worker_pool(owner: Owner, name: str, template: Mapping[str, Any], finalizer: str) -> Object:
    """Make a pool's WorkerPool. `template`: the pool as the ServingCluster's object spells it."""
    metadata = owner.metadata(owner.pool_name(name), "pool")
    metadata["labels"] |= {POOL_LABEL: name, ROLE_LABEL: template["role"]}
    metadata["finalizers"] = [finalizer]
    left_out = {"initialReplicas"}
    if template.get("scaling", {}).get("mode") == "planner":
        left_out.add("rolePlan")  # it follows the load: a first one would last for seconds
    shape = {key: value for key, value in template.items() if key not in left_out}
    spec = shape | {"cluster": owner.name, "pool": name}
    return manifest(API_VERSION, "WorkerPool", metadata, spec=spec)
