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

_SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}


@dataclass(frozen=True)
class Kind:
    """One custom resource."""

    kind: str
    plural: str
    short_names: tuple[str, ...]
    text: str
    spec: type[Checked]
    status: type
    columns: tuple[Object, ...]
    """What `kubectl get` prints."""
    scale: bool = False
    is_applied: bool = False
    """The operator applies the spec: each of its sections has one owner and goes as a whole. With
    one owner a field, a field that is taken back can stay as a null, which no schema takes
    (1.20)."""

    @property
    def crd_name(self) -> str:
        return f"{self.plural}.{GROUP}"

    def crd(self) -> Object:
        """Make the CustomResourceDefinition."""
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
            "subresources": {"status": {}} | ({"scale": _SCALE} if self.scale else {}),
            "additionalPrinterColumns": list(self.columns),
        }
        return {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": self.crd_name},
            "spec": {"group": GROUP, "names": names, "scope": "Namespaced", "versions": [version]},
        }

    def _schema(self) -> Object:
        spec, status = schema_of(self.spec), schema_of(self.status)
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


def _in_whole_sections(spec: Object) -> Object:
    properties = {
        name: each | ({"x-kubernetes-map-type": "atomic"} if each["type"] == "object" else {})
        for name, each in spec["properties"].items()
    }
    return spec | {"properties": properties}


def _column(name: str, path: str, type_: str = "string", *, wide: bool = False) -> Object:
    """Make a column. `wide`: it is shown only with `-o wide`."""
    column = {"name": name, "type": type_, "jsonPath": path}
    return column | {"priority": 1} if wide else column


def _condition(kind: str, field: str = "status") -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


AGE = _column("Age", ".metadata.creationTimestamp", "date")

SERVING_CLUSTER = Kind(
    kind="ServingCluster",
    plural="servingclusters",
    short_names=("sc", "serving"),  # kubectl may take `sc` for storageclasses, which have it, too
    text="One model, served by routers and by pools of prefill and decode workers.",
    spec=ServingClusterSpec,
    status=ServingClusterStatus,
    columns=(
        _column("Model", ".status.model"),
        _column("Available", _condition("Available")),
        _column("Reason", _condition("Available", "reason")),
        _column("Progressing", _condition("Progressing")),
        _column("Degraded", _condition("Degraded")),
        _column("Progress", _condition("Progressing", "reason"), wide=True),
        _column("Fault", _condition("Degraded", "reason"), wide=True),
        _column("Endpoint", ".status.endpoints.grpc", wide=True),
        _column("External", ".status.endpoints.external", wide=True),
        _column("HTTP", ".status.endpoints.openai", wide=True),
        _column("External-HTTP", ".status.endpoints.externalOpenai", wide=True),
        _column("Unit", ".status.unit", wide=True),
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
        _column("Role", ".spec.role"),
        _column("Desired", ".spec.replicas", "integer"),
        _column("Ready", ".status.readyReplicas", "integer"),
        _column("Draining", ".status.drainingReplicas", "integer"),
        _column("Available", _condition("Available")),
        _column("Progress", _condition("Progressing", "reason")),
        _column("Queue", ".status.queue", "integer"),
        _column("KV%", ".status.kvUsePercent", "integer"),
        _column("Scaling", ".spec.scaling.mode", wide=True),
        _column("Planned", ".status.desiredReplicas", "integer", wide=True),
        _column("TTFT", ".status.ttftSeconds", "number", wide=True),
        _column("TTFT-Target", ".status.ttftTargetSeconds", "number", wide=True),
        _column("ITL", ".status.itlSeconds", "number", wide=True),
        _column("ITL-Target", ".status.itlTargetSeconds", "number", wide=True),
        _column("Fault", _condition("Degraded", "reason"), wide=True),
        _column("Cluster", ".spec.cluster", wide=True),
        AGE,
    ),
    scale=True,
    is_applied=True,
)

KINDS = (SERVING_CLUSTER, WORKER_POOL)
