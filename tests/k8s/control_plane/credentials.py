"""What the servers and their callers prove themselves with, made on the spot."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.k8s.control_plane.errors import ControlPlaneError

_DAYS = "7"
_OPENSSL_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Credentials:
    certificate: Path
    """The API server's, signed by itself: also what callers trust."""
    key: Path
    """The certificate's; signs the tokens of service accounts as well."""
    token: str
    """The administrator's."""
    tokens: Path
    """The file from which the API server knows it."""


def make_credentials(openssl: Path, folder: Path) -> Credentials:
    """Raises ControlPlaneError when openssl fails."""
    certificate, key = folder / "api-server.crt", folder / "api-server.key"
    command = (
        openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", _DAYS,
        "-subj", "/CN=baton-test-control-plane", "-keyout", key, "-out", certificate,
        "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
        "-addext", "keyUsage=critical,digitalSignature,keyEncipherment,keyCertSign",
    )  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_OPENSSL_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise ControlPlaneError(f"openssl could not make a certificate: {done.stderr.strip()}")
    token, tokens = secrets.token_hex(16), folder / "tokens.csv"
    tokens.write_text(f"{token},test-administrator,test-administrator,system:masters\n")
    tokens.chmod(0o600)
    return Credentials(certificate, key, token, tokens)


def write_kubeconfig(path: Path, cluster: Mapping[str, object], token: str) -> None:
    """`cluster`: as in a kubeconfig, address and authority."""
    path.touch(0o600)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    path.write_text(json.dumps(config, indent=1))
