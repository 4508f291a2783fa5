"""Whose call is it: bearer tokens, each of one tenant."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import yaml

from baton.config import settings
from baton.config.router import AuthConfig
from baton.errors import ConfigError, UnauthenticatedError
from router.rereading import Reread

Metadata = Iterable[tuple[str, str | bytes]]

_HEADER = "authorization"
_SCHEME = "bearer "
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750
_MAX_TENANT_CHARS = 128


class Callers:
    """Own the tenants' tokens. `look` reads changed files again."""

    def __init__(self, config: AuthConfig) -> None:
        """Raises ConfigError when the tokens cannot be read."""
        path = Path(config.tokens)
        # Tokens are looked up by a digest under a key that nobody knows: how long that takes says
        # nothing of how much of a guess is right.
        self._key = os.urandom(32)
        self._tenants = Reread(partial(_files, path), partial(self._by_digest, path))
        self.look = self._tenants.look

    def tenant_of(self, metadata: Metadata) -> str:
        """Raises UnauthenticatedError where a call's metadata hold no token that is known."""
        token = _bearer_token(metadata)
        if token is None:
            raise UnauthenticatedError(
                "this router wants a bearer token: the metadata `authorization: Bearer TOKEN`"
            )
        tenant = self._tenants.value.get(self._digest(token))
        if tenant is None:
            raise UnauthenticatedError("the bearer token is none that this router knows")
        return tenant

    def _digest(self, token: str) -> bytes:
        return hashlib.blake2b(token.encode(), key=self._key, digest_size=32).digest()

    def _by_digest(self, path: Path) -> Mapping[bytes, str]:
        tenants: dict[bytes, str] = {}
        for tenant, token in read_tokens(path):
            other = tenants.setdefault(self._digest(token), tenant)
            if other != tenant:
                raise _wrong(f"{path}: {other} and {tenant} have the same token")
        return tenants


def read_tokens(path: Path) -> list[tuple[str, str]]:
    """(tenant, token), one for each token. Raises ConfigError, which never quotes a token."""
    pairs = []
    for tenant, text in _texts(path):
        if not 0 < len(tenant) <= _MAX_TENANT_CHARS:
            raise _wrong(f"{path}: a tenant's name has 1 to {_MAX_TENANT_CHARS} characters")
        tokens = text.split()
        if not tokens:
            raise _wrong(f"{path}: {tenant} has no token")
        if not all(_TOKEN.fullmatch(token) for token in tokens):
            raise _wrong(
                f"{path}: {tenant}: a token is made of letters, digits and -._~+/, and = at its end"
            )
        pairs += [(tenant, token) for token in tokens]
    return pairs


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """Each tenant with its tokens."""
    try:
        if path.is_dir():
            for file in _files(path):
                yield file.name, file.read_text(encoding="ascii")
            return
        value = settings.load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(f"{error.filename or path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _wrong(f"{path}: what is in it is no text") from error
    except settings.RepeatedKeyError as error:
        raise _wrong(f"{path}: {error.key} stands there twice") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # its words may quote a token
        raise _wrong(f"{path}: not valid YAML") from error
    if not isinstance(value, Mapping):
        raise _wrong(f"{path}: a mapping from tenants to tokens is expected")
    for tenant, text in value.items():
        if not isinstance(tenant, str) or not isinstance(text, str):
            raise _wrong(f"{path}: tenants and tokens are texts: put them into quotes")
        yield tenant, text


def _files(path: Path) -> list[Path]:
    """The tenants' files. Names with a leading dot are Kubernetes' own, for swapping a mounted
    Secret."""
    try:
        return sorted(file for file in path.iterdir() if not file.name.startswith("."))
    except OSError:  # a file, or nothing
        return [path]


def _bearer_token(metadata: Metadata) -> str | None:
    for name, value in metadata:
        if name == _HEADER and isinstance(value, str) and value[:7].lower() == _SCHEME:
            return value[7:].strip()
    return None


def _wrong(problem: str) -> ConfigError:
    return ConfigError(f"router.auth.tokens: {problem}", field="router.auth.tokens")
