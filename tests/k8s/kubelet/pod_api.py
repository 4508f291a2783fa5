"""What a kubelet asks of the API server, beside watching: of one namespace."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping
from typing import Any

from deploy.controller.kit.connection import USUAL, Call, Connection
from deploy.controller.kit.errors import ConflictError, NotFoundError
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Object
from deploy.controller.manifests.resources import CONFIG_MAPS, PODS, SECRETS


class PodApi:
    """Raises KubeError, all of it. Threads share it."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        self.kube = Kube(connection, "kubelet")
        self.namespace = namespace
        self._connection = connection

    def values(self, kind: str, name: str) -> Mapping[str, str] | None:
        """A ConfigMap's or Secret's texts; None where there is none."""
        resource = {"ConfigMap": CONFIG_MAPS, "Secret": SECRETS}[kind]
        try:
            found = self.kube.get(resource, Key(self.namespace, name))
        except NotFoundError:
            return None
        data: dict[str, str] = found.get("data") or {}
        if kind == "Secret":
            return {key: base64.b64decode(value).decode() for key, value in data.items()}
        return data

    def token(self, account: str, asked: Mapping[str, Any]) -> str:
        """Of a service account, as a `serviceAccountToken` projection asks for it."""
        spec = {"expirationSeconds": asked.get("expirationSeconds") or 3600}
        if audience := asked.get("audience"):
            spec["audiences"] = [audience]
        path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        return str(self._post(path, request)["status"]["token"])

    def bind(self, pod: Object, node: str) -> None:
        """Gives the pod to the node; it may be gone, or another's, by now."""
        name = pod["metadata"]["name"]
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "namespace": self.namespace},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        with contextlib.suppress(NotFoundError, ConflictError):
            self._post(PODS.path_of(Key(self.namespace, name), "binding"), binding)

    def put_status(self, pod: Object, status: Mapping[str, Any]) -> None:
        """Of this very pod: one of the same name is another."""
        metadata = {"uid": pod["metadata"]["uid"]}
        with contextlib.suppress(NotFoundError, ConflictError):
            key = Key(self.namespace, pod["metadata"]["name"])
            self.kube.merge_patch(PODS, key, {"metadata": metadata, "status": status}, "status")

    def delete_now(self, pod: Object) -> None:
        """Its end has come: nothing of it runs any more."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": pod["metadata"]["uid"]},
        }
        path = PODS.path_of(Key(self.namespace, pod["metadata"]["name"]))
        with contextlib.suppress(NotFoundError, ConflictError):
            self._connection.answer(Call("DELETE", path, body=body), USUAL)

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._connection.answer(Call("POST", path, body=body), USUAL)
