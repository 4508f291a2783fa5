"""The WorkerPool of a ServingCluster's pool, as the operator applies it: without its size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploy.api.naming import API_VERSION
from deploy.controller.manifests.common import POOL_LABEL, Object, Owner


def worker_pool(owner: Owner, name: str, template: Mapping[str, Any], finalizer: str) -> Object:
    """`template`: the pool as the ServingCluster's object spells it."""
    metadata = owner.metadata(owner.pool_name(name), "pool")
    metadata["labels"] |= {POOL_LABEL: name}
    metadata["finalizers"] = [finalizer]
    first_only = {"initialReplicas"}
    if template.get("scaling", {}).get("mode") == "planner":
        first_only.add("rolePlan")  # the planner's from then on
    shape = {key: value for key, value in template.items() if key not in first_only}
    return {
        "apiVersion": API_VERSION,
        "kind": "WorkerPool",
        "metadata": metadata,
        "spec": shape | {"cluster": owner.name, "pool": name},
    }
