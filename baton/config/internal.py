"""How the processes of a cluster know each other. Standard library only."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.config.ranges import Ranged

FOLDER_VARIABLE = "BATON_IDENTITY"
_DEFAULT_FOLDER = "/etc/baton/identity"


@dataclass(frozen=True)
class InternalConfig(Ranged):
    """How routers, workers and operators know each other, on links and at the control service."""

    identity: Literal["keys", "tls", "off"] = "keys"
    """How a role is proved. keys: each role signs with its own key, and what is sent can be read on
    the way. tls: mutual TLS 1.3, with a certificate for each role. off: whoever reaches a port may
    use it."""
    folder: str | None = None
    """A folder of identities, with a folder for each role: `router`, `worker` and `operator`. A
    process reads its own role's alone, so it needs no other one there. With keys it holds
    `role.key` and `roles.pub`. With tls it holds `ca.crt`, `tls.crt` and `tls.key`, as cert-manager
    mounts them. The certificate names the role as the URI `baton:<role>`, and the operator's also
    the DNS name `baton-operator`. Files are read again when they change. None: `baton up` makes
    keys; other processes read the folder that BATON_IDENTITY names, or /etc/baton/identity."""

    @property
    def path(self) -> Path:
        """Return the folder of identities."""
        return Path(self.folder or os.environ.get(FOLDER_VARIABLE) or _DEFAULT_FOLDER)

    def beside(self, around: Path) -> InternalConfig:
        """Return these settings with a relative folder taken as one in `around`."""
        folder = None if self.folder is None else str(around / self.folder)
        return dataclasses.replace(self, folder=folder)
