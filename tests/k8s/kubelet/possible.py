"""Whether this machine lets us run pods, and a control plane leaves them to us."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path

from tests.k8s.control_plane.assets import Assets, RunningCluster
from tests.k8s.kubelet.cgroups import hierarchy
from tests.k8s.kubelet.commands import run
from tests.k8s.kubelet.errors import KernelError, NotPossibleError

_PROGRAMS = ("ip", "unshare", "nsenter")
_TRIAL = "mount -t tmpfs t /mnt && cd /mnt && mkdir a b c && "
_TRIAL += "mount -t overlay o -o lowerdir=/,upperdir=a,workdir=b c && ip link add x type bridge"


@cache
def check_possible() -> None:
    """Raises NotPossibleError, which says what is missing."""
    if os.geteuid() != 0:
        raise NotPossibleError("pods need root: namespaces, bridges and cgroups are made")
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        raise NotPossibleError(f"not on PATH: {', '.join(missing)}")
    try:
        run(["unshare", "--net", "--uts", "--mount", "sh", "-c", _TRIAL])
    except KernelError as error:
        raise NotPossibleError(f"the kernel allows no namespaces: {error}") from error
    groups = hierarchy()
    if groups is None or not _can_make_groups(groups):
        raise NotPossibleError("cgroups of version 2 are not mounted, or cannot be made")


def check_leaves_pods(found: Assets | RunningCluster) -> None:
    """Raises NotPossibleError, which says who runs the pods, or that nobody makes them."""
    if isinstance(found, RunningCluster):
        raise NotPossibleError("the cluster of BATON_TEST_KUBECONFIG has kubelets of its own")
    if found.kube_controller_manager is None:
        folder = found.kube_apiserver.parent
        raise NotPossibleError(
            f"no kube-controller-manager in {folder}: nobody makes a Deployment's pods"
        )


def _can_make_groups(groups: Path) -> bool:
    trial = groups / f"baton-trial-{os.getpid()}"
    try:
        trial.mkdir()
        can_kill = (trial / "cgroup.kill").exists()
        trial.rmdir()
    except OSError:
        return False
    return can_kill
