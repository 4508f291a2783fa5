"""The two CustomResourceDefinitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deploy.api.checked import Checked
from deploy.api.naming import GROUP, VERSION
from deploy.api.schema import schema_of
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.status import ServingClusterStatus, WorkerPoolStatus
from deploy.api.worker_pool import WorkerPoolSpec

Object = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """Of what `kubectl get` prints."""

    name: str
    path: str
    type: str = "string"
    priority: int = 0
    """1: only with `-o wide`."""

    def printer_column(self) -> Object:
        wide = {"priority": self.priority} if self.priority else {}
        return {"name": self.name, "type": self.type, "jsonPath": self.path} | wide


@dataclass(frozen=True)
class Kind:
    """One custom resource."""

    kind: str
    plural: str
    short_names: tuple[str, ...]
    text: str
    spec: type[Checked]
    status: type
    columns: tuple[Column, ...]
    scale: bool = False
    is_applied: bool = False
    """The operator applies the spec: each of its sections has one owner, and goes as a whole. Owned
    field by field, one that is taken back can stay as a null, which no schema takes (1.20)."""

    @property
    def crd_name(self) -> str:
        return f"{self.plural}.{GROUP}"

    def crd(self) -> Object:
        """The CustomResourceDefinition."""
        names = {
            "kind": self.kind,
            "listKind": f"{self.kind}List",
            "plural": self.plural,
            "singular": self.kind.lower(),
            "shortNames": list(self.short_names),
            "categories": ["baton", "all"],
        }
        version = {
            "name": VERSION,
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": self._schema()},
            "subresources": self._subresources(),
            "additionalPrinterColumns": [column.printer_column() for column in self.columns],
        }
        return {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": self.crd_name},
            "spec": {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
        }

    def _schema(self) -> Object:
        spec, status = schema_of(self.spec), _without_defaults(schema_of(self.status))
        for name, key in (("conditions", "type"), ("draining", "worker")):
            if name in status["properties"]:
                listed = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
                status["properties"][name] |= listed
        schema = {
            "description": self.text,
            "type": "object",
            "required": ["spec"],
            "properties": {
                "apiVersion": {"type": "string"},
                "kind": {"type": "string"},
                "metadata": {"type": "object"},
                "spec": _in_whole_sections(spec) if self.is_applied else spec,
                "status": status,
            },
        }
        rules = [rule.validation() for rule in self.spec.object_rules]
        return schema | ({"x-kubernetes-validations": rules} if rules else {})

    def _subresources(self) -> Object:
        scale = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
        return {"status": {}} | ({"scale": scale} if self.scale else {})


def _in_whole_sections(spec: Object) -> Object:
    properties = {
        name: each | ({"x-kubernetes-map-type": "atomic"} if each["type"] == "object" else {})
        for name, each in spec["properties"].items()
    }
    return spec | {"properties": properties}


def _without_defaults(schema: Any) -> Any:
    """What the operator alone writes needs none."""
    if isinstance(schema, list):
        return [_without_defaults(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _without_defaults(value) for name, value in schema.items() if name != "default"}


def _condition(kind: str, field: str = "status") -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


AGE = Column("Age", ".metadata.creationTimestamp", "date")

SERVING_CLUSTER = Kind(
    kind="ServingCluster",
    plural="servingclusters",
    short_names=("sc", "serving"),  # kubectl may take `sc` for storageclasses, which have it, too
    text="One model, served by routers and by pools of prefill and decode workers.",
    spec=ServingClusterSpec,
    status=ServingClusterStatus,
    columns=(
        Column("Model", ".status.model"),
        Column("Available", _condition("Available")),
        Column("Reason", _condition("Available", "reason")),
        Column("Progressing", _condition("Progressing")),
        Column("Degraded", _condition("Degraded")),
        Column("Progress", _condition("Progressing", "reason"), priority=1),
        Column("Fault", _condition("Degraded", "reason"), priority=1),
        Column("Endpoint", ".status.endpoints.grpc", priority=1),
        Column("External", ".status.endpoints.external", priority=1),
        Column("Unit", ".status.unit", priority=1),
        AGE,
    ),
)

WORKER_POOL = Kind(
    kind="WorkerPool",
    plural="workerpools",
    short_names=("wp",),
    text="Workers of one role and shape; `kubectl scale` changes their number.",
    spec=WorkerPoolSpec,
    status=WorkerPoolStatus,
    columns=(
        Column("Role", ".spec.role"),
        Column("Desired", ".spec.replicas", "integer"),
        Column("Ready", ".status.readyReplicas", "integer"),
        Column("Draining", ".status.drainingReplicas", "integer"),
        Column("Available", _condition("Available")),
        Column("Progress", _condition("Progressing", "reason")),
        Column("Queue", ".status.queue", "integer"),
        Column("KV%", ".status.kvUsePercent", "integer"),
        Column("Scaling", ".spec.scaling.mode", priority=1),
        Column("Planned", ".status.desiredReplicas", "integer", priority=1),
        Column("TTFT", ".status.ttftSeconds", "number", priority=1),
        Column("TTFT-Target", ".status.ttftTargetSeconds", "number", priority=1),
        Column("ITL", ".status.itlSeconds", "number", priority=1),
        Column("ITL-Target", ".status.itlTargetSeconds", "number", priority=1),
        Column("Fault", _condition("Degraded", "reason"), priority=1),
        Column("Cluster", ".spec.cluster", priority=1),
        AGE,
    ),
    scale=True,
    is_applied=True,
)

KINDS = (SERVING_CLUSTER, WORKER_POOL)
