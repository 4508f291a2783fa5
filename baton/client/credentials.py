"""How a client shows who it is, and checks whom it talks to: TLS and bearer tokens."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton.errors import ConfigError

Token = str | Callable[[], str]
"""A bearer token, or a function that returns it: called before every call, for a token that
changes."""


@dataclass(frozen=True)
class Tls:
    """TLS to the routers. Files are PEM."""

    ca_file: str | None = None
    """The authorities that may sign the routers' certificates. None: those that gRPC ships."""
    certificate_file: str | None = None
    """The client's own certificate, for routers that ask for one."""
    key_file: str | None = None
    server_name: str | None = None
    """The name in the routers' certificate, if it differs from the address."""

    def __post_init__(self) -> None:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ConfigError("a client's certificate and its key are needed together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Return gRPC's credentials. Raises ConfigError where a file cannot be read or holds
        something else."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        ca = certificate = key = None
        if self.ca_file is not None:
            ca = _read(self.ca_file)
            try:
                context.load_verify_locations(self.ca_file)
            except ssl.SSLError as error:
                raise ConfigError(f"{self.ca_file} holds no certificates in PEM") from error
        if self.certificate_file is not None and self.key_file is not None:
            certificate, key = _read(self.certificate_file), _read(self.key_file)
            try:  # with a password, or OpenSSL would ask for one at the terminal
                context.load_cert_chain(self.certificate_file, self.key_file, password="")
            except ssl.SSLError as error:
                raise ConfigError(
                    f"{self.certificate_file} and {self.key_file} are not a certificate and its "
                    "key, both PEM and without a password"
                ) from error
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def options(self) -> tuple[tuple[str, str], ...]:
        """Return the channel's options."""
        name = self.server_name
        return () if name is None else (("grpc.ssl_target_name_override", name),)


def metadata_of(token: Token | None) -> tuple[tuple[str, str], ...]:
    """Return a call's metadata with the token. Raises ConfigError for a malformed token, and does
    not quote it."""
    if token is None:
        return ()
    text = (token if isinstance(token, str) else token()).strip()
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError("the bearer token must be one word of ASCII letters, digits and signs")
    return (("authorization", f"Bearer {text}"),)


def token_in(file: str) -> Callable[[], str]:
    """Return a function that reads the first line of a file anew for each call. It raises
    ConfigError if it cannot."""

    def read() -> str:
        lines = _read(file).decode(errors="replace").split("\n")
        return lines[0]

    return read


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
