"""Checks of the machine: memory limits, GPUs and RDMA adapters. Also: what a check is.

- Memory: what a process may lock and share, and huge pages.
- GPUs: the node's driver against torch's CUDA, and the GPUs that torch sees.
  GPUDirect, for adapters.
- Adapters: their ports' links and the addresses that RoCE needs, all from sysfs.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import resource
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

_LONGEST_FOUND = 160
"""Characters: a library's message may fill a page."""


class Outcome(StrEnum):
    OK = "PASS"
    WARNING = "WARN"
    FAILURE = "FAIL"


@dataclass(frozen=True)
class Wanted:
    """What workers need of this machine. What is missing is a failure."""

    num_gpus: int = 0
    rdma: bool = False
    hugepages: bool = False
    ucx_library: str = "wheel"


@dataclass(frozen=True)
class Check:
    name: str
    outcome: Outcome
    found: str
    """What was found, on one line."""
    fix: str = ""
    """How to fix it, on one line; empty if nothing is wrong."""

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.outcome is not Outcome.OK), self


def ok(name: str, found: str) -> Check:
    return Check(name, Outcome.OK, _line(found))


def warning(name: str, found: str, fix: str) -> Check:
    return Check(name, Outcome.WARNING, _line(found), fix)


def failure(name: str, found: str, fix: str) -> Check:
    return Check(name, Outcome.FAILURE, _line(found), fix)


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_FOUND else line[: _LONGEST_FOUND - 3] + "..."


def has_failed(checks: Sequence[Check]) -> bool:
    return any(check.outcome is Outcome.FAILURE for check in checks)


def as_table(checks: Sequence[Check]) -> str:
    """Three columns; a fix follows on its own line."""
    rows = []
    for check in checks:
        rows.append((check.name, check.outcome.value, check.found))
        if check.fix:
            rows.append(("", "fix", check.fix))
    names, outcomes = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = (f"{name:<{names}}  {outcome:<{outcomes}}  {text}" for name, outcome, text in rows)
    return "\n".join(line.rstrip() for line in lines)


def as_json(checks: Sequence[Check]) -> str:
    result = {"ok": not has_failed(checks), "checks": [asdict(check) for check in checks]}
    return json.dumps(result, indent=1)


# --- memory -------------------------------------------------------------------------------------

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
    """`limit_bytes`: RLIM_INFINITY for no limit. `capabilities`: the effective ones, a bit each."""
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
    """`size_bytes`: size of /dev/shm; None: there is none."""
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


# --- GPUs ---------------------------------------------------------------------------------------

_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> the oldest driver that runs its minor versions
(docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)."""
_DRIVER = re.compile(r"Kernel Module(?: for \S+)? +([0-9]+(?:\.[0-9]+)+)")


def check_gpus(root: Path, wanted: Wanted) -> list[Check]:
    driver, cuda = driver_version(root), torch_cuda()
    num_seen = num_gpus_seen() if cuda and (driver or wanted.num_gpus) else 0
    checks = [check_driver(driver, cuda, num_seen, wanted)]
    return checks + ([check_number(num_seen, wanted)] if wanted.num_gpus else [])


def check_driver(driver: str | None, cuda: str | None, num_seen: int, wanted: Wanted) -> Check:
    """`driver`, `cuda`: versions as text; None: no driver, or torch without CUDA."""
    own_image = "a worker image with CUDA (make images builds one unless TORCH_INDEX says cpu)"
    if driver is None and not wanted.num_gpus:
        return ok("driver", "no NVIDIA driver, and no GPU asked for")
    if driver is None:
        return failure(
            "driver",
            "no NVIDIA driver here",
            "install it on the node (NVIDIA's GPU operator does), and request nvidia.com/gpu",
        )
    if cuda is None:
        found = f"{driver}, but torch is built without CUDA"
        return (failure if wanted.num_gpus else warning)("driver", found, own_image)
    found = f"{driver}, torch is built for CUDA {cuda}"
    major = int(cuda.partition(".")[0])
    oldest = _OLDEST_DRIVERS.get(major, 0)
    if int(driver.partition(".")[0]) >= oldest or num_seen:  # the image may bring a newer libcuda
        return ok("driver", found)
    return failure(
        "driver",
        f"{found}, which needs {oldest} or newer",
        f"upgrade the node's driver to {oldest} or newer, or take a torch for CUDA {major - 1}",
    )


def check_number(num_seen: int, wanted: Wanted) -> Check:
    found = f"torch sees {num_seen} of {wanted.num_gpus}"
    if num_seen >= wanted.num_gpus:
        return ok("GPUs", found)
    return failure(
        "GPUs",
        found,
        "the pod's limit of nvidia.com/gpu is to be spec.pools.NAME.parallelism.tensor; if it is, "
        "nvidia-smi on the node shows which GPU fails",
    )


def driver_version(root: Path) -> str | None:
    """Version of the kernel's NVIDIA module; None: not loaded."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = _DRIVER.search(text)
    return found[1] if found else None


