"""What a cluster's pods share: their account, which may do nothing, and Ray's token."""

from __future__ import annotations

from deploy.controller.manifests.common import Object, Owner


def pods_account(owner: Owner) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": owner.metadata(f"{owner.name}-pods", "pods"),
        "automountServiceAccountToken": False,
    }


def ray_token(owner: Owner, token: str) -> Object:
    """As KubeRay reads it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owner.metadata(f"{owner.name}-ray-token", "ray"),
        "type": "Opaque",
        "stringData": {"auth_token": token},
    }
