"""Who reaches the router, and how: TLS and bearer tokens, read again when their files change."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.message import Message

from baton.config import settings
from baton.config.router import RouterConfig, TenantLimits, TlsConfig
from baton.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from baton.reread import Reread
from baton.secret_files import open_to_others
from baton.v1 import router_pb2

log = logging.getLogger(__name__)


class ServerTls:
    """Own the certificate; `look` reads its files again when they have changed. Connections that
    are there keep theirs."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises ConfigError when the files hold no certificate and its key."""
        named = (config.certificate_file, config.key_file, config.client_ca_file)
        files = [Path(name) for name in named if name is not None]
        self._certificates = Reread(lambda: files, partial(read_certificates, config))
        self.look = self._certificates.look

    @property
    def contexts(self) -> Contexts:
        """Others once the files have changed."""
        return self._certificates.value


@dataclass(frozen=True)
class Contexts:
    """Of either door's connections."""

    of_grpc: ssl.SSLContext
    of_http: ssl.SSLContext


def read_certificates(config: TlsConfig) -> Contexts:
    """Raises ConfigError where the files hold no certificate and its key."""
    return Contexts(_context(config, "h2"), _context(config, "http/1.1"))


def _context(config: TlsConfig, protocol: str) -> ssl.SSLContext:
    _check_readable(config.certificate_file, "tls.certificate_file")
    _check_readable(config.key_file, "tls.key_file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:  # with a password, or OpenSSL would ask for one at the terminal
        context.load_cert_chain(config.certificate_file, config.key_file, password="")
    except OSError as error:  # an SSLError is one; so is that of a file that is replaced just now
        raise ConfigError(
            f"router.tls: {config.certificate_file} and {config.key_file} are not a certificate "
            f"and its key, both PEM and without a password: {_why(error)}",
            field="router.tls",
        ) from error
    context.set_alpn_protocols([protocol])
    if config.client_ca_file is None:
        return context
    _check_readable(config.client_ca_file, "tls.client_ca_file")
    try:
        context.load_verify_locations(config.client_ca_file)
    except OSError as error:
        raise ConfigError(
            f"router.tls.client_ca_file: {config.client_ca_file} holds no certificates in PEM: "
            f"{_why(error)}",
            field="router.tls.client_ca_file",
        ) from error
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _why(error: OSError) -> str:
    return str((error.reason if isinstance(error, ssl.SSLError) else error.strerror) or error)


def _check_readable(path: str, field: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"router.{field}: {path} cannot be read: {error.strerror}", field=f"router.{field}"
        ) from error


Metadata = Iterable[tuple[str, str | bytes]]

_HEADER = "authorization"
_SCHEME = "bearer "
_IN_METADATA = "the metadata `authorization: Bearer TOKEN`"
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750
_MAX_TENANT_CHARS = 128


class Callers:
    """Own the tenants' tokens and limits. `look` reads changed files again."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises ConfigError when the tokens cannot be read."""
        assert config.auth is not None
        path, self._limits = Path(config.auth.tokens), config.limits
        self._operators = config.auth.operators
        # Tokens are looked up by a digest under a key that nobody knows: how long that takes says
        # nothing of how much of a guess is right.
        self._key = os.urandom(32)
        self._known = Reread(partial(_files, path), partial(self._read, path))
        self.look = self._known.look

    def tenant_of(self, metadata: Metadata, named: str = _IN_METADATA) -> str:
        """Raises UnauthenticatedError where a call's metadata hold no token that is known. `named`:
        what its caller should send."""
        token = _bearer_token(metadata)
        if token is None:
            raise UnauthenticatedError(f"this router wants a bearer token: {named}")
        tenant = self._known.value[0].get(self._digest(token))
        if tenant is None:
            raise UnauthenticatedError("the bearer token is none that this router knows")
        return tenant

    def limits_of(self, tenant: str) -> TenantLimits:
        return self._known.value[1].get(tenant, self._limits)

    def is_operator(self, tenant: str | None) -> bool:
        return tenant in self._operators

    def check_operator(self, metadata: Metadata) -> None:
        """Raises UnauthenticatedError, PermissionDeniedError."""
        if not self.is_operator(tenant := self.tenant_of(metadata)):
            raise PermissionDeniedError(f"{tenant} is not among router.auth.operators")

    def _digest(self, token: str) -> bytes:
        return hashlib.blake2b(token.encode(), key=self._key, digest_size=32).digest()

    def _read(self, path: Path) -> tuple[Mapping[bytes, str], Mapping[str, TenantLimits]]:
        tenants: dict[bytes, str] = {}
        limits: dict[str, TenantLimits] = {}
        for tenant, tokens, limits[tenant] in read_tenants(path, self._limits):
            for token in tokens:
                other = tenants.setdefault(self._digest(token), tenant)
                if other != tenant:
                    raise _wrong(f"{path}: {other} and {tenant} have the same token")
        return tenants, limits


def read_tenants(path: Path, limits: TenantLimits) -> Iterator[tuple[str, list[str], TenantLimits]]:
    """Each tenant, its tokens and its limits, `limits` where it names none. Raises ConfigError,
    which never quotes a token."""
    for tenant, said in _entries(path):
        if not 0 < len(tenant) <= _MAX_TENANT_CHARS:
            raise _wrong(f"{path}: a tenant's name has 1 to {_MAX_TENANT_CHARS} characters")
        given = dict(said) if isinstance(said, Mapping) else {"tokens": said}
        listed = given.pop("tokens", "")
        texts = listed if isinstance(listed, list) else [listed]
        if not all(isinstance(text, str) for text in texts):
            raise _wrong(f"{path}: tenants and tokens are texts: put them into quotes")
        tokens = " ".join(texts).split()
        if not tokens:
            raise _wrong(f"{path}: {tenant} has no token")
        if not all(_TOKEN.fullmatch(token) for token in tokens):
            raise _wrong(
                f"{path}: {tenant}: a token is made of letters, digits and -._~+/, and = at its end"
            )
        merged, source = settings.merge(settings.dump(limits), given), f"router.auth.tokens: {path}"
        yield tenant, tokens, settings.parse(TenantLimits, merged, source=source, key=tenant)


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Each tenant with what a file says of it."""
    try:
        for file in _files(path):
            if file != path and file.suffix != ".yaml":
                yield file.name, file.read_text(encoding="ascii")
                continue
            value = settings.load_yaml(file.read_text(encoding="utf-8"))
            if not isinstance(value, Mapping):
                raise _wrong(f"{file}: a mapping from tenants to tokens is expected")
            if not all(isinstance(tenant, str) for tenant in value):
                raise _wrong(f"{file}: tenants and tokens are texts: put them into quotes")
            yield from value.items()
    except OSError as error:
        raise _wrong(f"{error.filename or path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _wrong(f"{path}: not a text file") from error
    except settings.RepeatedKeyError as error:
        raise _wrong(f"{path}: key {error.key} is given twice") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # its words may quote a token
        raise _wrong(f"{path}: not valid YAML") from error


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


def confine(message: Message, tenant: str | None) -> None:
    """Fill in the caller's tenant. Raises PermissionDeniedError if the message names another
    one."""
    if tenant is None:
        return
    match message:
        case (
            router_pb2.GenerateRequest() | router_pb2.AbortRequest() | router_pb2.TokenizeRequest()
        ):
            asked, field = message, "tenant"
        case router_pb2.ExplainRouteRequest():
            asked, field = message.request, "request.tenant"
        case _:
            return
    if asked.tenant not in ("", tenant):
        raise PermissionDeniedError(f"{field}: the token is another tenant's", field=field)
    asked.tenant = tenant


_LOOK_S = 1.0


class Credentials:
    """Own certificate and tokens; `follow` keeps them up to date."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises ConfigError when their files cannot be read."""
        self._tls = None if config.tls is None else ServerTls(config.tls)
        self.callers = None if config.auth is None else Callers(config)
        for warning in open_to_others(config.secret_files):
            log.warning(warning)

    @property
    def contexts(self) -> Contexts | None:
        """None: plain text."""
        return None if self._tls is None else self._tls.contexts

    async def follow(self, on_contexts: Callable[[Contexts], Awaitable[None]]) -> None:
        """Read what has changed, again and again. `on_contexts` gets a new certificate's."""
        shown = self.contexts
        looks = [part.look for part in (self._tls, self.callers) if part is not None]
        while True:
            await asyncio.sleep(_LOOK_S)
            for look in looks:
                await asyncio.to_thread(look)
            if self.contexts is not None and self.contexts is not shown:
                shown = self.contexts
                await on_contexts(shown)