def torch_cuda() -> str | None:
    """CUDA version of torch, from its version file, because importing torch takes seconds. None:
    built without CUDA, or not installed."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    cuda = runpy.run_path(str(Path(found.origin).with_name("version.py"))).get("cuda")
    return cuda if isinstance(cuda, str) else None


def num_gpus_seen() -> int:
    import torch  # only on a machine with a driver

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


_DMA_BUF_SUPPORTED = 124
"""CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED."""


def check_gpu_direct(root: Path, exports_dmabuf: bool) -> Check:
    """Whether an adapter can read and write a GPU's memory itself."""
    if (root / "sys/module/nvidia_peermem").exists():
        return ok("GPUDirect", "nvidia_peermem is loaded")
    if exports_dmabuf:
        return ok("GPUDirect", "dmabuf: the driver exports the GPU's memory")
    return warning(
        "GPUDirect",
        "neither nvidia_peermem nor dmabuf: KV is copied through the host's memory",
        "modprobe nvidia-peermem on the node (NVIDIA's GPU operator: driver.rdma.enabled), or the "
        "open kernel modules for dmabuf",
    )


def exports_dmabuf() -> bool:
    """Whether the driver exports the first GPU's memory as a dmabuf; False without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    value, device = ctypes.c_int(0), ctypes.c_int(0)
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return False
    return not cuda.cuDeviceGetAttribute(ctypes.byref(value), _DMA_BUF_SUPPORTED, device) and bool(
        value.value
    )


# --- adapters -----------------------------------------------------------------------------------

_STATE_FIXES = {
    "DOWN": "check cable and switch port (ibstat on the node), or leave the adapter out of "
    "UCX_NET_DEVICES",
    "INIT": "start a subnet manager (opensm) on the fabric: the link is up and has no address",
    "ARMED": "restart the fabric's subnet manager: it began with this port and did not end",
}
_ROCE_V2 = "RoCE v2"
_LINK_LOCAL = "fe80:"


@dataclass(frozen=True)
class Gid:
    index: int
    address: str
    kind: str
    """IB/RoCE v1, RoCE v2."""

    @property
    def is_routable(self) -> bool:
        """Whether it is a RoCE v2 address of the network, not a link-local one."""
        return self.kind == _ROCE_V2 and not self.address.startswith(_LINK_LOCAL)


@dataclass(frozen=True)
class Port:
    """One port of one adapter. `name`: as in UCX_NET_DEVICES, for example mlx5_0:1."""

    name: str
    state: str
    """DOWN, INIT, ARMED, ACTIVE."""
    gb_per_s: float
    """Gigabits per second."""
    is_roce: bool
    gids: tuple[Gid, ...]


def check_adapters(root: Path, environment: Mapping[str, str], wanted: Wanted) -> list[Check]:
    ports = read_ports(root)
    if not ports and not wanted.rdma:
        return [ok("adapters", "none, and none asked for: KV goes over shared memory or TCP")]
    if not ports:
        fix = "request the adapter (rdma/... in cluster.nodes.resources); on the node: mlx5_ib"
        return [failure("adapters", "nothing in /sys/class/infiniband", fix)]
    return [
        *_devices(root, wanted),
        *(_link(port, ports, wanted) for port in ports),
        *(_address(port, environment) for port in ports if port.is_roce and _is_up(port)),
    ]


def read_ports(root: Path) -> list[Port]:
    """All ports, in order of their names."""
    folders = (root / "sys/class/infiniband").glob("*/ports/*")
    return [_port(folder) for folder in sorted(folders, key=_natural)]


def _natural(path: Path) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def _port(folder: Path) -> Port:
    rate = re.match(r"[0-9.]+", _text(folder / "rate"))
    kinds = {kind.name: _text(kind) for kind in (folder / "gid_attrs/types").glob("*")}
    gids = [
        Gid(int(gid.name), address, kinds.get(gid.name, ""))
        for gid in sorted((folder / "gids").glob("*"), key=_natural)
        if (address := _text(gid)).strip("0:")
    ]
    return Port(
        name=f"{folder.parents[1].name}:{folder.name}",
        state=_text(folder / "state").partition(":")[2].strip() or "unknown",
        gb_per_s=float(rate[0]) if rate else 0.0,
        is_roce=_text(folder / "link_layer") == "Ethernet",
        gids=tuple(gids),
    )


def _text(path: Path) -> str:
    """A file's text; empty if it cannot be read (an index without an address gives an error)."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _is_up(port: Port) -> bool:
    return port.state == "ACTIVE"


