"""A cluster's configuration: one YAML file, every value with a default.

The parts belong to the packages that use them; here they are composed, read and written. Importing
this needs no torch, ray or libucp.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from baton.config import settings
from baton.config.engine import EngineConfig
from baton.config.internal import InternalConfig
from baton.config.planner import PlannerConfig
from baton.config.ranges import NotNegative, Port, Ranged, between
from baton.config.router import RouterConfig
from baton.config.transfer import TransferConfig
from baton.config.workers import (
    DecodeConfig,
    RegistryConfig,
    SupervisorConfig,
    WorkerSettings,
)
from baton.errors import ConfigError
from baton.fleet import Role

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

_ANY_HOST = ("0.0.0.0", "::", "[::]")


@dataclass(frozen=True)
class PoolConfig(Ranged):
    """Workers of one role and one shape."""

    role: Role
    """What its workers do: prefill, decode, or both (mixed)."""
    replicas: int = 1
    """Workers at the start; `baton scale` changes it while the cluster runs."""
    min_replicas: int = 0
    """Fewest workers that `baton up --autoscale` keeps. With 0 it may stop the pool, when
    `planner.scale_to_zero_after_s` says."""
    max_replicas: Annotated[int, between(1, 1024)] = 64
    """Most workers that `baton scale` may ask for: each takes memory for weights and KV."""
    tensor_parallel: Annotated[int, between(1, 64)] = 1
    """Processes that one worker is made of; on cuda each has a GPU of its own."""
    drain_timeout_s: NotNegative | None = None
    """How long a leaving worker of this pool may finish what it runs. None:
    `worker.drain_timeout_s`."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Engine settings of this pool that differ from the cluster's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("replicas", "min_replicas"):
            if not 0 <= getattr(self, name) <= self.max_replicas:
                raise ValueError(
                    f"{name} must be between 0 and max_replicas ({self.max_replicas}), "
                    f"not {getattr(self, name)}"
                )


