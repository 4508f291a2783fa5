"""A container's first steps, in its first process: `python -m tests.k8s.kubelet.entry FILE`.

1. It goes into its cgroup, then into the pod's network and host name.
2. A new container makes its root: its image's files, read-only underneath; what it writes lies
   on top, in memory that goes with it; `/tmp` and `/run` are empty; its volumes lie where it wants
   them. A process that is added to a container (a probe, `preStop`) goes into what is there.
3. It becomes the user that it is to run as, and then the command itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.k8s.kubelet.errors import KubeletError
from tests.k8s.kubelet.kernel import Mount, Namespace, bind, change_root, enter, mount, unshare

NOT_STARTED_STATUS = 128
_DEFAULT_SHM_BYTES = 64 << 20
"""A container runtime's default."""


@dataclass(frozen=True)
class VolumeMount:
    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class User:
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class Entry:
    """What FILE says, as JSON."""

    cgroup: str
    pod_pid: int
    """Of the process that holds the pod's namespaces."""
    container_pid: int | None
    """The first process of the container to go into; None: a new one."""
    root: str
    """An empty folder for a new container's root."""
    shares_memory: bool
    """Its /dev/shm is this machine's."""
    mounts: tuple[VolumeMount, ...]
    opened: tuple[str, ...]
    """Folders that any user may enter in there, whatever their mode is outside."""
    user: User
    folder: str
    command: tuple[str, ...]
    environment: dict[str, str]
    held: int | None = None
    """A descriptor that closes when the command begins: the parent waits for that."""
    image: str = "/"
    """The folder that lies under a new container's root."""
    is_read_only: bool = False
    """Only its volumes can be written to."""

    @classmethod
    def read(cls, text: str) -> Entry:
        said: dict[str, Any] = json.loads(text)
        said["mounts"] = tuple(VolumeMount(**each) for each in said["mounts"])
        said["user"] = User(**said["user"])
        return cls(**said)


def main(arguments: Sequence[str]) -> int:
    file = Path(arguments[0])
    entry = Entry.read(file.read_text())
    file.unlink()
    if entry.held is not None:
        os.set_inheritable(entry.held, False)
    try:
        (Path(entry.cgroup) / "cgroup.procs").write_text(str(os.getpid()))
        if entry.container_pid is None:
            _enter_pod(entry.pod_pid)
            _make_root(entry)
        else:
            _enter_container(entry.container_pid)
        _become(entry.user)
        os.chdir(entry.folder)
        os.execvpe(entry.command[0], entry.command, entry.environment)
    except (KubeletError, OSError) as error:
        print(f"cannot start {' '.join(entry.command)}: {error}", file=sys.stderr, flush=True)
    return NOT_STARTED_STATUS


def _enter_pod(pid: int) -> None:
    _enter(pid, {"net": Namespace.NETWORK, "uts": Namespace.UTS})


def _enter_container(pid: int) -> None:
    _enter(pid, {"net": Namespace.NETWORK, "uts": Namespace.UTS, "mnt": Namespace.MOUNT})


def _enter(pid: int, kinds: dict[str, Namespace]) -> None:
    opened = [
        (os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY), kind) for name, kind in kinds.items()
    ]
    for descriptor, kind in opened:
        enter(descriptor, kind)
        os.close(descriptor)


def _make_root(entry: Entry) -> None:
    unshare(Namespace.MOUNT)
    mount("", "/", "", Mount.PRIVATE | Mount.RECURSIVE)
    layers = Path(entry.root)
    mount("tmpfs", str(layers), "tmpfs", Mount.NONE, "mode=755")
    root = layers / "root"
    for name in ("written", "work", "root"):
        (layers / name).mkdir()
    options = f"lowerdir={entry.image},upperdir={layers}/written,workdir={layers}/work"
    mount("overlay", str(root), "overlay", Mount.NONE, options)
    for folder in entry.opened:
        inside = _inside(root, folder)
        inside.chmod(inside.stat().st_mode | 0o111)
    for folder in ("/proc", "/sys", "/dev"):
        bind(Path(folder), _inside(root, folder))
    own = {"/tmp": "mode=1777", "/run": "mode=755"}
    if not entry.shares_memory:
        own["/dev/shm"] = f"mode=1777,size={_DEFAULT_SHM_BYTES}"
    for folder, options in own.items():
        mount("tmpfs", str(_inside(root, folder)), "tmpfs", Mount.NONE, options)
    # A mount inside another one has to come after it.
    for each in sorted(entry.mounts, key=lambda each: each.target.count("/")):
        _mount_volume(root, each)
    change_root(root)
    for folder in ("/", "/tmp", "/run") if entry.is_read_only else ():
        if all(each.target != folder for each in entry.mounts):
            mount("", folder, "", Mount.REMOUNT | Mount.BIND | Mount.READ_ONLY)


def _mount_volume(root: Path, volume: VolumeMount) -> None:
    source, target = Path(volume.source), _inside(root, volume.target)
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    bind(source, target, read_only=volume.read_only)


def _inside(root: Path, path: str) -> Path:
    """A path of the container, as it is reached from outside: links lead where they do in there."""
    return root / Path(os.path.realpath(path)).relative_to("/")


def _become(user: User) -> None:
    os.umask(0o022)
    os.setgroups(user.groups)
    os.setgid(user.gid)
    os.setuid(user.uid)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
