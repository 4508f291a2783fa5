"""Certificates of the roles, for mutual TLS.

A folder holds `ca.crt`, `tls.crt` and `tls.key`, as cert-manager writes them. Certificates are of
one authority, and name a role as a URI among their alternative names: `baton:router`, say. gRPC's
clients check DNS names alone, so the operator's, which control services show, has one more:
`baton-operator`. Files that have changed are read again for the next connection.
"""

from __future__ import annotations

import ssl
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from baton.errors import ConfigError
from baton.identity.keys import ROLES, Role
from baton.reread import Reread

_FILES = ("ca.crt", "tls.crt", "tls.key")
_OPERATOR = (("grpc.ssl_target_name_override", "baton-operator"),)


@dataclass(frozen=True)
class Held:
    """What the certificate files hold."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    authority: bytes
    pair: tuple[bytes, bytes]
    """The key, and its certificate."""


class Certificates:
    """Own a role's certificate and key. Any thread may use it."""

    def __init__(self, folder: Path, role: Role) -> None:
        """Read the files. Raises ConfigError when they are not a certificate, its key and its
        authority."""
        files = [folder / name for name in _FILES]
        self._reread = Reread(lambda: files, lambda: _read(folder, role))

    @property
    def now(self) -> Held:
        """Return what the files hold now. Where they cannot be read, what they held, and the log
        says so."""
        return self._reread.now

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a port that only holders of a certificate may use."""

        def fetch() -> grpc.ServerCertificateConfiguration:
            held = self.now
            return grpc.ssl_server_certificate_configuration([held.pair], held.authority)

        return grpc.dynamic_ssl_server_credentials(fetch(), fetch, True)

    def channel(self, module: Any, address: str, options: Iterable[Any]) -> Any:
        """Open a channel to a control service, of `grpc` or `grpc.aio`, with today's
        certificate."""
        held = self.now
        credentials = grpc.ssl_channel_credentials(held.authority, *held.pair)
        return module.secure_channel(address, credentials, options=(*options, *_OPERATOR))


def roles_in(uris: Collection[str]) -> list[Role]:
    """Return the roles that a certificate's alternative names give."""
    return [role for role in ROLES if f"baton:{role}" in uris]


def roles_of(transport: Any) -> list[Role]:
    """Return the roles of a TLS connection's other side."""
    names = (transport.get_extra_info("peercert") or {}).get("subjectAltName", ())
    return roles_in([value for kind, value in names if kind == "URI"])


def _read(folder: Path, role: Role) -> Held:
    authority, certificate, key = (folder / name for name in _FILES)
    try:
        contexts = []
        for purpose in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(purpose)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # workers have addresses that no certificate names
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(certificate, key, password="")
            context.load_verify_locations(authority)
            contexts.append(context)
        server, client = contexts
        pair = (key.read_bytes(), certificate.read_bytes())
        return Held(server, client, authority.read_bytes(), pair)
    except OSError as error:  # an SSLError is one
        raise ConfigError(
            f"internal.folder: {folder} holds no {', '.join(_FILES)} of role {role} in PEM that"
            f" fit together: {error.strerror or error}",
            field="internal.folder",
        ) from error
