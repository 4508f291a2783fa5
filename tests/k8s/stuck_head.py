"""A head's pod that nobody starts, as KubeRay would have made it of an older spec."""

from __future__ import annotations

from deploy.controller.kube import Kube
from deploy.controller.manifests.common import Owner
from deploy.controller.manifests.pods import CONFIG_HASH, HEAD_CONTAINER
from deploy.controller.objects import Key
from deploy.controller.resources import PODS


def stuck_head(administrator: Kube, namespace: str, head_hash: str = "older") -> Key:
    """Of the cluster `main`."""
    labels = Owner("main", namespace, "").labels("head")
    metadata = {
        "name": "main-head-x",
        "namespace": namespace,
        "labels": labels,
        "annotations": {CONFIG_HASH: head_hash},
    }
    spec = {"containers": [{"name": HEAD_CONTAINER, "image": "nobody/has-it"}]}
    made = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    administrator.create(PODS, made)
    return Key(namespace, "main-head-x")
