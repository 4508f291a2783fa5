"""How a cluster's processes know each other (see `baton.identity`): Secrets with keys or with
certificates, of which a pod mounts its own role's alone."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from baton.identity.keys import ROLES, Role
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.controller.manifests.common import (
    IDENTITY_FOLDER,
    Object,
    Owner,
    issued_certificate,
    manifest,
)


def identity_secret(owner: Owner, spec: ServingClusterSpec, role: Role) -> str:
    """Name the Secret with a role's keys, which the operator makes, or with its certificate."""
    return f"{owner.name}-{'identity' if spec.internal_tls is None else 'internal'}-{role}"


def identity_of(owner: Owner, spec: ServingClusterSpec, role: Role) -> tuple[str, str, str]:
    """Return a volume's name, its folder and its Secret for a pod of this role."""
    return "identity", f"{IDENTITY_FOLDER}/{role}", identity_secret(owner, spec, role)


def keys_secret(owner: Owner, of: str, files: Mapping[str, bytes]) -> Object:
    """Make a Secret of keys. `of` is a role, or `root`."""
    data = {name: base64.b64encode(content).decode() for name, content in files.items()}
    metadata = owner.metadata(f"{owner.name}-identity-{of}", "identity")
    return manifest("v1", "Secret", metadata, type="Opaque", data=data)


def role_certificates(owner: Owner, spec: ServingClusterSpec) -> list[Object]:
    """Ask cert-manager for the roles' certificates, where the spec names an issuer."""
    if spec.internal_tls is None or (issuer := spec.internal_tls.issuer_ref) is None:
        return []
    made, usages = [], ("server auth", "client auth")
    for role in ROLES:
        name = identity_secret(owner, spec, role)
        names = {"uris": [f"baton:{role}"], "dnsNames": [f"baton-{role}"]}
        metadata = owner.metadata(name, "identity")
        made.append(issued_certificate(metadata, issuer, name, usages, **names))
    return made