def _devices(root: Path, wanted: Wanted) -> list[Check]:
    """Check the device files. sysfs shows the node's adapters to every pod, but only a pod's own
    adapters have device files there."""
    if not wanted.rdma:
        return []
    devices = sorted((root / "dev/infiniband").glob("uverbs*"), key=_natural)
    if devices:
        return [ok("adapters", f"/dev/infiniband/{', '.join(each.name for each in devices)}")]
    fix = "request the adapter in the pod's limits: rdma/... in cluster.nodes.resources"
    return [failure("adapters", "the node has some, but no /dev/infiniband/uverbs* is here", fix)]


def _link(port: Port, ports: Sequence[Port], wanted: Wanted) -> Check:
    kind = "RoCE" if port.is_roce else "InfiniBand"
    found = f"{kind}, {port.state}, {port.gb_per_s:g} Gb/s"
    if not _is_up(port):
        fix = _STATE_FIXES.get(port.state, _STATE_FIXES["DOWN"])
        none_is_up = wanted.rdma and not any(_is_up(other) for other in ports)
        return (failure if none_is_up else warning)(port.name, found, fix)
    fastest = max(other.gb_per_s for other in ports if _is_up(other))
    if port.gb_per_s < fastest:
        fix = "the cable or switch port negotiated a lower speed: mlxlink shows why"
        return warning(port.name, f"{found}, others {fastest:g}", fix)
    return ok(port.name, found)


def _address(port: Port, environment: Mapping[str, str]) -> Check:
    name = f"{port.name} GID"
    routable = [gid for gid in port.gids if gid.is_routable]
    chosen = environment.get("UCX_IB_GID_INDEX", "auto")
    if not routable:
        fix = "give the adapter's network interface an IP address (the Multus network's ipam)"
        return failure(name, "no RoCE v2 address but link-local ones", fix)
    if chosen.isdecimal() and int(chosen) not in [gid.index for gid in routable]:
        return failure(
            name,
            f"UCX_IB_GID_INDEX is {chosen}, which is no routable RoCE v2 address of this port",
            f"UCX_IB_GID_INDEX={routable[0].index} (cluster.nodes.env), or leave it to UCX",
        )
    index = int(chosen) if chosen.isdecimal() else routable[0].index
    (gid,) = [gid for gid in routable if gid.index == index]
    return ok(name, f"{gid.address} ({gid.kind}) at index {gid.index}")


# --- the link between two nodes -----------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """What KV may leave this pod by."""

    name: str
    gb_per_s: float
    """Gigabits per second."""


def rdma_links(root: Path, environment: Mapping[str, str]) -> list[Link]:
    """Ports that are up and that UCX_NET_DEVICES leaves."""
    ports = (Link(port.name, port.gb_per_s) for port in read_ports(root) if _is_up(port))
    return [link for link in ports if _may_use(link.name, environment)]


def tcp_links(root: Path, environment: Mapping[str, str]) -> list[Link]:
    """Interfaces with hardware of their own: a pod's virtual one makes its speed up."""
    found = []
    for folder in sorted((root / "sys/class/net").glob("*")):
        is_up = _text(folder / "operstate") == "up" and (folder / "device").exists()
        mb_per_s = _number(folder / "speed")
        if is_up and mb_per_s > 0 and _may_use(folder.name, environment):
            found.append(Link(folder.name, mb_per_s / 1000))
    return found


def _may_use(name: str, environment: Mapping[str, str]) -> bool:
    chosen = environment.get("UCX_NET_DEVICES", "all").split(",")
    return "all" in chosen or name in chosen
