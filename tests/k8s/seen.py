"""One namespace and its ServingCluster `main`, as kubectl shows them."""

from __future__ import annotations

import json
from typing import Any

from tests.k8s.control_plane.errors import CommandError
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import condition, eventually
from tests.k8s.serving_clusters import cluster, group_sizes_in, unit_of, units_of


class Seen:
    """Read and change what is in one namespace."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self._control_plane, self.namespace = control_plane, namespace

    def kubectl(self, *arguments: str) -> str:
        return self._control_plane.kubectl("-n", self.namespace, *arguments)

    def make(self, name: str = "main", **spec: Any) -> None:
        """Apply a ServingCluster."""
        self._control_plane.apply(cluster(self.namespace, name, **spec))

    def change(self, name: str = "main", **spec: Any) -> None:
        """Patch a ServingCluster; None takes a field away."""
        patch = json.dumps({"spec": spec})
        self.kubectl("patch", f"servingcluster/{name}", "--type=merge", "-p", patch)

    def scale(self, what: str, replicas: int) -> None:
        self.kubectl("scale", what, f"--replicas={replicas}")

    def __call__(self, what: str) -> dict[str, Any] | None:
        """`kind/name`; None: there is none."""
        try:
            found: dict[str, Any] = self._control_plane.read(what, "-n", self.namespace)
        except CommandError as error:
            if "NotFound" in str(error):
                return None
            raise
        return found

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
        return units_of(self._control_plane, self.namespace, "main")

    def unit(self) -> dict[str, Any] | None:
        """The only RayCluster of `main`."""
        return unit_of(self._control_plane, self.namespace, "main")

    def unit_soon(self) -> dict[str, Any]:
        found: dict[str, Any] = eventually(self.unit, "a unit")
        return found

    def group_sizes(self) -> dict[str, int]:
        """By pool, of the unit's worker groups."""
        return group_sizes_in(self.unit_soon())

    def wait_for_size(self, pool: str, size: int) -> None:
        eventually(lambda: self.group_sizes()[pool] == size, f"{pool} asks for {size} pods")

    def config(self) -> str:
        text: str = self.soon("configmap/main-config")["data"]["cluster.yaml"]
        return text
