"""Timeouts and tuning of Baton's parts: a free map of the ServingCluster, whose keys and values the
parts' own settings check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.config.engine import EngineTuning
from baton.config.planner import PlannerTuning
from baton.config.router import RouterConfig
from baton.config.transfer import TransferConfig
from baton.config.workers import DecodeConfig, RegistryConfig, SupervisorConfig, WorkerSettings
from deploy.api.checked import Checked

OPERATORS: Mapping[str, tuple[str, ...]] = {
    "router": ("host", "port", "metrics_port", "health_port", "reuse_port", "tls", "auth"),
    "worker": ("port", "metrics_port"),
    "supervisor": ("drain_timeout_s",),
}
"""What the operator sets itself."""


@dataclass(frozen=True)
class Advanced(Checked):
    """Timeouts and tuning of each part. The defaults suit most clusters."""

    router: RouterConfig = field(default_factory=RouterConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    planner: PlannerTuning = field(default_factory=PlannerTuning)
    engine: EngineTuning = field(default_factory=EngineTuning)

    def __post_init__(self) -> None:
        super().__post_init__()
        for section, names in OPERATORS.items():
            settings = getattr(self, section)
            for name in names:
                if getattr(settings, name) != getattr(type(settings), name):
                    raise ValueError(f"{section}.{name} must not be given: the operator sets it")
