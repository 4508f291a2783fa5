"""What a restarted supervisor must know, in files of the run directory.

- `supervisor.json`: where it listens, its pools, and what follows from its workers.
- `processes/<replica>.json`: the processes of every replica. A stopped process cannot report its
  pid, and Ray no longer lists a process that it was asked to kill. So a new supervisor needs these
  files to end what a dead one left.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.config.cluster import ClusterConfig, read_config
from baton.errors import BatonError, ConfigError
from baton.fleet import Role
from cluster.pools.pool_settings import ModelSource, PoolSettings, common_dtype, own_settings
from cluster.pools.pool_table import PoolTable
from cluster.registry.registry import Registry
from cluster.registry.routers import Unit, UnitList
from cluster.role_plan import RolePlan
from kv_transfer.process import ProcessIdentity

log = logging.getLogger(__name__)


def state_file(run_dir: Path) -> Path:
    """The supervisor's own file, written as soon as it listens. If it exists, this supervisor is
    not the first."""
    return run_dir / "supervisor.json"


class SupervisorState:
    """Own the supervisor's file: its address, the pools' settings, sizes and common dtype, the
    roles that are away or coming back, the model's fingerprint, the routers' units, and the pods
    that are closed."""

    def __init__(self, run_dir: Path, cluster: ClusterConfig) -> None:
        self._path = state_file(run_dir)
        self._cluster, self._own = cluster, own_settings(cluster)
        self._kept: dict[str, Any] = {}  # empty before the first `keep`
        if self._path.exists():
            self._kept = json.loads(self._path.read_text())

    @property
    def listen(self) -> str:
        control = self._cluster.control
        return str(self._kept.get("listen", f"{control.host}:{control.port}"))

    @property
    def away(self) -> frozenset[Role]:
        return frozenset(map(Role, self._kept.get("away", PoolTable().away)))

    @property
    def model_fingerprint(self) -> bytes:
        return bytes.fromhex(self._kept.get("model_fingerprint", ""))

    @property
    def units(self) -> UnitList:
        control = self._cluster.control
        address = f"{control.announced_host}:{control.port}" if control.announced_host else ""
        own = Unit(self._cluster.unit, address)
        return UnitList(own, [Unit(**unit) for unit in self._kept.get("units", ())])

    def restore(self, pools: PoolTable) -> None:
        """Fill an empty table with the pools of the cluster's own file and all later changes."""
        pools.bind_model(ModelSource.of(self._cluster))
        added_pools = self._kept.get("added_pools", {})
        for name, settings in self._own.items():
            if name in added_pools:
                log.warning("pool %s: AddPool's settings replace those of the cluster's file", name)
            elif name not in self._kept.get("removed_pools", ()):
                self._restore_pool(pools, settings)
        for name, added in added_pools.items():
            config = read_config(added["config"], source=f"pool {name}")
            digest = bytes.fromhex(added["digest"])
            self._restore_pool(pools, PoolSettings(name, config, digest))
        pools.restore_away_roles(self.away)
        pools.close_pods(self._kept.get("closed_pods", ()))

    def _restore_pool(self, pools: PoolTable, settings: PoolSettings) -> None:
        name, shape = settings.name, settings.shape
        if (dtype := self._kept.get("dtype")) is not None:
            settings = settings.with_dtype(dtype)
        replicas: int = self._kept.get("desired", {}).get(name, shape.replicas)
        try:
            pools.add(settings, min(replicas, shape.max_replicas))
        except ConfigError as error:  # the cluster's file names another model now
            log.error("%s; the pool is dropped", error.message)
            return
        plan = self._kept.get("role_plans", {}).get(name)
        if plan is not None:
            try:
                pools.set_role_plan(name, RolePlan(**plan))
            except BatonError as error:  # the cluster's file has another pool of this name now
                log.warning("%s: its role plan is given up: %s", name, error.message)

    def keep(self, listen: str, registry: Registry) -> None:
        """Write the file if anything changed. Returns once it is written."""
        pools = registry.pools.all_settings()
        added = {name: settings for name, settings in pools.items() if settings.digest}
        kept = {
            "listen": listen,
            "desired": registry.pools.desired_replicas(),
            "role_plans": {name: vars(plan) for name, plan in registry.pools.role_plans().items()},
            "added_pools": {
                name: {"config": settings.config.to_yaml(), "digest": settings.digest.hex()}
                for name, settings in added.items()
            },
            "removed_pools": sorted(self._own.keys() - (pools.keys() - added.keys())),
            "dtype": common_dtype(pools.values()),
            "away": sorted(role.value for role in registry.pools.away),
            "model_fingerprint": registry.model_fingerprint.hex(),
            "units": [vars(unit) for unit in registry.units.given],
            "closed_pods": sorted(registry.pools.closed_pods),
        }
        if kept != self._kept:
            _replace(self._path, kept)
            self._kept = kept


@dataclass(frozen=True)
class ReplicaProcesses:
    """The processes of one replica, all on one Ray node (a machine or a pod)."""

    processes: tuple[ProcessIdentity, ...]
    node_id: str
    """Ray's id of the node."""


class ProcessTable:
    """Own the replicas' files."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "processes"

    def add(self, name: str, entry: ReplicaProcesses) -> None:
        """Add a replica, before its processes hold anything."""
        self._folder.mkdir(parents=True, exist_ok=True)
        _replace(self._path(name), dataclasses.asdict(entry))

    def remove(self, name: str) -> None:
        """Remove a replica, once all its processes have ended."""
        self._path(name).unlink(missing_ok=True)

    def read(self) -> dict[str, ReplicaProcesses]:
        return {path.stem: _parse(path.read_text()) for path in self._folder.glob("*.json")}

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _parse(text: str) -> ReplicaProcesses:
    found = json.loads(text)
    processes = tuple(ProcessIdentity(**process) for process in found["processes"])
    return ReplicaProcesses(processes, found["node_id"])


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Replace a file whole."""
    fresh = path.with_name(f"{path.stem}.new")
    fresh.write_text(json.dumps(content))
    os.replace(fresh, path)
