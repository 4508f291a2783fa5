"""A router behind TLS and tokens, and what its files are made from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.client import AsyncClient
from baton.client.credentials import Tls
from baton.config.router import AuthConfig, TlsConfig
from tests.certificates import Authority
from tests.router.deployment import Deployment

RED, BLUE = "red-token-1", "blue-token-1"


@dataclass
class Site:
    """A router behind TLS and tokens, and what its files are made from."""

    d: Deployment
    authority: Authority
    tokens: Path

    @property
    def address(self) -> str:
        return self.d.servers[0].address

    @property
    def tls(self) -> Tls:
        return Tls(ca_file=str(self.authority.ca))

    def client(self, token: str | None = RED, tls: Tls | None = None) -> AsyncClient:
        return AsyncClient(self.address, tls=tls or self.tls, token=token)


def secured(folder: Path, authority: Authority, **tls: str) -> dict[str, Any]:
    """A router's settings, with tokens of two tenants."""
    tokens = folder / "tokens"
    tokens.mkdir()
    (tokens / "red").write_text(f"{RED}\n")
    (tokens / "blue").write_text(BLUE)
    (tokens / "..data").mkdir()  # as Kubernetes has in a mounted Secret
    made = authority.issue("router")
    return {
        "tls": TlsConfig(str(made.certificate), str(made.key), **tls),
        "auth": AuthConfig(str(tokens)),
    }
