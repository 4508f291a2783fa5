"""What pods take of their nodes, as Kubernetes spells it; a PodTemplateSpec for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.api.checked import Checked, bounded
from deploy.api.pod_template import (
    AFFINITY,
    ENV,
    POD_TEMPLATE,
    RESOURCES,
    SPREAD_CONSTRAINTS,
    TOLERATIONS,
)

_OF_POD = (
    ("nodeSelector", "node_selector"),
    ("tolerations", "tolerations"),
    ("affinity", "affinity"),
    ("topologySpreadConstraints", "topology_spread_constraints"),
    ("priorityClassName", "priority_class_name"),
)
_OF_CONTAINER = (("resources", "resources"), ("env", "env"))


@dataclass(frozen=True, kw_only=True)
class PodSettings(Checked):
    """Each is laid over what the operator sets itself; `podTemplate` comes last."""

    resources: Mapping[str, Any] = bounded(dict, foreign=RESOURCES)
    """Requests and limits of the container. GPUs follow from `parallelism` unless they stand here;
    0 takes a device away."""
    node_selector: Mapping[str, str] = bounded(dict, max_size=64)
    """Labels that a node must have."""
    tolerations: tuple[Any, ...] = bounded((), foreign=TOLERATIONS)
    """Taints that a node may have."""
    affinity: Mapping[str, Any] = bounded(dict, foreign=AFFINITY)
    """Nodes and pods to be near to, or far from."""
    topology_spread_constraints: tuple[Any, ...] = bounded((), foreign=SPREAD_CONSTRAINTS)
    """How pods spread over zones or nodes."""
    priority_class_name: str | None = bounded(None, max_size=253)
    """Which pods give way when nodes are full."""
    env: tuple[Any, ...] = bounded((), foreign=ENV)
    """Environment variables of the container."""
    pod_template: Mapping[str, Any] = bounded(dict, foreign=POD_TEMPLATE)
    """A PodTemplateSpec that is merged over all of it: annotations, volumes, further containers.
    Labels by which pods are found (baton.dev, app.kubernetes.io) stay the operator's."""

    def own_template(self, container: str) -> dict[str, Any]:
        """The PodTemplateSpec that the fields before `pod_template` mean, for that container."""
        spec, of_container = (
            {key: _plain(getattr(self, name)) for key, name in names if getattr(self, name)}
            for names in (_OF_POD, _OF_CONTAINER)
        )
        if of_container:
            spec["containers"] = [{"name": container, **of_container}]
        return {"spec": spec} if spec else {}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
