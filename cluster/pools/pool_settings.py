"""What a pool's workers are made from: a cluster file that defines the pool.

A pool's settings never change: workers of other settings need another pool. All pools name one
model.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from baton.config.cluster import ClusterConfig, PoolConfig, read_config
from baton.config.engine import AUTO
from baton.errors import ConfigError
from cluster.pools.auto_settings import with_choice
from cluster.pools.role_plan import Role
from cluster.worker.rank_gpus import needs_gpu


@dataclass(frozen=True)
class ModelSource:
    """The model as a cluster file names it."""

    model: str
    model_revision: str | None
    tokenizer: str | None

    @classmethod
    def of(cls, config: ClusterConfig) -> Self:
        config = config.with_absolute_folders()
        return cls(config.model, config.model_revision, config.tokenizer)

    @property
    def label(self) -> str:
        """The folder or the hub's name, with the revision."""
        return f"{self.model}@{self.model_revision}" if self.model_revision else self.model

    def check_same(self, other: ModelSource, source: str) -> None:
        """Raises ConfigError for the first key in which `other`, the model of `source`, differs."""
        for key, here in dataclasses.asdict(self).items():
            named = getattr(other, key)
            if named != here:
                raise ConfigError(
                    f"{source}: {key}: must be {here or 'unset'}, as in the rest of this cluster, "
                    f"not {named or 'unset'}: start a new cluster for another model",
                    field=key,
                )


@dataclass(frozen=True)
class PoolSettings:
    name: str
    config: ClusterConfig
    digest: bytes = b""
    """SHA-256 of the text that AddPool brought; empty for a pool of the cluster's own file."""

    @property
    def shape(self) -> PoolConfig:
        return self.config.pools[self.name]

    @property
    def role(self) -> Role:
        return Role(self.shape.role)

    @property
    def roles(self) -> tuple[Role, ...]:
        """What its workers can do."""
        return (Role.PREFILL, Role.DECODE) if self.role is Role.MIXED else (self.role,)

    @property
    def model(self) -> ModelSource:
        return ModelSource.of(self.config)

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


def added_settings(name: str, text: str) -> PoolSettings:
    """Of a pool that AddPool brings. Raises ConfigError, which names the key."""
    source = f"pool {name}"
    config = read_config(text, source=source)
    if name not in config.pools:
        there_are = ", ".join(sorted(config.pools)) or "none"
        raise ConfigError(
            f"{source}: pools: it is not there; there are: {there_are}", field="pools"
        )
    return PoolSettings(name, config, hashlib.sha256(text.encode()).digest())


def common_dtype(pools: Iterable[PoolSettings]) -> str | None:
    """The dtype for pools that leave it open: KV is exchanged in one dtype only. None: not decided
    yet."""
    return next((each.dtype for each in pools if each.dtype), None)


def num_ranks(pools: Mapping[str, PoolSettings], replicas: Mapping[str, int]) -> int:
    """Of so many replicas of each pool that is named in `replicas`."""
    return sum(pools[name].shape.tensor_parallel * count for name, count in replicas.items())


def num_gpus_wanted(pools: Mapping[str, PoolSettings], replicas: Mapping[str, int]) -> int:
    """By so many replicas of each pool that is named in `replicas`."""
    return sum(pools[name].gpus_per_replica * count for name, count in replicas.items())
