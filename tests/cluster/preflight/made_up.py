"""A machine that is not there: what /proc, /sys and /dev would show of it."""

from __future__ import annotations

from pathlib import Path

OPEN_DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)\n"
)
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sat Nov  4 00:00:00 UTC 2023\n"
LINK_LOCAL = "fe80:0000:0000:0000:0ac0:ebff:fe12:3456"
ROUTABLE = "0000:0000:0000:0000:0000:ffff:0a00:0001"
NO_ADDRESS = "0000:0000:0000:0000:0000:0000:0000:0000"


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def driver(root: Path, text: str, version: str) -> None:
    write(root, "proc/driver/nvidia/version", text.format(version) + "GCC version: 12.2.0\n")


def huge_pages(root: Path, total: int, free: int) -> None:
    folder = "sys/kernel/mm/hugepages/hugepages-2048kB"
    write(root, f"{folder}/nr_hugepages", f"{total}\n")
    write(root, f"{folder}/free_hugepages", f"{free}\n")


def device(root: Path, name: str = "uverbs0") -> None:
    write(root, f"dev/infiniband/{name}", "")


def port(
    root: Path,
    adapter: str,
    *,
    state: str = "4: ACTIVE",
    rate: str = "400 Gb/sec (4X NDR)",
    link: str = "InfiniBand",
) -> str:
    """The port's folder, below `root`."""
    folder = f"sys/class/infiniband/{adapter}/ports/1"
    for name, text in (("state", state), ("rate", rate), ("link_layer", link)):
        write(root, f"{folder}/{name}", f"{text}\n")
    return folder


def roce_port(root: Path, adapter: str, *gids: tuple[str, str]) -> None:
    """`gids`: (address, kind), from index 0."""
    folder = port(root, adapter, link="Ethernet")
    for index, (address, kind) in enumerate(gids):
        write(root, f"{folder}/gids/{index}", f"{address}\n")
        write(root, f"{folder}/gid_attrs/types/{index}", f"{kind}\n")
