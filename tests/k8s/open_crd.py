"""A kind of which an API server takes anything: its own schema it would reject, or has none of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from deploy.controller.kit.objects import Resource
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import eventually

_SERVED_WITHIN_S = 60.0
_OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def wait_served(control_plane: ControlPlane, name: str) -> None:
    """`kubectl wait` before 1.21 fails on a kind that has no conditions yet."""

    def is_served() -> bool:
        told = (control_plane.read(f"crd/{name}").get("status") or {}).get("conditions") or ()
        return any(each["type"] == "Established" and each["status"] == "True" for each in told)

    eventually(is_served, f"{name} are served", _SERVED_WITHIN_S)


def open_crd(resource: Resource, kind: str) -> dict[str, Any]:
    version = {
        "name": resource.version,
        "served": True,
        "storage": True,
        "schema": {
            "openAPIV3Schema": {"type": "object", "properties": {"spec": _OPEN, "status": _OPEN}}
        },
        "subresources": {"status": {}},
    }
    names = {
        "kind": kind,
        "listKind": f"{kind}List",
        "plural": resource.plural,
        "singular": kind.lower(),
    }
    annotations = {"api-approved.kubernetes.io": "unapproved, of a test"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": str(resource), "annotations": annotations},
        "spec": {
            "group": resource.group,
            "names": names,
            "scope": "Namespaced",
            "versions": [version],
        },
    }


@contextlib.contextmanager
def served(control_plane: ControlPlane, *crds: dict[str, Any]) -> Iterator[None]:
    """For as long as the block lasts."""
    names = [f"crd/{crd['metadata']['name']}" for crd in crds]
    control_plane.apply(*crds)
    control_plane.kubectl("wait", "--for=condition=Established", *names, "--timeout=20s")
    try:
        yield
    finally:
        control_plane.kubectl("delete", *names, "--timeout=30s")
