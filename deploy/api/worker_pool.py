"""`WorkerPool` (`wp`): workers of one role and shape; `kubectl scale` changes their number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from baton.config.engine import EngineSettings
from baton.config.ranges import between, sized
from baton.fleet import Role
from deploy.api.checked import Checked, PartialOf, Rule
from deploy.api.pod_template import PodSettings

MAX_REPLICAS = 1024
Replicas = Annotated[int, between(0, MAX_REPLICAS)]
Duration = Annotated[str, sized(32, r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$")]
_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


def seconds(duration: str) -> float:
    """Return the seconds of a Go duration, such as 1h30m."""
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", duration)
    return float(sum(float(number) * _UNITS_S[unit] for number, unit in parts))


ScalingMode = Literal["manual", "hpa", "planner"]


@dataclass(frozen=True)
class Parallelism(Checked):
    """How one replica is spread over GPUs."""

    tensor: Annotated[int, between(1, 64)] = 1
    """Rank processes of a replica, all in one pod. On cuda each has a GPU of its own."""


@dataclass(frozen=True)
class Scaling(Checked):
    """Who writes `spec.replicas`."""

    mode: ScalingMode = "manual"
    """Who scales the pool. manual: a person (kubectl scale). hpa: a HorizontalPodAutoscaler on the
    pool's `/scale`. planner: the operator's own planner, which overwrites what anyone else sets."""


@dataclass(frozen=True)
class RolePlan(Checked):
    """How many workers of a `mixed` pool act in one role alone; the rest act in both. A switch
    takes no new pod: every worker of the pool can do either. Where `scaling.mode` is planner, the
    planner writes it into the WorkerPool, and a ServingCluster's is ignored."""

    prefill: Replicas = 0
    decode: Replicas = 0


@dataclass(frozen=True, kw_only=True)
class PoolShape(PodSettings):
    """What a pool's workers are, without their number."""

    # The enumeration alone does not bound the cost of the rule on 32 pools' roles (1.25).
    role: Annotated[Role, sized(7)]
    """What the workers do: prefill, decode, or both (mixed). Cannot be changed."""
    min_replicas: Replicas = 0
    """Fewest workers that anyone may ask for. 0 lets the planner stop the pool."""
    max_replicas: Annotated[int, between(1, MAX_REPLICAS)] = 8
    """Most workers that anyone may ask for, the planner included."""
    parallelism: Parallelism = field(default_factory=Parallelism)
    engine: Annotated[Mapping[str, Any], PartialOf(EngineSettings)] = field(default_factory=dict)
    """Engine settings of this pool that differ from the cluster's."""
    drain_timeout: Duration = "10m"
    """How long a worker that drains may finish what it runs."""
    scaling: Scaling = field(default_factory=Scaling)
    role_plan: RolePlan | None = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "minReplicas must not be above maxReplicas",
            lambda pool: pool.min_replicas <= pool.max_replicas,
        ),
        Rule(
            "!has(self.rolePlan) || self.role == 'mixed'",
            "rolePlan needs a pool whose role is mixed: others have one role",
            lambda pool: pool.role_plan is None or pool.role is Role.MIXED,
        ),
        Rule(
            "!has(self.rolePlan) || "
            "self.rolePlan.prefill + self.rolePlan.decode <= self.maxReplicas",
            "rolePlan must not split more workers than maxReplicas",
            lambda pool: (
                pool.role_plan is None
                or pool.role_plan.prefill + pool.role_plan.decode <= pool.max_replicas
            ),
        ),
        Rule("self.role == oldSelf.role", "role cannot be changed: make another pool"),
    )


@dataclass(frozen=True, kw_only=True)
class PoolTemplate(PoolShape):
    """A pool of a ServingCluster. The operator makes a WorkerPool from it."""

    initial_replicas: Replicas = 1
    """The WorkerPool's first size. Later its own `spec.replicas` is the size."""

    rules = (
        *PoolShape.rules,
        Rule(
            "self.initialReplicas <= self.maxReplicas",
            "initialReplicas must not be above maxReplicas",
            lambda pool: pool.initial_replicas <= pool.max_replicas,
        ),
        Rule(
            "self.initialReplicas >= self.minReplicas",
            "initialReplicas must not be below minReplicas",
            lambda pool: pool.initial_replicas >= pool.min_replicas,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class WorkerPoolSpec(PoolShape):
    """Workers of one role and shape in one ServingCluster."""

    cluster: Annotated[str, sized(63)]
    """The name of the ServingCluster, which is in the same namespace. The operator sets it, and it
    cannot be changed."""
    pool: Annotated[str, sized(34)]
    """The pool's name in the ServingCluster. The operator sets it, and it cannot be changed."""
    replicas: Replicas = 1
    """Number of workers. `scaling.mode` says who writes it."""

    rules = (
        *PoolShape.rules,
        Rule(
            "self.replicas <= self.maxReplicas",
            "replicas must not be above maxReplicas",
            lambda pool: pool.replicas <= pool.max_replicas,
        ),
        Rule(
            "self.replicas >= self.minReplicas",
            "replicas must not be below minReplicas",
            lambda pool: pool.replicas >= pool.min_replicas,
        ),
        Rule("self.cluster == oldSelf.cluster", "cluster cannot be changed"),
        Rule("self.pool == oldSelf.pool", "pool cannot be changed"),
    )
