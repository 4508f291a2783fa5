"""Settings of pools for registries that tests fill."""

from __future__ import annotations

from baton.config.cluster import ClusterConfig, PoolConfig
from baton.config.workers import SupervisorConfig
from baton.fleet import Role
from cluster.pools.pool_settings import PoolSettings, added_settings

ADDED_TEXT = """
pools:
  decode-1b2c3:
    role: mixed
    max_replicas: 4
    tensor_parallel: 2
"""


def added_pool(text: str = ADDED_TEXT) -> PoolSettings:
    """Of a pool that AddPool brings."""
    return added_settings("decode-1b2c3", text)


def settings_of(
    name: str = "decode",
    role: Role = Role.DECODE,
    max_replicas: int = 8,
    supervisor: SupervisorConfig | None = None,
) -> PoolSettings:
    """Of a pool of the cluster's own file."""
    pool = PoolConfig(role=role, max_replicas=max_replicas)
    pools = {name: pool, f"beside-{name}": PoolConfig(role=Role.MIXED)}
    return PoolSettings(
        name, ClusterConfig(pools=pools, supervisor=supervisor or SupervisorConfig())
    )
