"""What a process may lock, share, and have of huge pages."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from cluster.preflight.check import Check, Wanted, failure, ok, warning

_IPC_LOCK = 14
"""The bit of CAP_IPC_LOCK."""
_SHM_BYTES = 1 << 30
"""NCCL takes some hundred megabytes of /dev/shm for the ranks of a replica."""


def check_memory(root: Path, wanted: Wanted) -> list[Check]:
    return [
        locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], _capabilities(root), wanted),
        shared_memory(_size(root / "dev/shm"), wanted),
        huge_pages(root, wanted),
    ]


def locked_memory(limit_bytes: int, capabilities: int, wanted: Wanted) -> Check:
    """`limit_bytes`: RLIM_INFINITY for none; `capabilities`: effective ones, a bit each."""
    if limit_bytes == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited")
    if capabilities >> _IPC_LOCK & 1:
        return ok("locked memory", "unlimited by CAP_IPC_LOCK")
    found = f"at most {_size_text(limit_bytes)}"
    if not wanted.rdma:
        return ok("locked memory", f"{found}; only RDMA locks more")
    return failure(
        "locked memory",
        f"{found}, without CAP_IPC_LOCK; RDMA locks the whole KV memory",
        "cluster.nodes.ipcLock: true in the chart's values, or LimitMEMLOCK=infinity for the "
        "node's container runtime",
    )


def shared_memory(size_bytes: int | None, wanted: Wanted) -> Check:
    """`size_bytes`: of /dev/shm; None: there is none."""
    fix = "cluster.nodes.shmSize: 16Gi in the chart's values, or a Memory emptyDir at /dev/shm"
    if size_bytes is None:
        return failure("/dev/shm", "none", fix)
    found = _size_text(size_bytes)
    if size_bytes >= _SHM_BYTES:
        return ok("/dev/shm", found)
    if wanted.num_gpus > 1:
        return failure("/dev/shm", f"{found}, shared by {wanted.num_gpus} ranks of NCCL", fix)
    return warning("/dev/shm", found, fix)


def huge_pages(root: Path, wanted: Wanted) -> Check:
    counts = {}
    for folder in sorted((root / "sys/kernel/mm/hugepages").glob("hugepages-*kB")):
        size_bytes = int(folder.name.removeprefix("hugepages-").removesuffix("kB")) << 10
        total, free = (_number(folder / name) for name in ("nr_hugepages", "free_hugepages"))
        if total:
            counts[_size_text(size_bytes)] = f"{free} of {total} free"
    found = ", ".join(f"{size}: {count}" for size, count in counts.items())
    if found:
        return ok("huge pages", found)
    if wanted.hugepages:
        return failure(
            "huge pages",
            "the node has none",
            "vm.nr_hugepages on the node (sysctl, or hugepages= at boot), then restart its kubelet",
        )
    return ok("huge pages", "none, and none asked for")


def _capabilities(root: Path) -> int:
    try:
        text = (root / "proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", text, re.MULTILINE)
    return int(found[1], 16) if found else 0


def _size(folder: Path) -> int | None:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _size_text(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
