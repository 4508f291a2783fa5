"""How a cluster's processes know each other: the Secrets of their keys, and who the operator is at
the control services.

A cluster's root lies in a Secret that no pod mounts. Each epoch has keys of its own, and knows
those of the epochs beside it. So the step to the next epoch needs no order among pods, and no
restart. From the second next one on a key counts no more.
"""

from __future__ import annotations

import base64
import hmac
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from baton.config.internal import InternalConfig
from baton.errors import ConfigError
from baton.identity.identity import Identity, open_identity
from baton.identity.keys import ROLES, make_root, role_files
from deploy.api.naming import GROUP
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.controller.kit.applied import Applied
from deploy.controller.kit.errors import NotFoundError
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Object, key_of
from deploy.controller.manifests.common import Owner
from deploy.controller.manifests.identity import identity_secret, keys_secret
from deploy.controller.manifests.resources import SECRETS

EPOCH = f"{GROUP}/identity-epoch"
"""A ServingCluster's annotation, a whole number. It grows by one at a time."""

Files = Mapping[str, bytes]


class Identities:
    """Own the operator's identity in each cluster, and the files that it is read from."""

    def __init__(self, kube: Kube, applied: Applied) -> None:
        self._kube, self._applied = kube, applied
        self._folder = Path(tempfile.mkdtemp(prefix="baton-identities-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._held: dict[Key, Identity] = {}

    def keep(self, cluster: Object, owner: Owner, spec: ServingClusterSpec) -> Identity | None:
        """Keep the Secrets of keys. Returns the operator's identity; None while there is no Secret
        with its certificate. Raises KubeError; ConfigError where a Secret or the epoch is none."""
        key = key_of(cluster)
        if spec.internal_tls is None:
            return self._opened(key, "keys", self._keep_keys(cluster, owner))
        secret = Key(owner.namespace, identity_secret(owner, spec, "operator"))
        try:
            return self._opened(key, "tls", self._read(secret))
        except NotFoundError:
            return None
        except ConfigError as error:
            field = "spec.internalTLS"
            raise ConfigError(f"{field}: Secret {secret}: {error.message}", field=field) from error

    def forget(self, cluster: Key) -> None:
        self._held.pop(cluster, None)
        shutil.rmtree(self._folder / str(cluster), ignore_errors=True)

    def _keep_keys(self, cluster: Object, owner: Owner) -> Files:
        """Keep the Secrets of all roles' keys. Returns the operator's files."""
        key, epoch = key_of(cluster), cluster["metadata"].get("annotations", {}).get(EPOCH, "0")
        if not epoch.isdecimal():
            field = f"metadata.annotations.{EPOCH}"
            raise ConfigError(f"{field} must be a whole number, not {epoch!r}", field=field)
        first = keys_secret(owner, "root", {"root": make_root()})
        self._applied.make(key, SECRETS, first)
        root = self._read(key_of(first))["root"]
        before, now, after = (
            root if number == 0 else hmac.digest(root, b"epoch %d" % number, "sha256")
            for number in range(int(epoch) - 1, int(epoch) + 2)
        )
        for role in ROLES:
            files = role_files(now, role, (before, after))
            self._applied.apply(key, SECRETS, keys_secret(owner, role, files))
        return role_files(now, "operator", (before, after))

    def _read(self, secret: Key) -> Files:
        data = self._kube.get(SECRETS, secret).get("data") or {}
        return {name: base64.b64decode(text) for name, text in data.items()}

    def _opened(self, cluster: Key, kind: Literal["keys", "tls"], files: Files) -> Identity:
        """Return the one identity of a cluster, which reads its files again. Raises ConfigError."""
        folder = self._folder / str(cluster)
        (folder / "operator").mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            file = folder / "operator" / name
            if not file.exists() or file.read_bytes() != content:
                file.write_bytes(content)
        checked = open_identity(InternalConfig(kind, str(folder)), "operator")
        return self._held.setdefault(cluster, checked)
