"""The transfer layer's settings. Standard library only: they are read where libucp is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from baton.config.ranges import Positive, Ranged, at_least

Checksum = Literal["off", "sampled", "always"]


@dataclass(frozen=True)
class TransferConfig(Ranged):
    """How KV moves and how long either side waits for the other."""

    transport: Literal["ucx", "memory"] = "ucx"
    """How KV travels: ucx, or memory between workers inside one interpreter."""
    ucx_library: str = "wheel"
    """Which libucp is loaded: wheel (libucx-cu12), system (the linker's libucp.so.0), or a path."""
    net_devices: str = ""
    """The network devices that UCX may use and listen on, as UCX_NET_DEVICES names them; `all`:
    any. Empty: the loopback device alone where the cluster runs on one machine, else any.
    UCX_NET_DEVICES in a worker's environment goes first."""
    checksum: Checksum = "off"
    """Which blocks carry checksums: off, sampled (every 16th) or always."""
    renew_within_s: Annotated[float, at_least(0.001)] = 10.0  # whole ms in a lease
    """A lease is fenced when its writer is silent for this long."""
    ack_timeout_s: Positive = 10.0
    """Longest wait for a handoff's answer after the last bytes for its receiver left, and for a
    broken handoff to drain."""
    tombstone_s: Positive = 4000.0
    """How long a fenced or finished lease is remembered: longer than any `Prefill` call that names
    it can be under way. About 150 bytes a handoff: 60 MB where a worker hands off 100 a second.
    """
    keepalive_s: Positive = 1.0
    """How often UCX asks whether a peer's process still runs."""
    drain_poll_s: Positive = 0.05
    """First pause between attempts to prove that the other side of a broken handoff has stopped;
    doubles up to 1 s."""

    @property
    def checksum_stride(self) -> int:
        """Return n where every n-th block carries a checksum, or 0 where none does."""
        return {"off": 0, "sampled": 16, "always": 1}[self.checksum]
