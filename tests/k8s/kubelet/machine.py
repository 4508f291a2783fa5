"""What all pods of one kubelet share on this machine: folders, groups, network, and who watches
over processes; and whether the machine lets us."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cluster.local.process_tree import watched_over
from tests.k8s.control_plane.assets import Assets, RunningCluster
from tests.k8s.kubelet.cgroups import Cgroup, hierarchy, remove_group
from tests.k8s.kubelet.errors import KernelError, NotPossibleError
from tests.k8s.kubelet.network import Network, run

REPOSITORY = Path(__file__).resolve().parents[3]
_MEMORY = Path("/dev/shm")
_NAME = "baton-kubelet"
_PROGRAMS = ("ip", "unshare", "nsenter")
_TRIAL = "mount -t tmpfs t /mnt && cd /mnt && mkdir a b c && "
_TRIAL += "mount -t overlay o -o lowerdir=/,upperdir=a,workdir=b c && ip link add x type bridge"


@dataclass(frozen=True)
class Image:
    """What containers are made of."""

    root: Path
    environment: Mapping[str, str]
    folders: tuple[str, ...] = ()
    """What a container has besides, wherever it is mounted on this machine."""
    opened: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    folder: Path
    """On disk, gone at the end."""
    memory: Path
    """In memory, gone at the end."""
    logs: Path
    group: Cgroup
    network: Network
    mark: Mapping[str, str]
    """Environment by which the processes are found if the tests are killed."""
    images: Mapping[str, Image]
    """By name; other containers are of this machine's files."""

    def image(self, name: str) -> Image:
        own = Image(Path("/"), image_environment(), image_folders(), opened_folders())
        return self.images.get(name, own)


@contextlib.contextmanager
def pod_machine(logs: Path, images: Mapping[str, Image] | None = None) -> Iterator[Machine]:
    """What is left in it at the end is killed and removed. Raises KernelError."""
    groups = hierarchy()
    assert groups is not None, "check_possible() comes first"
    _remove_left_overs(groups)
    name = f"{_NAME}-{os.getpid()}-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        folder, memory = Path(tempfile.gettempdir()) / name, _MEMORY / name
        for each in (folder, memory):
            each.mkdir()
            stack.callback(shutil.rmtree, each)
        mark = stack.enter_context(watched_over()).variables
        network = Network(mark)
        stack.callback(network.close)
        group = Cgroup(groups / name)
        stack.callback(group.remove)
        yield Machine(folder, memory, logs, group, network, mark, images or {})


def image_environment() -> dict[str, str]:
    """What every container of this machine's files has, as an image would say it."""
    return {
        "PATH": f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(REPOSITORY),
        "LANG": "C.UTF-8",
    }


def image_folders() -> tuple[str, ...]:
    """What every container has, wherever it is mounted on this machine."""
    folders = {REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)}
    return tuple(str(each) for each in folders if not folders.intersection(each.parents))


def opened_folders() -> tuple[str, ...]:
    """Those on the way to what the image has, which other users may not see on this machine."""
    parents = {str(parent) for folder in image_folders() for parent in Path(folder).parents}
    return tuple(sorted(parents))


def _remove_left_overs(groups: Path) -> None:
    """Of tests that were killed. The reaper has ended what it knows of; what is left goes here."""
    for folder in (groups, _MEMORY, Path(tempfile.gettempdir())):
        for left_over in folder.glob(f"{_NAME}-*"):
            if Path("/proc", left_over.name.split("-")[2]).exists():
                continue
            with contextlib.suppress(OSError):  # another test removes it at this moment
                remove_group(left_over) if folder == groups else shutil.rmtree(left_over)


# --- whether this machine lets us, and a control plane leaves pods to us --------------------------


@cache
def check_possible(*, builds_images: bool = False) -> None:
    """Raises NotPossibleError, which says what is missing."""
    if os.geteuid() != 0:
        raise NotPossibleError("pods need root: namespaces, bridges and cgroups are made")
    programs = (*_PROGRAMS, *(("buildah", "debootstrap") if builds_images else ()))
    if missing := [program for program in programs if shutil.which(program) is None]:
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
