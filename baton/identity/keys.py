"""Ed25519 keys of the roles: derived from a root, kept in files, used to sign and to check."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from baton.errors import ConfigError
from baton.reread import Reread

Role = Literal["router", "worker", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)
KEY_FILE, PUBLIC_FILE = "role.key", "roles.pub"
SIGNATURE_BYTES = 64
_KEY_BYTES = 32


def make_root() -> bytes:
    """Draw a new cluster's secret, from which all its keys follow."""
    return secrets.token_bytes(_KEY_BYTES)


def role_files(root: bytes, role: Role, trusted: Sequence[bytes] = ()) -> dict[str, bytes]:
    """Make the files of a role's folder, by name. The roles of `trusted`, other roots, count too
    while the cluster goes over from one root to another."""
    public = [
        f"{each} {_text(_private(one, each).public_key().public_bytes_raw())}\n"
        for one in dict.fromkeys((root, *trusted))
        for each in ROLES
    ]
    private = f"{role} {_text(_private(root, role).private_bytes_raw())}\n"
    return {KEY_FILE: private.encode(), PUBLIC_FILE: "".join(public).encode()}


def _private(root: bytes, role: Role) -> Ed25519PrivateKey:
    derived = HKDF(hashes.SHA256(), _KEY_BYTES, salt=None, info=f"baton {role}".encode())
    return Ed25519PrivateKey.from_private_bytes(derived.derive(root))


def _text(key: bytes) -> str:
    return base64.b64encode(key).decode()


@dataclass(frozen=True)
class _Known:
    """What the key files hold."""

    private: Ed25519PrivateKey
    public: Mapping[str, Sequence[Ed25519PublicKey]]


class Keys:
    """Own a role's private key and everybody's public ones. Any thread may use it."""

    def __init__(self, role: Role, known: Callable[[], _Known]) -> None:
        self.role, self._known = role, known

    @classmethod
    def of_root(cls, root: bytes, role: Role) -> Keys:
        """Derive a role's keys, for the one who keeps the root."""
        known = _known(role, role_files(root, role))
        return cls(role, lambda: known)

    @classmethod
    def in_folder(cls, folder: Path, role: Role) -> Keys:
        """Use the keys that the role's folder holds at the time of use. Raises ConfigError when it
        holds none."""
        files = [folder / name for name in (KEY_FILE, PUBLIC_FILE)]
        reread = Reread(lambda: files, lambda: _read(folder, role))
        return cls(role, lambda: reread.now)

    def sign(self, purpose: str, parts: Iterable[bytes]) -> bytes:
        return self._known().private.sign(_message(purpose, parts))

    def verify(
        self, roles: Iterable[str], purpose: str, parts: Iterable[bytes], signature: bytes
    ) -> bool:
        """Tell whether one of these roles has signed these parts for this purpose."""
        public, message = self._known().public, _message(purpose, parts)
        return any(
            _is_signed(key, signature, message) for role in roles for key in public.get(role, ())
        )


def _is_signed(key: Ed25519PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


def _message(purpose: str, parts: Iterable[bytes]) -> bytes:
    """Join the parts, each with its length, so that no two lists of parts make the same bytes."""
    whole = (purpose.encode(), *parts)
    return b"".join(len(part).to_bytes(4, "big") + part for part in whole)


def _read(folder: Path, role: Role) -> _Known:
    try:
        return _known(role, {n: (folder / n).read_bytes() for n in (KEY_FILE, PUBLIC_FILE)})
    except OSError as error:
        raise _wrong(f"{error.filename} cannot be read: {error.strerror}") from error
    except (ValueError, binascii.Error) as error:  # its words may quote a key
        raise _wrong(f"{folder} holds no {KEY_FILE} of role {role} and {PUBLIC_FILE}") from error


def _known(role: Role, files: Mapping[str, bytes]) -> _Known:
    """Parse the two key files. Raises ValueError."""
    ((named, private),) = _lines(files[KEY_FILE])
    if named != role:
        raise ValueError(f"a key of role {named}")
    public: dict[str, list[Ed25519PublicKey]] = {}
    for each, key in _lines(files[PUBLIC_FILE]):
        public.setdefault(each, []).append(Ed25519PublicKey.from_public_bytes(key))
    return _Known(Ed25519PrivateKey.from_private_bytes(private), public)


def _lines(data: bytes) -> list[tuple[str, bytes]]:
    """Parse lines of a role and a key. Raises ValueError."""
    pairs = [line.split() for line in data.decode("ascii").splitlines() if line.strip()]
    return [(role, base64.b64decode(key, validate=True)) for role, key in pairs]


def _wrong(problem: str) -> ConfigError:
    return ConfigError(f"internal.folder: {problem}", field="internal.folder")
