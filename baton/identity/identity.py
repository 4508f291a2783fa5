"""The identity of a process, as its configuration says, and as `baton up` leaves it for others."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.config.internal import InternalConfig
from baton.errors import ConfigError
from baton.identity.certificates import Certificates
from baton.identity.keys import ROLES, Keys, Role, make_root, role_files
from baton.secret_files import write_secret

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """A process' keys or certificates. With neither, nobody asks who it is and it asks nobody."""

    role: Role
    keys: Keys | None = None
    tls: Certificates | None = None


def open_identity(config: InternalConfig, role: Role) -> Identity:
    """Open a role's identity. Raises ConfigError when its folder does not hold it."""
    if config.identity == "keys":
        return Identity(role, keys=Keys.in_folder(config.path / role, role))
    if config.identity == "tls":
        return Identity(role, tls=Certificates(config.path / role, role))
    return Identity(role)


def find_identity(role: Role, folder: str | None = None) -> Identity:
    """Open whatever a folder of identities holds, keys or certificates. Raises ConfigError."""
    held = InternalConfig(folder=folder).path / role
    kind: Literal["tls", "keys"] = "tls" if (held / "tls.crt").exists() else "keys"
    return open_identity(InternalConfig(kind, folder), role)


def make_keys(folder: Path) -> None:
    """Make a root, and the keys of every role, in a folder that only its owner may read."""
    root = make_root()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_secret(folder / "root.key", root)
    for role in ROLES:
        (folder / role).mkdir(mode=0o700, exist_ok=True)
        for name, data in role_files(root, role).items():
            write_secret(folder / role / name, data)


# --- what `baton up` leaves for the user's other commands -----------------------------------------

OFF = "off"
_HERE = ("localhost", "127.0.0.1", "0.0.0.0", "[::1]", "[::]", "::1", "::")


def _record(address: str) -> Path:
    """Return the user's file about the cluster whose control service is there."""
    host, _, port = address.rpartition(":")
    home = os.environ.get("XDG_RUNTIME_DIR") or Path.home() / ".cache"
    return Path(home) / "baton" / (port if host in _HERE else f"{host}:{port}".replace("/", "_"))


@contextlib.contextmanager
def recorded(address: str, config: InternalConfig) -> Iterator[None]:
    """Let this user's commands find the identities of the cluster at `address`, until left."""
    record, text = _record(address), OFF if config.identity == "off" else str(config.path)
    try:
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_secret(record, text.encode())
    except OSError as error:
        log.warning("other commands need --identity %s: %s", text, error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if record.read_text() == text:  # else a later cluster has the address
                record.unlink()


def operator_of(address: str, folder: str | None = None) -> Identity:
    """Find the operator's identity for the control service at `address`: that of `folder` (`off`:
    none is needed), else the one that `baton up` recorded, else that of the folder that
    BATON_IDENTITY names.

    Raises ConfigError, which says what to do.
    """
    if folder is None:
        with contextlib.suppress(OSError):
            kept = _record(address).read_text()
            if kept == OFF or Path(kept).is_dir():  # else a cluster was killed and left it
                folder = kept
    if str(InternalConfig(folder=folder).path) == OFF:
        return Identity("operator")
    try:
        return find_identity("operator", folder)
    except ConfigError as error:
        raise ConfigError(
            f"no operator's identity for the control service at {address}: {error.message}. "
            "Run this as the user of its `baton up`, or name a folder of identities by "
            "--identity or BATON_IDENTITY (`off` where the cluster has `internal.identity: off`)",
            field="identity",
        ) from error
