"""The router's certificate, and the one that clients must show."""

from __future__ import annotations

import ssl
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from baton.config.router import TlsConfig
from baton.errors import ConfigError
from router.rereading import Reread


class ServerTls:
    """Own the certificate; `look` reads its files again when they have changed. Connections that
    are there keep theirs."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises ConfigError when the files hold no certificate and its key."""
        self._asks_clients = config.client_ca_file is not None
        named = (config.certificate_file, config.key_file, config.client_ca_file)
        files = [Path(name) for name in named if name is not None]
        self._certificates = Reread(lambda: files, partial(read_certificates, config))
        self._shown = self._certificates.value
        self.look = self._certificates.look

    def credentials(self) -> grpc.ServerCredentials:
        newer: Any = self._newer  # its type in the stubs leaves None out, which gRPC allows
        return grpc.dynamic_ssl_server_credentials(self._shown, newer, self._asks_clients)

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """None: as before. gRPC asks on a thread of its own, before every handshake."""
        value = self._certificates.value
        if value is self._shown:
            return None
        self._shown = value
        return value


def read_certificates(config: TlsConfig) -> grpc.ServerCertificateConfiguration:
    """Check the files, since gRPC would only say that it failed. Raises ConfigError."""
    certificate = _read(config.certificate_file, "tls.certificate_file")
    key = _read(config.key_file, "tls.key_file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:  # with a password, or OpenSSL would ask for one at the terminal
        context.load_cert_chain(config.certificate_file, config.key_file, password="")
    except OSError as error:  # an SSLError is one; so is that of a file that is replaced just now
        raise ConfigError(
            f"router.tls: {config.certificate_file} and {config.key_file} are not a certificate "
            f"and its key, both PEM and without a password: {_why(error)}",
            field="router.tls",
        ) from error
    if config.client_ca_file is None:
        return grpc.ssl_server_certificate_configuration([(key, certificate)])
    client_ca = _read(config.client_ca_file, "tls.client_ca_file")
    try:
        context.load_verify_locations(config.client_ca_file)
    except OSError as error:
        raise ConfigError(
            f"router.tls.client_ca_file: {config.client_ca_file} holds no certificates in PEM: "
            f"{_why(error)}",
            field="router.tls.client_ca_file",
        ) from error
    return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)


def _why(error: OSError) -> str:
    return str((error.reason if isinstance(error, ssl.SSLError) else error.strerror) or error)


def _read(path: str, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"router.{field}: {path} cannot be read: {error.strerror}", field=f"router.{field}"
        ) from error
