"""gRPC settings that both ends of a connection between Baton's processes must agree on."""

from __future__ import annotations

Options = tuple[tuple[str, int], ...]

WORKER_MESSAGE_BYTES = 32 << 20
"""That a worker takes at most: a larger one ends the session it comes on, for all that is on it."""

DIRECT: Options = (("grpc.enable_http_proxy", 0),)
"""For a channel: the environment's http_proxy is not for Baton's own connections."""


def sends_pings(keepalive_s: float, when_idle: bool = True) -> Options:
    """A peer that answers no ping for twice `keepalive_s` is lost; `when_idle`: also while it is
    asked nothing.

    The peer has to `accept_pings`. Without `ping_timeout_ms` an unanswered ping is given a minute,
    whatever the keepalive timeout.
    """
    keepalive_ms = int(keepalive_s * 1e3)
    return (
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.http2.ping_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", int(when_idle)),
        ("grpc.http2.max_pings_without_data", 0),
    )


def accepts_pings(min_interval_s: float = 0.1, max_strikes: int = 0) -> Options:
    """For a server: pings may come this often, and a peer may break that `max_strikes` times before
    it is cut off; 0: any number of times."""
    return (
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(min_interval_s * 1e3)),
        ("grpc.http2.max_ping_strikes", max_strikes),
    )
