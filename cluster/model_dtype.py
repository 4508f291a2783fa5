"""`engine.dtype: auto` decided once, for all pools: workers of two dtypes would never exchange KV.

A process of its own decides, beside whatever else is being started: it needs torch, seconds to
import and hundreds of MB that nobody here wants to keep.
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
from typing import Any, Self

from baton.config import ClusterConfig
from baton.errors import ConfigError, UnavailableError

AUTO = "auto"
_TIMEOUT_S = 60.0


class DtypeDecision:
    """Begun on entering; `result` waits for it. Leaving ends its process."""

    def __init__(self, config: ClusterConfig, variables: Mapping[str, str]) -> None:
        self._config = config
        self._variables = variables  # added to the process's environment
        engines = [config.pool_engine(pool) for pool in config.pools]
        self._devices = sorted(
            {e.device for e in engines if e.dtype == AUTO and e.backend == "torch"}
        )
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if self._devices:
            # A session of its own: a terminal's interrupt ends it through whoever waits for it.
            command = [sys.executable, "-m", "engine.dtype", self._config.model, *self._devices]
            if self._config.model_revision is not None:
                command += ["--revision", self._config.model_revision]
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

    def result(self) -> tuple[ClusterConfig, str | None]:
        """The configuration without `auto`, and which dtype it was made and why; None where no
        pool leaves it open.

        Raises ConfigError for a model folder that is wrong and for a prefill pool that no other
        could take KV from, UnavailableError.
        """
        if self._process is None:
            _check_pairs(self._config, self._config)
            return self._config, None
        try:
            said, _ = self._process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"no dtype was chosen within {_TIMEOUT_S:g} s") from None
        if self._process.returncode:
            raise UnavailableError(f"choosing a dtype ended with {self._process.returncode}")
        told: dict[str, str] = json.loads(said)
        if "error" in told:
            raise ConfigError(told["error"], field="model")
        dtype = told["dtype"]
        config = with_dtype(self._config, dtype)
        _check_pairs(config, self._config)
        return config, f"computing in {dtype}: {told['reason']}"


def decided_dtype(config: ClusterConfig) -> tuple[ClusterConfig, str | None]:
    """What `DtypeDecision.result` says, waited for. A pod that was made before this model was named
    may have no folder of it: then it is left open to the workers, whose pods have (see
    `cluster.agreed_dtype`)."""
    model = Path(config.model)
    if config.runs_on == "pods" and model.is_absolute() and not model.is_dir():
        return config, None
    with DtypeDecision(config, {}) as decision:
        return decision.result()


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


def with_dtype(config: ClusterConfig, dtype: str) -> ClusterConfig:
    """Wherever it says `auto`."""

    def decided(engine: Mapping[str, Any]) -> dict[str, Any]:
        return {**engine, "dtype": dtype} if engine.get("dtype") == AUTO else dict(engine)

    pools = {
        name: dataclasses.replace(pool, engine=decided(pool.engine))
        for name, pool in config.pools.items()
    }
    engine = config.engine
    if engine.dtype == AUTO:
        engine = dataclasses.replace(engine, dtype=dtype)
    return dataclasses.replace(config, pools=pools, engine=engine)
