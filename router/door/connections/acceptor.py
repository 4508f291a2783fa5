"""Addresses that the doors listen on, and the connections that come there."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from baton.errors import ConfigError
from router.door.connections.sharing import Sharing

log = logging.getLogger(__name__)

BACKLOG = 2048
_AT_ONCE, _LOOKED_AT = 8, 128  # connections taken in a round of the loop; closed ones cost little
_RETRY_S = 1.0
SHUT_WITHIN_S = 0.5
_OF_TLS = {"ssl_handshake_timeout": 20.0, "ssl_shutdown_timeout": SHUT_WITHIN_S}


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port". Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{address!r} is no address: host:port is expected")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine's own, by its name or address alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_can_listen(address: str, reuse_port: bool) -> None:
    """Raises ConfigError as `listening` would."""
    listening(*split_address(address), reuse_port, begins=False).close()


def listening(host: str, port: int, reuse_port: bool, begins: bool = True) -> socket.socket:
    """Bind a socket, and listen unless `begins` is False. 0.0.0.0 means all addresses, IPv6
    included. Raises ConfigError when the port is taken or the host is not this machine's.

    `reuse_port`: other processes may listen there that allow it too.
    """
    name = host.strip("[]")
    is_any = name in ("0.0.0.0", "::") and socket.has_dualstack_ipv6()
    with ExitStack() as opened:
        try:
            where = socket.getaddrinfo("::" if is_any else name, port, type=socket.SOCK_STREAM)[0]
            made = opened.enter_context(socket.socket(*where[:3]))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reuse_port))
            if made.family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not is_any))
            made.bind(where[4])
            if begins:
                made.listen(BACKLOG)
        except OSError as error:
            shown, why = f"[{name}]" if ":" in name else name, error.strerror or error
            raise ConfigError(f"cannot listen on {shown}:{port}: {why}") from error
        opened.pop_all()
    return made


def _is_over(accepted: socket.socket) -> bool:
    """Tell whether the client has closed it already."""
    try:
        return not accepted.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


class Acceptor:
    """Own a listening socket. Take connections from it, few at once, with or without TLS."""

    def __init__(
        self, listener: socket.socket, sharing: Sharing, new_connection: Callable[[], Any]
    ) -> None:
        """`new_connection`: a protocol that is a `Guest`."""
        self._listener, self._sharing, self._new = listener, sharing, new_connection
        self.context: ssl.SSLContext | None = None
        """Of new connections; may be replaced. Those that are there keep theirs. None: plain."""
        self._arriving: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.setblocking(False)
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def stop(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for task in self._arriving:
            task.cancel()
        if self._arriving:
            await asyncio.wait(self._arriving)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        num_left, is_full = _AT_ONCE, False  # to find that out costs a look at all connections
        for _ in range(_LOOKED_AT):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # too many open files, say
                log.warning("no connection can be taken: %s", error)
                self._sharing.make_room()
                loop.remove_reader(self._listener)
                loop.call_later(_RETRY_S, self.start)
                return
            accepted.setblocking(False)
            is_full = is_full or accepted.fileno() >= self._sharing.max_file
            if is_full or _is_over(accepted):
                accepted.close()
                continue
            guest = self._new()
            if is_full := not self._sharing.admit(guest):
                accepted.close()
                continue
            task = guest.arriving = loop.create_task(self._take_in(accepted, guest))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)
            if not (num_left := num_left - 1):
                return

    async def _take_in(self, accepted: socket.socket, guest: Any) -> None:
        """A client that is refused may be sending still. If its socket were closed at once, it
        would hear of a reset only."""
        limits: Any = {} if self.context is None else _OF_TLS
        loop, spare = asyncio.get_running_loop(), accepted
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            spare = accepted.dup()
            await loop.connect_accepted_socket(lambda: guest, accepted, ssl=self.context, **limits)
        except BaseException as error:
            guest.connection_lost(ConnectionAbortedError())  # nobody else says so
            if not isinstance(error, OSError):
                raise
            log.info("a client's connection or its TLS handshake failed: %s", error)
            with suppress(OSError):
                spare.shutdown(socket.SHUT_WR)
                await asyncio.sleep(SHUT_WITHIN_S)
                while spare.recv(1 << 16):
                    continue
        finally:
            spare.close()
