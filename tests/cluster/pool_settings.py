"""Settings of pools for registries that tests fill."""

from __future__ import annotations

from baton.config import ClusterConfig, PoolConfig
from cluster.config import SupervisorConfig
from cluster.pool_settings import PoolSettings
from cluster.role_plan import Role


def settings_of(
    name: str = "decode",
    role: Role = Role.DECODE,
    max_replicas: int = 8,
    supervisor: SupervisorConfig | None = None,
) -> PoolSettings:
    """Of a pool of the cluster's own file."""
    pool = PoolConfig(role=role.value, max_replicas=max_replicas)
    pools = {name: pool, f"beside-{name}": PoolConfig(role="mixed")}
    return PoolSettings(
        name, ClusterConfig(pools=pools, supervisor=supervisor or SupervisorConfig())
    )
