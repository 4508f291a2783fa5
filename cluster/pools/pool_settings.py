"""A pool's settings: the cluster file that defines it, with `auto` resolved.

A pool's settings never change: workers with other settings need another pool. All pools name one
model. `engine.device: auto` and `engine.dtype: auto` are chosen once for all pools, because they
exchange KV in one dtype only. `engine.run.auto_choice` chooses in its own process: torch takes
seconds to import and hundreds of MB.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from baton.config.cluster import ClusterConfig, PoolConfig, read_config
from baton.config.engine import AUTO
from baton.errors import ConfigError, UnavailableError
from baton.fleet import Role

_TIMEOUT_S = 60.0


def choose_auto_settings(
    config: ClusterConfig, variables: Mapping[str, str] | None = None
) -> tuple[ClusterConfig, list[str]]:
    """Return the configuration without `auto`, and one line per choice with its reason.

    The head's pod may lack the model's folder; then the settings stay `auto`, and the workers agree
    on a dtype (`cluster.worker.rank`). `variables`: added to the environment of the process that
    chooses. Raises UnavailableError, or ConfigError for a wrong model folder and for a prefill pool
    whose dtype no decode pool shares.
    """
    model = Path(config.model)
    if config.runs_on == "pods" and model.is_absolute() and not model.is_dir():
        return config, []
    engines = [config.pool_engine(pool) for pool in config.pools]
    engines = [engine for engine in engines if engine.reads_model]
    is_device_open = any(engine.device == AUTO for engine in engines)
    devices = sorted({engine.device for engine in engines if engine.dtype == AUTO})
    chosen, lines = {}, []
    if is_device_open or devices:
        chosen = _chosen(config, devices, os.environ | dict(variables or {}))
    if is_device_open:
        config = with_choice(config, "device", chosen["device"])
        where = "a GPU" if chosen["device"] == "cuda" else "the CPU"
        lines.append(f"computing on {where}: {chosen['device_reason']}")
    if devices:
        config = with_choice(config, "dtype", chosen["dtype"])
        lines.append(f"computing in {chosen['dtype']}: {chosen['dtype_reason']}")
    _check_pairs(config)
    return config, lines


def _chosen(
    config: ClusterConfig, devices: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Run the process that chooses a device, and a dtype for `devices` if there are any."""
    ranks = (
        pool.tensor_parallel * pool.replicas
        for name, pool in config.pools.items()
        if config.pool_engine(name).device != "cpu"
    )
    num_ranks = 1 if config.runs_on == "pods" else max(1, sum(ranks))
    command = [sys.executable, "-m", "engine.run.auto_choice", "--gpus", str(num_ranks)]
    if devices:
        command += ["--model", config.model, "--devices", *devices]
        if config.model_revision is not None:
            command += ["--revision", config.model_revision]
    try:
        # In its own session: ctrl-C ends it by the reaper, after the process that waits for it.
        ended = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise UnavailableError(f"device and dtype were not chosen: {error}") from error
    chosen: dict[str, str] = json.loads(ended.stdout)
    if "error" in chosen:
        raise ConfigError(chosen["error"], field="model")
    return chosen


def _check_pairs(config: ClusterConfig) -> None:
    """Raise ConfigError if no pool takes KV of a prefill pool's dtype."""
    engines = {name: config.pool_engine(name) for name in config.pools}
    dtypes = {name: engine.dtype for name, engine in engines.items() if engine.reads_model}
    senders = {name for name in dtypes if config.pools[name].role is Role.PREFILL}
    taken = {dtypes[name] for name in dtypes.keys() - senders}
    if taken and not {dtypes[name] for name in senders} <= taken:
        said = ", ".join(f"{dtype} in pool {name}" for name, dtype in dtypes.items())
        raise ConfigError(
            f"engine.dtype is {said}: KV is exchanged within one dtype only", field="pools"
        )


def with_choice(
    config: ClusterConfig, name: Literal["device", "dtype"], value: str
) -> ClusterConfig:
    """Replace `auto` by `value` in engine setting `name`, for all pools."""

    def chosen(engine: Mapping[str, Any]) -> dict[str, Any]:
        return {**engine, name: value} if engine.get(name) == AUTO else dict(engine)

    pools = {
        pool: dataclasses.replace(settings, engine=chosen(settings.engine))
        for pool, settings in config.pools.items()
    }
    engine = config.engine
    if getattr(engine, name) == AUTO:
        chosen_for_all: Any = {name: value}
        engine = dataclasses.replace(engine, **chosen_for_all)
    return dataclasses.replace(config, pools=pools, engine=engine)


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
        """The folder or the hub name, with the revision."""
        return f"{self.model}@{self.model_revision}" if self.model_revision else self.model

    def check_same(self, other: ModelSource, source: str) -> None:
        """Raise ConfigError for the first key in which `other`, the model of `source`, differs."""
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
    """SHA-256 of AddPool's text; empty for a pool of the cluster's own file."""

    @property
    def shape(self) -> PoolConfig:
        return self.config.pools[self.name]

    @property
    def role(self) -> Role:
        return self.shape.role

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that its workers can act in."""
        return (Role.PREFILL, Role.DECODE) if self.role is Role.MIXED else (self.role,)

    @property
    def model(self) -> ModelSource:
        return ModelSource.of(self.config)

    @property
    def gpus_per_replica(self) -> int:
        """One per rank that computes on a GPU."""
        on_gpu = self.config.pool_engine(self.name).needs_gpu
        return self.shape.tensor_parallel if on_gpu else 0

    @property
    def dtype(self) -> str | None:
        """The workers' dtype; None: not chosen yet, or the engine is fake."""
        engine = self.config.pool_engine(self.name)
        return engine.dtype if engine.reads_model and engine.dtype != AUTO else None

    def with_dtype(self, dtype: str) -> PoolSettings:
        """The settings with `dtype` where it is `auto`."""
        return dataclasses.replace(self, config=with_choice(self.config, "dtype", dtype))


def own_settings(cluster: ClusterConfig) -> dict[str, PoolSettings]:
    """Settings of the pools in the cluster's own file, by name."""
    return {name: PoolSettings(name, cluster) for name in cluster.pools}


def added_settings(name: str, text: str) -> PoolSettings:
    """Settings of a pool that AddPool brings. Raises ConfigError, which names the key."""
    source = f"pool {name}"
    config = read_config(text, source=source)
    if name not in config.pools:
        there_are = ", ".join(sorted(config.pools)) or "none"
        raise ConfigError(f"{source}: pools: no such pool; there are: {there_are}", field="pools")
    return PoolSettings(name, config, hashlib.sha256(text.encode()).digest())


def common_dtype(pools: Iterable[PoolSettings]) -> str | None:
    """The dtype for pools with `dtype: auto`, since all exchange KV in one; None: not chosen
    yet."""
    return next((each.dtype for each in pools if each.dtype), None)


def num_ranks(pools: Mapping[str, PoolSettings], replicas: Mapping[str, int]) -> int:
    """Ranks of `replicas` (pool -> number of replicas)."""
    return sum(pools[name].shape.tensor_parallel * count for name, count in replicas.items())


def num_gpus_wanted(pools: Mapping[str, PoolSettings], replicas: Mapping[str, int]) -> int:
    """GPUs that `replicas` (pool -> number of replicas) need."""
    return sum(pools[name].gpus_per_replica * count for name, count in replicas.items())
