"""RDMA adapters: their ports' links, and the addresses that RoCE needs; all from sysfs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.preflight.check import Check, Wanted, failure, ok, warning

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
        """RoCE v2 with an address of the network's, not one that the adapter made up."""
        return self.kind == _ROCE_V2 and not self.address.startswith(_LINK_LOCAL)


@dataclass(frozen=True)
class Port:
    """One port of one adapter. `name`: as in UCX_NET_DEVICES, mlx5_0:1."""

    name: str
    state: str
    """DOWN, INIT, ARMED, ACTIVE."""
    gb_per_s: float
    """Gigabits."""
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
    """In order of their names."""
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
    """Empty where it cannot be read: an index that has no address gives an error."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _is_up(port: Port) -> bool:
    return port.state == "ACTIVE"


def _devices(root: Path, wanted: Wanted) -> list[Check]:
    """sysfs shows the node's adapters to every pod; their devices are those of the pod."""
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
        fix = "the cable or switch port took a lower speed: mlxlink tells why"
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
