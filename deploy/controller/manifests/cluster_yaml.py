"""The cluster.yaml that a ServingCluster's processes read, and the ConfigMap it lies in."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from baton.config.cluster import ClusterConfig, ControlConfig, PoolConfig
from baton.config.engine import AUTO
from baton.config.internal import InternalConfig
from deploy.api.naming import as_written, respelt, snake
from deploy.api.serving_cluster import ModelSource, ServingClusterSpec
from deploy.api.worker_pool import MAX_REPLICAS, PoolShape, WorkerPoolSpec, seconds
from deploy.controller.kit.objects import Object as Seen
from deploy.controller.manifests.common import (
    CONTROL_PORT,
    HEALTH_PORT,
    METRICS_PORT,
    WEIGHTS_FOLDER,
    Object,
    Owner,
    manifest,
    ray_reference,
)
from deploy.controller.manifests.routers import router_settings

_LEAVE_MARGIN_S = 30.0
_OF_GPUS = re.compile("nvidia[.]com/").match


def model_path(model: ModelSource) -> str:
    """Return where workers read the model: a folder in the pod, or a name on the hub."""
    if model.claim is not None:
        return f"{model.claim.folder}/{model.claim.path or ''}".rstrip("/")
    if model.uri is not None:
        return f"{WEIGHTS_FOLDER}/{hashlib.sha256(model.uri.encode()).hexdigest()[:16]}"
    assert model.name is not None
    return model.name


def model_field(model: ModelSource) -> str:
    """Name the field of the ServingCluster that says where the model comes from."""
    (given,) = (name for name in ("name", "claim", "uri") if getattr(model, name) is not None)
    return f"spec.model.{given}"


def model_name(spec: ServingClusterSpec) -> str:
    """Return what clients call the model; by default the last part of its source."""
    model = spec.model
    source = (
        model.name or model.uri or (model.claim and (model.claim.path or model.claim.claim_name))
    )
    assert source
    return spec.served_model_name or source.rstrip("/").rpartition("/")[2]


def with_name(spec: ServingClusterSpec, cluster: Seen) -> ServingClusterSpec:
    """Return the spec with the model's name so far, where people give none. A router uses no worker
    of another name: with each model's own name the one before would serve nobody."""
    name = spec.served_model_name or cluster.get("status", {}).get("model")
    return dataclasses.replace(spec, served_model_name=name)


def cluster_config(
    owner: Owner,
    spec: ServingClusterSpec,
    pools: Mapping[str, WorkerPoolSpec],
    unit: str | None = None,
) -> ClusterConfig:
    """The configuration of a unit's processes; without a unit, the routers'. `pools`: those whose
    workers read it. Head and routers read a configuration without pools, since pools come and go.

    Raises ValueError or ConfigError where one section does not suit another.
    """
    drains_s = [seconds(pool.drain_timeout) for pool in pools.values()]
    advanced, aliases = spec.advanced, spec.served_model_aliases
    names = (model_name(spec), *aliases)
    longest_s = max([advanced.worker.drain_timeout_s, *drains_s])
    host = owner.control_host if unit is None else owner.head_host(unit)
    log_settings: dict[str, Any] = {}  # of no unit: all pods follow the routers' configuration
    if unit is None:
        log_settings = {"log_level": spec.log_level, "log_format": spec.log_format}
    try:
        config = ClusterConfig(
            model=model_path(spec.model),
            model_revision=spec.model.revision,
            tokenizer=spec.tokenizer,
            served_model_name=names if unit is None and aliases else names[0],
            unit=unit or "",
            **log_settings,
            runs_on="pods",
            pools={name: _pool_config(spec, pool) for name, pool in pools.items()},
            engine=spec.engine_config,
            transfer=advanced.transfer,
            router=router_settings(spec),
            control=ControlConfig(host="0.0.0.0", port=CONTROL_PORT, announced_host=host),
            internal=InternalConfig("keys" if spec.internal_tls is None else "tls"),
            worker=dataclasses.replace(
                advanced.worker, metrics_port=METRICS_PORT, health_port=HEALTH_PORT
            ),
            decode=advanced.decode,
            registry=advanced.registry,
            supervisor=dataclasses.replace(
                advanced.supervisor, drain_timeout_s=longest_s + _LEAVE_MARGIN_S
            ),
        )
    except ValueError as error:
        raise ValueError(as_written(str(error))) from error
    for name in pools:
        config.pool_engine(name)
    return config


def pool_device(spec: ServingClusterSpec, pool: PoolShape) -> str:
    """Return cpu or cuda. `auto` is a GPU where a field of the pool asks for one."""
    device: str = pool.engine.get("device", spec.engine.device)
    if device != AUTO:
        return device
    return "cuda" if gpu_field(pool) else "cpu"


def gpu_field(pool: PoolShape) -> str:
    """Name the first field of a pool that asks for GPUs of nvidia.com; empty: none does."""
    containers = pool.pod_template.get("spec", {}).get("containers", [])
    resources = [pool.resources, *(each.get("resources", {}) for each in containers)]
    held = {
        "nodeSelector": list(pool.node_selector),
        "tolerations": [each.get("key", "") for each in pool.tolerations],
        "resources.limits": [name for each in resources for name in each.get("limits", {})],
    }
    return next((it for it, keys in held.items() if any(map(_OF_GPUS, keys))), "")


def _pool_config(spec: ServingClusterSpec, pool: PoolShape) -> PoolConfig:
    """Make a pool's configuration without its size, which the supervisor gets beside it."""
    engine = respelt(pool.engine, snake)
    if pool.engine.get("device", spec.engine.device) == AUTO:
        engine["device"] = pool_device(spec, pool)
    return PoolConfig(
        role=pool.role,
        max_replicas=MAX_REPLICAS,  # the API server and the operator keep the pool's own
        tensor_parallel=pool.parallelism.tensor,
        drain_timeout_s=seconds(pool.drain_timeout),
        engine=engine,
    )


def router_config_map(owner: Owner, config: ClusterConfig) -> Object:
    return _config_map(owner.metadata(owner.config_name, "config"), config)


def unit_config_map(owner: Owner, unit: str, config: ClusterConfig, ray_cluster: Seen) -> Object:
    """Make the ConfigMap of a unit, which is deleted with its RayCluster."""
    metadata = owner.metadata(owner.unit_name(unit), "config")
    metadata["labels"] = owner.unit_labels("config", unit)
    metadata["ownerReferences"] = [ray_reference(ray_cluster)]
    return _config_map(metadata, config)


def _config_map(metadata: Object, config: ClusterConfig) -> Object:
    return manifest("v1", "ConfigMap", metadata, data={"cluster.yaml": config.to_yaml()})
