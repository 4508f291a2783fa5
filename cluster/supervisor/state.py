"""What a restarted supervisor must know, in a file of the run directory that is replaced whole."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from baton.config.cluster import ClusterConfig, read_config
from baton.errors import BatonError, ConfigError
from cluster.pools.pool_settings import ModelSource, PoolSettings, common_dtype, own_settings
from cluster.pools.pool_table import PoolTable
from cluster.pools.role_plan import Role, RolePlan
from cluster.registry.registry import Registry
from cluster.registry.units import Unit, UnitList

log = logging.getLogger(__name__)


def state_file(run_dir: Path) -> Path:
    """Written as soon as a supervisor listens: where it is, this one is not the first."""
    return run_dir / "supervisor.json"


class SupervisorState:
    """Own the file: where the supervisor listens, its pools' settings, sizes and common dtype, the
    roles that are away or coming back, the fingerprint of the model that serves, and the units that
    routers are told of."""

    def __init__(self, run_dir: Path, cluster: ClusterConfig) -> None:
        self._path = state_file(run_dir)
        self._cluster, self._own = cluster, own_settings(cluster)
        self._is_kept = self._path.exists()
        self._kept: dict[str, Any] = {
            "listen": f"{cluster.control.host}:{cluster.control.port}",
            "desired": {},
            "role_plans": {},
            "added_pools": {},
            "removed_pools": [],
            "dtype": None,
            "away": sorted(role.value for role in PoolTable().away),
            "model_fingerprint": "",
            "units": [],
        }
        if self._is_kept:
            self._kept = json.loads(self._path.read_text())

    @property
    def listen(self) -> str:
        return str(self._kept["listen"])

    @property
    def away(self) -> frozenset[Role]:
        return frozenset(map(Role, self._kept["away"]))

    @property
    def model_fingerprint(self) -> bytes:
        return bytes.fromhex(self._kept["model_fingerprint"])

    @property
    def units(self) -> UnitList:
        control = self._cluster.control
        address = f"{control.announced_host}:{control.port}" if control.announced_host else ""
        own = Unit(self._cluster.unit, address)
        return UnitList(own, [Unit(**unit) for unit in self._kept["units"]])

    def restore(self, book: PoolTable) -> None:
        """Fill an empty book: the pools of the cluster's own file, and all changes since."""
        book.bind_model(ModelSource.of(self._cluster))
        added_pools = self._kept["added_pools"]
        for name, settings in self._own.items():
            if name in added_pools:
                log.warning("pool %s: AddPool's settings replace those of the cluster's file", name)
            elif name not in self._kept["removed_pools"]:
                self._restore_pool(book, settings)
        for name, told in added_pools.items():
            config = read_config(told["config"], source=f"pool {name}")
            digest = bytes.fromhex(told["digest"])
            self._restore_pool(book, PoolSettings(name, config, digest))
        book.restore_away_roles(self.away)

    def _restore_pool(self, book: PoolTable, settings: PoolSettings) -> None:
        name, shape = settings.name, settings.shape
        if (dtype := self._kept["dtype"]) is not None:
            settings = settings.with_dtype(dtype)
        replicas: int = self._kept["desired"].get(name, shape.replicas)
        try:
            book.add(settings, min(replicas, shape.max_replicas))
        except ConfigError as error:  # the cluster's file names another model by now
            log.error("%s; the pool is dropped", error.message)
            return
        plan = self._kept["role_plans"].get(name)
        if plan is not None:
            try:
                book.set_role_plan(name, RolePlan(**plan))
            except BatonError as error:  # the cluster's file has another pool of this name by now
                log.warning("%s: its role plan is given up: %s", name, error.message)

    def keep(self, listen: str, registry: Registry) -> None:
        """Returns once the file says so."""
        book = registry.pools
        pools = book.all_settings()
        told = {name: settings for name, settings in pools.items() if settings.digest}
        kept = {
            "listen": listen,
            "desired": book.desired_replicas(),
            "role_plans": {name: vars(plan) for name, plan in book.role_plans().items()},
            "added_pools": {name: _written(settings) for name, settings in told.items()},
            "removed_pools": sorted(self._own.keys() - (pools.keys() - told.keys())),
            "dtype": common_dtype(pools.values()),
            "away": sorted(role.value for role in book.away),
            "model_fingerprint": registry.model_fingerprint.hex(),
            "units": [vars(unit) for unit in registry.units.given],
        }
        if kept != self._kept or not self._is_kept:
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps(kept))
            os.replace(fresh, self._path)
            self._kept, self._is_kept = kept, True


def _written(settings: PoolSettings) -> dict[str, str]:
    return {"config": settings.config.to_yaml(), "digest": settings.digest.hex()}
