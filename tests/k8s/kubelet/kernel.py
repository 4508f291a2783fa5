"""The kernel's calls for namespaces and mounts, which Python 3.11 lacks. Standard library only:
`entry` runs before any package is there."""

from __future__ import annotations

import ctypes
import os
from enum import IntFlag
from pathlib import Path

from tests.k8s.kubelet.errors import KernelError

_libc = ctypes.CDLL(None, use_errno=True)


class Namespace(IntFlag):
    MOUNT = 0x00020000
    UTS = 0x04000000
    NETWORK = 0x40000000


class Mount(IntFlag):
    NONE = 0
    READ_ONLY = 1
    REMOUNT = 32
    BIND = 4096
    RECURSIVE = 16384
    PRIVATE = 1 << 18


_DETACH = 2


def unshare(namespaces: Namespace) -> None:
    """Of the calling thread. Raises KernelError, as all of these do."""
    _check(_libc.unshare(int(namespaces)), f"unshare {namespaces!r}")


def enter(namespace: int, kind: Namespace) -> None:
    """`namespace`: a descriptor of it. The calling thread is in it then, and it alone."""
    _check(_libc.setns(namespace, int(kind)), f"setns {kind!r}")


def mount(source: str, target: str, kind: str, flags: Mount, options: str = "") -> None:
    done = _libc.mount(
        source.encode(), target.encode(), kind.encode(), int(flags), options.encode()
    )
    _check(done, f"mount {source} at {target}")


def bind(source: Path, target: Path, *, read_only: bool = False) -> None:
    mount(str(source), str(target), "", Mount.BIND | Mount.RECURSIVE)
    if read_only:
        mount("", str(target), "", Mount.REMOUNT | Mount.BIND | Mount.READ_ONLY)


def change_root(root: Path) -> None:
    """`root`: a mount of this thread's own mount namespace. What was mounted before is gone."""
    old = root / ".old-root"
    old.mkdir()
    _check(_libc.pivot_root(str(root).encode(), str(old).encode()), f"pivot_root {root}")
    os.chdir("/")
    _check(_libc.umount2(b"/.old-root", _DETACH), "umount the former root")
    Path("/.old-root").rmdir()


def _check(answer: int, doing: str) -> None:
    if answer != 0:
        raise KernelError(f"{doing}: {os.strerror(ctypes.get_errno())}")
