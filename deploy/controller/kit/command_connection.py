"""Where the operator's commands find their API server."""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.controller.kit.connection import Connection
from deploy.controller.kit.errors import NotConfiguredError


def command_connection(kubeconfig: Path | None) -> Connection:
    """None: by the account of the pod that we are in. Where there is neither the process ends, and
    says what to name."""
    try:
        return Connection.from_kubeconfig(kubeconfig) if kubeconfig else Connection.in_cluster()
    except NotConfiguredError as error:
        hint = "" if kubeconfig else "; outside of a pod name a file by --kubeconfig"
        sys.exit(f"{error}{hint}")
