"""Finds a control plane, or the programs to run one with; builds nothing.

1. `BATON_TEST_KUBECONFIG`: a cluster that runs already, used as its administrator.
2. `KUBEBUILDER_ASSETS`: a folder with kube-apiserver, etcd and kubectl, as envtest uses.
3. What `make control-plane` has built.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.k8s.control_plane.errors import NotAtHandError, NotBuiltError
from tests.k8s.control_plane.recipe import built_folder, failure_note


@dataclass(frozen=True)
class Clients:
    """The commands that tests use."""

    kubectl: Path
    helm: Path | None
    """None: neither beside kubectl nor on PATH."""


@dataclass(frozen=True)
class Assets:
    """The programs of a control plane."""

    etcd: Path
    kube_apiserver: Path
    kube_controller_manager: Path | None
    """None where the folder has none, as envtest's: no ReplicaSets, no garbage collection."""
    openssl: Path
    clients: Clients


@dataclass(frozen=True)
class RunningCluster:
    """A cluster of somebody else's, whose administrator the tests may be."""

    kubeconfig: Path
    clients: Clients


def find() -> Assets | RunningCluster:
    """Raises NotAtHandError, which says what to do; NotBuiltError where building would help."""
    if kubeconfig := os.environ.get("BATON_TEST_KUBECONFIG"):
        return _running(Path(kubeconfig))
    if folder := os.environ.get("KUBEBUILDER_ASSETS"):
        return _assets(Path(folder), "KUBEBUILDER_ASSETS")
    if (built := built_folder()).is_dir():
        return _assets(built, "`make control-plane`")
    note = failure_note()
    last = f"; the last build failed: {note.read_text()}" if note.exists() else ""
    raise NotBuiltError(
        "run `make control-plane` (Debian bookworm, 5 minutes), or "
        f"set KUBEBUILDER_ASSETS or BATON_TEST_KUBECONFIG{last}"
    )


def _running(kubeconfig: Path) -> RunningCluster:
    if not kubeconfig.is_file():
        raise NotAtHandError(f"BATON_TEST_KUBECONFIG: {kubeconfig} is no file")
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise NotAtHandError("BATON_TEST_KUBECONFIG: no kubectl on PATH")
    return RunningCluster(kubeconfig, Clients(Path(kubectl), _on_path("helm")))


def _assets(folder: Path, named_by: str) -> Assets:
    for name in ("kube-apiserver", "etcd", "kubectl"):
        if not os.access(folder / name, os.X_OK):
            raise NotAtHandError(f"{named_by}: no program {name} in {folder}")
    openssl = _on_path("openssl")
    if openssl is None:
        raise NotAtHandError(
            "no openssl on PATH, which makes the API server's key: install openssl"
        )
    return Assets(
        etcd=folder / "etcd",
        kube_apiserver=folder / "kube-apiserver",
        kube_controller_manager=_beside(folder, "kube-controller-manager"),
        openssl=openssl,
        clients=Clients(folder / "kubectl", _beside(folder, "helm") or _on_path("helm")),
    )


def _beside(folder: Path, name: str) -> Path | None:
    return folder / name if os.access(folder / name, os.X_OK) else None


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return None if found is None else Path(found)
