"""What a restarted supervisor must know, in a file of the run directory that is replaced whole."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from baton.config import ClusterConfig, read_config
from baton.errors import BatonError
from cluster.pool_book import PoolBook
from cluster.pool_settings import PoolSettings, own_settings
from cluster.role_plan import Role, RolePlan

log = logging.getLogger(__name__)


def state_file(run_dir: Path) -> Path:
    """Written as soon as a supervisor listens: where it is, this one is not the first."""
    return run_dir / "supervisor.json"


class SupervisorState:
    """Own the file: where the supervisor listens, all that it was told of pools, and which roles
    are away or coming back."""

    def __init__(self, run_dir: Path, cluster: ClusterConfig) -> None:
        self._path = state_file(run_dir)
        self._own = own_settings(cluster)
        self._kept: dict[str, Any] = {}
        if self._path.exists():
            self._kept = json.loads(self._path.read_text())
        here = f"{cluster.control.host}:{cluster.control.port}"
        self.listen: str = self._kept.get("listen", here)

    @property
    def away(self) -> frozenset[Role]:
        return frozenset(Role(name) for name in self._kept.get("away", ()))

    def restore(self, book: PoolBook) -> None:
        """Fill an empty book: the cluster's own pools, and what was told of pools since. Files of
        former versions lack some keys."""
        removed = self._kept.get("removed_pools", ())
        told_pools = self._kept.get("told_pools", {})
        for name, settings in self._own.items():
            if name in told_pools:
                log.warning("%s: what was told of the pool goes before its file", name)
            elif name not in removed:
                self._restore_pool(book, settings)
        for name, told in told_pools.items():
            try:
                config = read_config(told["config"], source=f"pool {name}")
            except BatonError as error:  # of a version that read it otherwise
                log.error("%s: the pool is given up: %s", name, error.message)
                continue
            digest = bytes.fromhex(told["digest"])
            self._restore_pool(book, PoolSettings(name, config, told["cohort"], digest))
        if "cohort_weights" in self._kept:
            book.set_cohort_weights(self._kept["cohort_weights"])
        book.restore_away(self.away)

    def _restore_pool(self, book: PoolBook, settings: PoolSettings) -> None:
        name, shape = settings.name, settings.shape
        replicas: int = self._kept.get("desired", {}).get(name, shape.replicas)
        book.add(settings, min(replicas, shape.max_replicas))
        plan = self._kept.get("role_plans", {}).get(name)
        if plan is not None:
            try:
                book.set_role_plan(name, RolePlan(**plan))
            except BatonError as error:  # the pool is another by now
                log.warning("%s: its role plan is given up: %s", name, error.message)

    def keep(self, listen: str, book: PoolBook) -> None:
        """Returns once the file says so."""
        pools = book.all_settings()
        told = {name: settings for name, settings in pools.items() if settings.digest}
        kept = {
            "listen": listen,
            "desired": book.desired_replicas(),
            "role_plans": {name: vars(plan) for name, plan in book.role_plans().items()},
            "told_pools": {name: _written(settings) for name, settings in told.items()},
            "removed_pools": sorted(self._own.keys() - (pools.keys() - told.keys())),
            "cohort_weights": book.cohort_weights(),
            "away": sorted(role.value for role in book.away),
        }
        if kept != self._kept:
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps(kept))
            os.replace(fresh, self._path)
            self._kept, self.listen = kept, listen


def _written(settings: PoolSettings) -> dict[str, str]:
    return {
        "config": settings.config.to_yaml(),
        "digest": settings.digest.hex(),
        "cohort": settings.cohort,
    }
