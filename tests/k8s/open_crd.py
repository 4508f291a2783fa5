"""Kinds of others with a schema that takes anything, KubeRay's RayCluster among them: an API server
of 1.20 rejects its present schema."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from deploy.controller.kit.objects import Resource
from deploy.controller.manifests.resources import RAY_CLUSTERS
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import condition, eventually

_OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def wait_served(control_plane: ControlPlane, name: str) -> None:
    """`kubectl wait` before 1.21 fails on a kind that has no conditions yet."""

    def is_served() -> bool:
        found = condition(control_plane.read(f"crd/{name}"), "Established")
        return found.get("status") == "True"

    eventually(is_served, f"{name} are served")


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


def serve_ray_clusters(control_plane: ControlPlane) -> None:
    """From now on; nobody turns one into pods."""
    control_plane.apply(open_crd(RAY_CLUSTERS, "RayCluster"))
    wait_served(control_plane, "rayclusters.ray.io")
