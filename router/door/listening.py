"""Addresses that the doors listen on."""

from __future__ import annotations

import ipaddress
import socket

from baton.errors import ConfigError

BACKLOG = 2048


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port". Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{address!r} is no address: host:port is expected")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether it is this machine's own, by its name or address alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_can_listen(address: str, reuse_port: bool) -> None:
    """Raises ConfigError when the port is taken or the host is not this machine's.

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


def cannot_listen(address: str, error: OSError) -> ConfigError:
    why = (error.strerror or str(error)).partition(" (while")[0]
    return ConfigError(f"cannot listen on {address}: {why}")


def listening(host: str, port: int, reuse_port: bool) -> socket.socket:
    """0.0.0.0 means all addresses, IPv6 included. Raises ConfigError when the port is taken or the
    host is not this machine's.

    `reuse_port`: other processes may listen there that allow it too.
    """
    try:
        return _listening(host.strip("[]"), port, reuse_port)
    except OSError as error:
        raise cannot_listen(f"{host}:{port}", error) from error


def _listening(host: str, port: int, reuse_port: bool) -> socket.socket:
    is_any = host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6()
    if is_any:
        return socket.create_server(
            ("::", port),
            family=socket.AF_INET6,
            backlog=BACKLOG,
            reuse_port=reuse_port,
            dualstack_ipv6=True,
        )
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=reuse_port)
