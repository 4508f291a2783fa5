"""ServingClusters for tests, and what kubectl shows of one and of its namespace."""

from __future__ import annotations

import json
from typing import Any

from deploy.api.naming import API_VERSION
from deploy.controller.manifests.common import CLUSTER_LABEL
from tests.k8s.control_plane.errors import CommandError
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import condition, eventually

BAD_ROUTER = {"podTemplate": {"spec": {"containers": ["x"]}}}
"""Every API server takes it, with CEL or without, since no schema goes into templates. The operator
refuses it by the name of its field."""
BAD_FIELD = "spec.router.podTemplate.spec.containers[0]"


def cluster(namespace: str, name: str = "main", **spec: Any) -> dict[str, Any]:
    usual = {
        "model": {"name": "models/demo"},
        "pools": {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}},
    }
    metadata = {"name": name, "namespace": namespace}
    return {
        "apiVersion": API_VERSION,
        "kind": "ServingCluster",
        "metadata": metadata,
        "spec": usual | spec,
    }


def pool(namespace: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "WorkerPool",
        "metadata": {"name": "decode", "namespace": namespace},
        "spec": {"role": "decode", "cluster": "main", "pool": "decode"} | spec,
    }


class Seen:
    """Read and change what is in one namespace; `name`: of its ServingCluster."""

    def __init__(self, control_plane: ControlPlane, namespace: str, name: str = "main") -> None:
        self._control_plane, self.namespace, self.name = control_plane, namespace, name

    def kubectl(self, *arguments: str) -> str:
        return self._control_plane.kubectl("-n", self.namespace, *arguments)

    def make(self, name: str = "", **spec: Any) -> None:
        """Apply a ServingCluster, the usual one where none is named."""
        self._control_plane.apply(cluster(self.namespace, name or self.name, **spec))

    def change(self, **spec: Any) -> None:
        """Patch the ServingCluster; None takes a field away."""
        patch = json.dumps({"spec": spec})
        self.kubectl("patch", f"servingcluster/{self.name}", "--type=merge", "-p", patch)

    def scale(self, pool: str, replicas: int) -> None:
        pool = pool if self.name == "default" else f"{self.name}-{pool}"
        self.kubectl("scale", f"wp/{pool}", f"--replicas={replicas}")

    def read(self, what: str) -> dict[str, Any]:
        """`kind/name`, or a List of a kind. Raises CommandError where it is not there."""
        found: dict[str, Any] = self._control_plane.read(what, "-n", self.namespace)
        return found

    def __call__(self, what: str) -> dict[str, Any] | None:
        """`kind/name`; None: there is none."""
        try:
            return self.read(what)
        except CommandError as error:
            if "NotFound" in str(error):
                return None
            raise

    def soon(self, what: str) -> dict[str, Any]:
        found: dict[str, Any] = eventually(lambda: self(what), what)
        return found

    def names(self, kind: str) -> set[str]:
        return set(self.kubectl("get", kind, "-o", "jsonpath={.items[*].metadata.name}").split())

    def condition(self, what: str, kind: str) -> dict[str, Any]:
        """Empty while the object, or its condition, is not there."""
        return condition(self(what) or {}, kind)

    def condition_soon(self, what: str, kind: str, reason: str) -> dict[str, Any]:
        """The condition, once it has that reason."""

        def has_reason() -> dict[str, Any] | None:
            found = self.condition(what, kind)
            return found if found.get("reason") == reason else None

        found: dict[str, Any] = eventually(has_reason, f"{what}: {kind} is {reason}")
        return found

    def units(self) -> list[dict[str, Any]]:
        """The RayClusters of the ServingCluster."""
        label = f"{CLUSTER_LABEL}={self.name}"
        listed = self._control_plane.read("rayclusters.ray.io", "-n", self.namespace, "-l", label)
        found: list[dict[str, Any]] = listed["items"]
        return found

    def unit(self) -> dict[str, Any] | None:
        """The only one; None: there is none."""
        found = self.units()
        assert len(found) <= 1, "never two units"
        return found[0] if found else None

    def unit_soon(self) -> dict[str, Any]:
        found: dict[str, Any] = eventually(self.unit, "a unit")
        return found

    def group_sizes(self) -> dict[str, int]:
        """The replicas of the unit's worker groups, by pool."""
        groups = self.unit_soon()["spec"]["workerGroupSpecs"]
        return {group["groupName"]: group["replicas"] for group in groups}

    def wait_for_size(self, pool: str, size: int) -> None:
        eventually(lambda: self.group_sizes()[pool] == size, f"{pool} asks for {size} pods")

    def config(self) -> str:
        text: str = self.soon(f"configmap/{self.name}-config")["data"]["cluster.yaml"]
        return text
