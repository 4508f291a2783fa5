"""A cluster.yaml as the ServingCluster that serves the same on Kubernetes."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.config import settings
from baton.config.cluster import ClusterConfig, PoolConfig
from baton.config.engine import AUTO, EngineSettings
from baton.config.planner import PlannerTargets
from baton.config.router import RouterConfig
from baton.errors import ConfigError
from deploy.api.checked import read_spec
from deploy.api.naming import API_VERSION, camel, respelt
from deploy.api.serving_cluster import Advanced, ServingClusterSpec, without_operators
from deploy.api.worker_pool import PoolTemplate


def serving_cluster(config: ClusterConfig, name: str, namespace: str | None) -> dict[str, Any]:
    """Make the object for `kubectl apply`. What is at its default is left out, but `auto` is a GPU.

    Raises ConfigError where model or tokenizer is a folder of this machine, which no pod has.
    """
    for field in ("model", "tokenizer"):
        named = getattr(config, field)
        if named is not None and Path(named).is_dir():
            raise ConfigError(
                f"{field}: {named} is a folder of this machine: put it into a "
                "PersistentVolumeClaim or a bucket (spec.model.claim, spec.model.uri), or name it "
                "as on the Hugging Face hub",
                field=field,
            )
    usual = ClusterConfig()
    spec: dict[str, Any] = {"model": {"name": config.model}}
    if config.model_revision is not None:
        spec["model"]["revision"] = config.model_revision
    for field in ("tokenizer", "log_level", "log_format"):
        if getattr(config, field) != getattr(usual, field):
            spec[camel(field)] = getattr(config, field)
    if config.served_model_name is not None:
        spec["servedModelName"], *aliases = config.model_names
        spec |= {"servedModelAliases": aliases} if aliases else {}
    spec["pools"] = {name: _pool(pool) for name, pool in config.pools.items()}
    if router := _router(config.router, name):
        spec["router"] = router
    sections = {"engine": EngineSettings(), "planner": PlannerTargets()}
    spec |= _changed(config, sections)
    if config.engine.device == AUTO and config.engine.reads_model:
        spec["engine"] = {"device": "cuda"} | spec.get("engine", {})
    if advanced := _changed(config, vars(Advanced())):
        spec["advanced"] = advanced
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    made = {"apiVersion": API_VERSION, "kind": "ServingCluster", "metadata": metadata, "spec": spec}
    read_spec(ServingClusterSpec, made | {"metadata": {"name": name, "namespace": namespace or ""}})
    return made


def _changed(config: ClusterConfig, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs from the sections' defaults, without what the operator sets itself."""
    made = {}
    for section, usual in sections.items():
        ours = getattr(config, section)
        names = [field.name for field in dataclasses.fields(usual)]
        theirs = dataclasses.replace(usual, **{name: getattr(ours, name) for name in names})
        theirs = without_operators(section, theirs)
        made[section] = respelt(settings.dump(theirs, base=usual), camel)
    return {section: changed for section, changed in made.items() if changed}


def _router(config: RouterConfig, name: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if config.tls is not None:
        made["tls"] = {"secretName": f"{name}-router-tls"}
        if config.tls.client_ca_file is not None:
            made["tls"]["requireClientCertificate"] = True
    if config.traces.endpoint is not None:
        made["traceEndpoint"] = config.traces.endpoint
    if config.auth is not None:
        made["auth"] = {"tokenSecretName": f"{name}-router-tokens"}
    return made


def secrets_to_make(config: ClusterConfig, name: str) -> list[str]:
    """List the commands that put this machine's files where the ServingCluster of that name
    looks."""
    commands = []
    if (tls := config.router.tls) is not None:
        files = {"tls.crt": tls.certificate_file, "tls.key": tls.key_file}
        if tls.client_ca_file is not None:
            files["ca.crt"] = tls.client_ca_file
        commands.append(
            _create(f"{name}-router-tls", [f"{key}={file}" for key, file in files.items()])
        )
    if (auth := config.router.auth) is not None:
        folder = auth.tokens if Path(auth.tokens).is_dir() else "FOLDER_WITH_A_FILE_FOR_EACH_TENANT"
        commands.append(_create(f"{name}-router-tokens", [folder]))
    return commands


def _create(secret: str, files: Sequence[str]) -> str:
    sources = [f"--from-file={file}" for file in files]
    return shlex.join(["kubectl", "create", "secret", "generic", secret, *sources])


def _pool(pool: PoolConfig) -> dict[str, Any]:
    usual = PoolConfig(role=pool.role)
    made: dict[str, Any] = {"role": pool.role.value}
    if pool.replicas != usual.replicas:
        made["initialReplicas"] = pool.replicas
    if pool.min_replicas:
        made["minReplicas"] = pool.min_replicas
    if pool.max_replicas != usual.max_replicas or pool.replicas > PoolTemplate.max_replicas:
        made["maxReplicas"] = pool.max_replicas
    if pool.tensor_parallel != usual.tensor_parallel:
        made["parallelism"] = {"tensor": pool.tensor_parallel}
    if pool.drain_timeout_s is not None:
        made["drainTimeout"] = f"{pool.drain_timeout_s:g}s"
    if pool.engine:
        made["engine"] = respelt(pool.engine, camel)
    return made
