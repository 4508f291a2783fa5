"""`engine.device: auto` and `engine.dtype: auto` decided once for all pools, which exchange KV in
one dtype only.

A process of its own decides (`engine.auto_choice`), beside whatever else is being started: torch
takes seconds to import and hundreds of MB.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from baton.config.cluster import ClusterConfig
from baton.config.engine import AUTO
from baton.errors import ConfigError, UnavailableError

_TIMEOUT_S = 60.0


class AutoSettings:
    """Begun on entering; `result` waits for it. Leaving ends its process."""

    def __init__(self, config: ClusterConfig, variables: Mapping[str, str]) -> None:
        self._config = config
        self._variables = variables  # added to the process's environment
        engines = [config.pool_engine(pool) for pool in config.pools]
        engines = [engine for engine in engines if engine.backend == "torch"]
        self._is_device_open = any(engine.device == AUTO for engine in engines)
        self._devices = sorted({engine.device for engine in engines if engine.dtype == AUTO})
        ranks = (
            pool.tensor_parallel * pool.replicas
            for name, pool in config.pools.items()
            if config.pool_engine(name).device != "cpu"
        )
        self._num_ranks = 1 if config.runs_on == "pods" else max(1, sum(ranks))
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if self._is_device_open or self._devices:
            command = [sys.executable, "-m", "engine.auto_choice", "--gpus", str(self._num_ranks)]
            if self._devices:
                command += ["--model", self._config.model, "--devices", *self._devices]
                if self._config.model_revision is not None:
                    command += ["--revision", self._config.model_revision]
            # A session of its own: a terminal's interrupt ends it through whoever waits for it.
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | dict(self._variables),
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def result(self) -> tuple[ClusterConfig, list[str]]:
        """The configuration without `auto`, and a line for each choice with its reason.

        Raises ConfigError for a model folder that is wrong and for a prefill pool that no other
        could take KV from, UnavailableError.
        """
        if self._process is None:
            _check_pairs(self._config, self._config)
            return self._config, []
        try:
            said, _ = self._process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise UnavailableError(
                f"no device and dtype were chosen within {_TIMEOUT_S:g} s"
            ) from None
        if self._process.returncode:
            raise UnavailableError(
                f"choosing device and dtype ended with {self._process.returncode}"
            )
        chosen: dict[str, str] = json.loads(said)
        if "error" in chosen:
            raise ConfigError(chosen["error"], field="model")
        config, lines = self._config, []
        if self._is_device_open:
            config = with_choice(config, "device", chosen["device"])
            where = "a GPU" if chosen["device"] == "cuda" else "the CPU"
            lines.append(f"computing on {where}: {chosen['device_reason']}")
        if self._devices:
            config = with_choice(config, "dtype", chosen["dtype"])
            lines.append(f"computing in {chosen['dtype']}: {chosen['dtype_reason']}")
        _check_pairs(config, self._config)
        return config, lines


def decided(config: ClusterConfig) -> tuple[ClusterConfig, list[str]]:
    """What `AutoSettings.result` says, waited for. A pod that was made before this model was named
    may have no folder of it: then it is left open to the workers, whose pods have (see
    `cluster.worker.agreed_dtype`)."""
    model = Path(config.model)
    if config.runs_on == "pods" and model.is_absolute() and not model.is_dir():
        return config, []
    with AutoSettings(config, {}) as auto:
        return auto.result()


def _check_pairs(config: ClusterConfig, written: ClusterConfig) -> None:
    """Raise ConfigError where no pool takes KV of a prefill pool's dtype. `written` has `auto`."""

    def named(pool: str) -> str:
        """A pool's dtype, by the field that says it."""
        field = f"pools.{pool}.engine.dtype"
        if "dtype" not in written.pools[pool].engine:
            field = f"engine.dtype (of pool {pool})"
        is_open = written.pool_engine(pool).dtype == AUTO
        return f"{field} is {config.pool_engine(pool).dtype}" + " by auto" * is_open

    def torch_pools(*roles: str) -> list[str]:
        pools = config.pools.items()
        return [
            name
            for name, pool in pools
            if pool.role in roles and config.pool_engine(name).backend == "torch"
        ]

    receivers = torch_pools("decode", "mixed")
    dtypes = {config.pool_engine(pool).dtype for pool in receivers}
    for sender in torch_pools("prefill"):
        if receivers and config.pool_engine(sender).dtype not in dtypes:
            said = ", ".join(named(pool) for pool in (sender, *receivers))
            raise ConfigError(f"{said}: KV is exchanged within one dtype only", field="pools")


def with_choice(
    config: ClusterConfig, name: Literal["device", "dtype"], value: str
) -> ClusterConfig:
    """Engine setting `name` is `value` wherever it says `auto`."""

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