@dataclass(frozen=True)
class ControlConfig(Ranged):
    """Where the registry listens."""

    host: str = "127.0.0.1"
    port: Port = 7101
    """Where it listens. 0: any free port."""
    announced_host: str | None = None
    """The host by which workers and routers reach the registry, such as a Service of Kubernetes.
    None: `host`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.announced_host == "":
            raise ValueError("announced_host must not be empty")


def _default_pools() -> dict[str, PoolConfig]:
    return {"prefill": PoolConfig(Role.PREFILL), "decode": PoolConfig(Role.DECODE)}


@dataclass(frozen=True)
class ClusterConfig:
    """Everything `baton up` starts. Each part's settings are a section of the file."""

    model: str = "models/demo"
    """A folder in the Hugging Face layout, or a name on the Hugging Face hub."""
    model_revision: str | None = None
    """Branch, tag or commit of a model on the hub. None: its main branch."""
    tokenizer: str | None = None
    """A folder or a name on the hub with tokenizer and chat template, for a model without them.
    None: the model's own."""
    served_model_name: str | tuple[str, ...] | None = None
    """What clients call the model: one name or several, the first of which stands in answers. None:
    the last part of `model`."""
    unit: str = ""
    """The code by which routers, statuses and logs tell this cluster from others that serve another
    version of its model."""
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    """How the log is written: text, or json with an object a line."""
    runs_on: Literal["machine", "pods"] = "machine"
    """machine: all workers share the machine of `baton up`. pods: each replica has a pod of its
    pool to itself, and waits for one (a Ray node with the resource baton-pool/<pool>: a unit for
    each rank)."""
    pools: dict[str, PoolConfig] = field(default_factory=_default_pools)
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    internal: InternalConfig = field(default_factory=InternalConfig)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    """Latency targets and pace of `baton up --autoscale`."""

    def __post_init__(self) -> None:
        for name in ("model", "model_revision", "tokenizer"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} must not be empty")
        if self.runs_on == "machine":  # on pods, pools come and go
            self._check_roles()
        if self.transfer.transport != "ucx":
            raise ValueError(
                f"transfer.transport must be ucx in a cluster, whose workers are processes, "
                f"not {self.transfer.transport}"
            )
        self._check_reachable()
        self._check_times()

    def _check_roles(self) -> None:
        """Check that the pools can serve by themselves."""
        roles = {pool.role for pool in self.pools.values()}
        if not roles & {Role.DECODE, Role.MIXED}:
            raise ValueError("pools need at least one of role decode or mixed")
        prefills = roles & {Role.PREFILL, Role.MIXED}
        if self.router.placement.local_prefill == "never" and not prefills:
            raise ValueError(
                "router.placement.local_prefill must not be never without a pool of role prefill "
                "or mixed"
            )

    def _check_reachable(self) -> None:
        """Check that workers can find the registry from other machines."""
        host, announced = self.control.host, self.control.announced_host
        if self.runs_on == "pods" and host in _ANY_HOST and announced is None:
            raise ValueError(
                f"control.announced_host is needed where runs_on is pods and control.host is {host}"
            )

    def _check_times(self) -> None:
        """Check that one part outlasts another where it must."""
        drains_s = {"worker": self.worker.drain_timeout_s}
        for name, pool in self.pools.items():
            if pool.drain_timeout_s is not None:
                drains_s[f"pools.{name}"] = pool.drain_timeout_s
        longest = max(drains_s, key=lambda part: drains_s[part])
        registry, supervisor, router_s = self.registry, self.supervisor, self.router.timeouts
        limits = (
            ("supervisor.drain_timeout_s", supervisor.drain_timeout_s,
             f"{longest}.drain_timeout_s", drains_s[longest]),
            ("registry.silent_after_s", registry.silent_after_s,
             "worker.heartbeat_s", self.worker.heartbeat_s),
            ("registry.gone_after_s", registry.gone_after_s,
             "registry.silent_after_s + supervisor.fence_after_s",
             registry.silent_after_s + supervisor.fence_after_s),
            ("router.timeouts.first_token_s", router_s.first_token_s,
             "registry.first_step_s", registry.first_step_s),
            ("transfer.tombstone_s", self.transfer.tombstone_s,
             "router.timeouts.reserve_s + router.timeouts.max_s",
             router_s.reserve_s + router_s.max_s),
        )  # fmt: skip
        for name, seconds, other, bound_s in limits:
            if seconds <= bound_s:
                raise ValueError(f"{name} must be above {other} ({bound_s:g}), not {seconds:g}")

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return the names by which clients call the model."""
        named = self.served_model_name or Path(self.model).name
        return (named,) if isinstance(named, str) else named

    @property
    def model_name(self) -> str:
        """Return the name of the model in answers."""
        return self.model_names[0]

    def pool_engine(self, pool: str, *, source: str = "configuration") -> EngineConfig:
        """The engine settings of a pool: the cluster's with the pool's own over them.

        Raises ConfigError, in the name of the file `source`."""
        merged = settings.merge(settings.dump(self.engine), self.pools[pool].engine)
        key = f"pools.{pool}.engine"
        return settings.parse(EngineConfig, merged, source=source, key=key)

    def with_absolute_folders(self) -> ClusterConfig:
        """Return the configuration with absolute paths: workers and routers have working
        directories of their own. A name on the hub stays a name."""
        tokenizer = None if self.tokenizer is None else _absolute(self.tokenizer)
        return dataclasses.replace(self, model=_absolute(self.model), tokenizer=tokenizer)

    def to_yaml(self) -> str:
        """Write what `parse_config` reads back as an equal configuration; defaults are left out."""
        changed = settings.dump(self, base=ClusterConfig())
        return yaml.safe_dump(changed, sort_keys=False, allow_unicode=True) if changed else "{}\n"


def _absolute(folder: str) -> str:
    return str(Path(folder).resolve()) if Path(folder).is_dir() else folder


def parse_config(value: object, *, source: str = "configuration") -> ClusterConfig:
    """Make a configuration from what a YAML file holds; every error is a ConfigError."""
    config = settings.parse(ClusterConfig, {} if value is None else value, source=source)
    for name in config.pools:
        _check_pool(name, config, source)
    return config


def _check_pool(name: str, config: ClusterConfig, source: str) -> None:
    """Read the pools' engine settings, with errors under their own keys."""
    if not name.replace("-", "").isalnum() or not name.isascii() or len(name) > 40:
        raise ConfigError(
            f"{source}: pools.{name}: a pool's name is letters, digits and -", field=f"pools.{name}"
        )
    config.pool_engine(name, source=source)


def load_config(path: str | Path) -> ClusterConfig:
    """Read a cluster file. A relative `model` or `tokenizer` means a folder beside the file, if
    there is one; a leading ~ means a home folder. Relative files for TLS, tokens and
    identities lie beside the file."""
    source = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not valid YAML: {_one_line(error)}") from error
    config = read_config(text, source=source)
    around = Path(path).resolve().parent
    tokenizer = None if config.tokenizer is None else _beside(around, config.tokenizer)
    return dataclasses.replace(
        config,
        model=_beside(around, config.model),
        tokenizer=tokenizer,
        router=config.router.beside(around),
        internal=config.internal.beside(around),
    )


def _beside(around: Path, folder: str) -> str:
    named = os.path.expanduser(folder)
    return str(around / named) if (around / named).is_dir() else named


def read_config(text: str, *, source: str) -> ClusterConfig:
    """Make a configuration from a cluster file's text; every error is a ConfigError."""
    try:
        value = settings.load_yaml(text)
    except settings.RepeatedKeyError as error:
        raise ConfigError(f"{source}: {error}", field=error.key) from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{source}: not valid YAML: {line}{error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {_one_line(error)}") from error
    return parse_config(value, source=source)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
