"""The transfer layer's settings. Standard library only: they are read where libucp is missing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransferConfig:
    """How KV moves and how long either side waits for the other."""

    transport: str = "ucx"
    """ucx, or memory: workers inside one interpreter."""
    ucx_library: str = "wheel"
    """wheel (libucx-cu12), system (the linker's libucp.so.0), or the path of a libucp."""
    checksum: str = "off"
    """off, sampled (every 16th block) or always."""
    renew_within_s: float = 10.0
    """A lease is fenced when its writer is silent for this long."""
    ack_timeout_s: float = 10.0
    """Longest wait for a handoff's answer after the last bytes for its receiver left, and for a
    broken handoff to drain."""
    tombstone_s: float = 4000.0
    """How long a fenced or finished lease is remembered: longer than any `Prefill` call that names
    it can be under way. About 150 bytes a handoff: 60 MB where a worker hands off 100 a second.
    """
    keepalive_s: float = 1.0
    """How often UCX asks whether a peer's process still runs."""
    drain_poll_s: float = 0.05
    """First pause between attempts to prove that a fenced writer has stopped; doubles up to 1 s."""
    native: bool = True
    """Post batches from compiled code; False, or no compiler: from Python."""

    def __post_init__(self) -> None:
        if self.transport not in ("ucx", "memory"):
            raise ValueError(f"transport must be ucx or memory, not {self.transport!r}")
        if self.checksum not in ("off", "sampled", "always"):
            raise ValueError(f"checksum must be off, sampled or always, not {self.checksum!r}")
        for name in (
            "renew_within_s",
            "ack_timeout_s",
            "tombstone_s",
            "keepalive_s",
            "drain_poll_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)!r}")
        if not self.renew_within_s >= 0.001:  # a lease carries it in whole milliseconds
            raise ValueError(f"renew_within_s must be at least 0.001, not {self.renew_within_s!r}")

    @property
    def checksum_stride(self) -> int:
        """Every n-th block carries a checksum; 0: none does."""
        return {"off": 0, "sampled": 16, "always": 1}[self.checksum]
