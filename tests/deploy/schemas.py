"""What Kubernetes takes, and KubeRay where its CRD is at hand."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

REAL_CRD = Path(__file__).parents[3] / "shared" / "k8s" / "ray.io_rayclusters.yaml"
NOT_AT_HAND = "KubeRay's own CRD is not at hand"


def check_kubernetes(obj: dict[str, Any]) -> None:
    """Raises where Kubernetes refuses the object, or does not know one of its fields."""
    kubernetes_validate.validate(obj, "1.37.0", strict=True)


def check_pod(name: str, template: dict[str, Any]) -> None:
    """The same of the pod that a template makes."""
    metadata = {"name": name, **template["metadata"]}
    check_kubernetes({"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata})


def check_ray_cluster(ray_cluster: dict[str, Any]) -> None:
    """Raises jsonschema's ValidationError where KubeRay's schema refuses it, or would prune it."""
    _validator().validate(ray_cluster)


@functools.cache
def _validator() -> jsonschema.Draft7Validator:
    """Reading a megabyte of YAML takes longer than all that is done with it."""
    crd = yaml.load(REAL_CRD.read_text(), Loader=yaml.CSafeLoader)
    (schema,) = [
        version["schema"]["openAPIV3Schema"]
        for version in crd["spec"]["versions"]
        if version["name"] == "v1"
    ]
    return jsonschema.Draft7Validator(_strict(schema))


def _strict(schema: Any) -> Any:
    """As an API server prunes: a field that the schema does not name is a mistake."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _strict(value) for name, value in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    open_to_all = made.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(made.get("properties"), dict) and "type" in made and not open_to_all:
        made.setdefault("additionalProperties", False)
    return made
