"""Addresses to listen on. An error here says what is wrong with one; gRPC's would not."""

from __future__ import annotations

import socket

from baton.errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port". Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{address!r} is no address: host:port is expected")
    return host.strip("[]"), int(port)


def check_can_listen(address: str, reuse_port: bool) -> None:
    """Raises ConfigError when the port is taken, or the host is not this machine's.

    `reuse_port`: other processes may listen there that allow it too.
    """
    host, port = split_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reuse_port))
            probe.bind(target)
    except OSError as error:
        raise cannot_listen(address, error) from error


def cannot_listen(address: str, error: Exception) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"cannot listen on {address}: {why}")
