"""python -m deploy.controller.upgrade_crds: the CRDs of this release over those that are installed.

The chart runs it before an upgrade, with an account that may do nothing else: helm itself installs
CRDs, but never touches them again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy.api.crd import KINDS
from deploy.controller.kit.connection import command_connection
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Resource

CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)
_FIELD_MANAGER = "baton-crds"


def upgrade_crds(kube: Kube) -> None:
    """Merge the CRDs into the installed ones: before 1.25 an API server knows no CEL, drops rules
    from a merge, but refuses to apply them. Raises KubeError, NotFoundError where one is
    missing."""
    for kind in KINDS:
        kube.merge_patch(CRDS, Key("", kind.crd_name), {"spec": kind.crd()["spec"]})
        print(f"{kind.crd_name}: as of this release", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.controller.upgrade_crds", description=__doc__
    )
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help="else: the pod's account")
    kubeconfig = parser.parse_args().kubeconfig
    connection = command_connection(kubeconfig)
    upgrade_crds(Kube(connection, _FIELD_MANAGER))


if __name__ == "__main__":
    main()
