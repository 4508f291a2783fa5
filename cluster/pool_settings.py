"""What a pool's workers are made from: a cluster file in which the pool stands.

It never changes while the pool is known: workers of other settings are another pool.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.config import ClusterConfig, PoolConfig, read_config
from baton.errors import ConfigError
from cluster.auto_settings import with_choice
from cluster.rank_gpus import needs_gpu
from cluster.role_plan import Role
from engine.config import AUTO


@dataclass(frozen=True)
class TextSource:
    """Where routers find a model's text, as a cluster file names it."""

    model: str
    revision: str | None
    tokenizer: str | None


@dataclass(frozen=True)
class PoolSettings:
    name: str
    config: ClusterConfig
    cohort: str = ""
    """The pools that hand KV over to each other; empty: those that the cluster started with."""
    digest: bytes = b""
    """SHA-256 of the text that told it; empty for a pool of the cluster's own file."""

    @property
    def shape(self) -> PoolConfig:
        return self.config.pools[self.name]

    @property
    def role(self) -> Role:
        return Role(self.shape.role)

    @property
    def text(self) -> TextSource:
        return TextSource(self.config.model, self.config.model_revision, self.config.tokenizer)

    @property
    def gpus_per_replica(self) -> int:
        """One for each rank that computes on a GPU."""
        on_gpu = needs_gpu(self.config.pool_engine(self.name))
        return self.shape.tensor_parallel if on_gpu else 0

    @property
    def dtype(self) -> str | None:
        """What its workers compute in; None: that is not decided, or they compute nothing."""
        engine = self.config.pool_engine(self.name)
        return engine.dtype if engine.backend == "torch" and engine.dtype != AUTO else None

    def with_dtype(self, dtype: str) -> PoolSettings:
        """Where it was left open."""
        return dataclasses.replace(self, config=with_choice(self.config, "dtype", dtype))


def own_settings(cluster: ClusterConfig) -> dict[str, PoolSettings]:
    """Of the pools of the cluster's own file, by name."""
    return {name: PoolSettings(name, cluster) for name in cluster.pools}


def told_settings(name: str, text: str, cohort: str) -> PoolSettings:
    """Of a pool that is told of while the cluster runs. Raises ConfigError, which names the key."""
    source = f"pool {name}"
    config = read_config(text, source=source)
    if name not in config.pools:
        there_are = ", ".join(sorted(config.pools)) or "none"
        raise ConfigError(
            f"{source}: pools: it is not there; there are: {there_are}", field="pools"
        )
    return PoolSettings(name, config, cohort, hashlib.sha256(text.encode()).digest())


def cohort_dtype(cohort: str, pools: Iterable[PoolSettings]) -> str | None:
    """What a cohort computes in, whose pools exchange KV in one dtype only; None: not decided."""
    return next((each.dtype for each in pools if each.cohort == cohort and each.dtype), None)


def num_ranks(pools: Mapping[str, PoolSettings], replicas: Mapping[str, int]) -> int:
    """Of so many replicas of each pool that is named in `replicas`."""
    return sum(pools[name].shape.tensor_parallel * count for name, count in replicas.items())


def num_gpus_wanted(pools: Mapping[str, PoolSettings], replicas: Mapping[str, int]) -> int:
    """By so many replicas of each pool that is named in `replicas`."""
    return sum(pools[name].gpus_per_replica * count for name, count in replicas.items())
