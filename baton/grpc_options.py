"""gRPC settings that both ends of a connection between Baton's processes must agree on."""

from __future__ import annotations

Options = tuple[tuple[str, int], ...]

WORKER_MESSAGE_BYTES = 32 << 20
"""Largest message that a worker accepts. A larger one ends its session and all requests on it."""

DIRECT: Options = (("grpc.enable_http_proxy", 0),)
"""Options of a channel that ignores the environment's http_proxy, as all of Baton's own do."""


def sends_pings(keepalive_s: float, when_idle: bool = True) -> Options:
    """Count a peer as lost when it answers no ping for twice `keepalive_s`. `when_idle`: also while
    no call runs.

    The peer must set `accepts_pings`. Without `ping_timeout_ms` gRPC waits a minute for an answer,
    and ignores the keepalive timeout.
    """
    keepalive_ms = int(keepalive_s * 1e3)
    return (
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.http2.ping_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", int(when_idle)),
        ("grpc.http2.max_pings_without_data", 0),
    )


def accepts_pings(min_interval_s: float = 0.1) -> Options:
    """Return a server's options: pings may come this often, and a peer that exceeds it is not cut
    off."""
    return (
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(min_interval_s * 1e3)),
        ("grpc.http2.max_ping_strikes", 0),
    )
