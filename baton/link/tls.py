"""TLS on the link, where it is configured: who may be a router, and who a worker.

A folder holds `ca.crt`, `tls.crt` and `tls.key`, as cert-manager writes them. Certificates are of
one authority, and name a role as a URI among their alternative names: `baton:router` or
`baton:worker`. So only a router may reserve, and prompts go to workers alone. Files that have
changed are read again for the next connection.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any, Literal

from baton.errors import ConfigError

log = logging.getLogger(__name__)

Role = Literal["router", "worker"]
_FILES = ("ca.crt", "tls.crt", "tls.key")


class LinkTls:
    """Own one side's certificate."""

    def __init__(self, folder: str, own: Role) -> None:
        """Raises ConfigError when the files are not a certificate, its key and its authority."""
        self._files = [Path(folder) / name for name in _FILES]
        self._own, self._peer = own, "router" if own == "worker" else "worker"
        self._stamp = self._now()
        self._context = self._read()

    @property
    def context(self) -> ssl.SSLContext:
        """As the files are now. Where they cannot be read, as they were, and the log says so."""
        stamp = self._now()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._context = self._read()
            except ConfigError as error:
                log.error("what was read before stays in force: %s", error.message)
        return self._context

    def wrong_peer(self, transport: Any) -> str:
        """Why the other side of a connection is not who it has to be; empty: it is."""
        found = transport.get_extra_info("peercert") or {}
        names = found.get("subjectAltName", ())
        wanted = f"baton:{self._peer}"
        if ("URI", wanted) in names:
            return ""
        return f"its certificate does not name {wanted}: {names}"

    def _now(self) -> tuple[Any, ...]:
        try:
            return tuple((s.st_ino, s.st_mtime_ns) for s in (file.stat() for file in self._files))
        except OSError:
            return ()

    def _read(self) -> ssl.SSLContext:
        purpose = ssl.PROTOCOL_TLS_SERVER if self._own == "worker" else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(purpose)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # workers have addresses that no certificate names
        context.verify_mode = ssl.CERT_REQUIRED
        authority, certificate, key = self._files
        try:
            context.load_cert_chain(certificate, key, password="")
            context.load_verify_locations(authority)
        except OSError as error:  # an SSLError is one
            field = "router.link_tls" if self._own == "router" else "worker.link_tls"
            raise ConfigError(
                f"{field}: {certificate.parent} holds no {', '.join(_FILES)} in PEM that fit"
                f" together: {error.strerror or error}",
                field=field,
            ) from error
        return context
