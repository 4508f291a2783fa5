"""Who reaches the router, and how: TLS and bearer tokens, read again when their files change."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from baton.config import settings
from baton.config.router import RouterConfig, TenantLimits, TlsConfig
from baton.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from baton.reread import Reread
from baton.secret_files import open_to_others
from baton.v1 import router_pb2

log = logging.getLogger(__name__)


_LOOK_S = 1.0
_TLS_FILES = ("certificate_file", "key_file", "client_ca_file")


@dataclass(frozen=True)
class Contexts:
    """TLS contexts for new connections of each door."""

    of_grpc: ssl.SSLContext
    of_http: ssl.SSLContext


def read_certificates(config: TlsConfig) -> Contexts:
    """Raises ConfigError where the files hold no certificate and its key."""
    for name in _TLS_FILES:
        path = getattr(config, name)
        try:
            if path is not None:
                Path(path).read_bytes()
        except OSError as error:
            raise _wrong(f"{path} cannot be read: {error.strerror}", f"tls.{name}") from error
    return Contexts(_context(config, "h2"), _context(config, "http/1.1"))


def _context(config: TlsConfig, protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:  # with a password, or OpenSSL would ask for one at the terminal
        context.load_cert_chain(config.certificate_file, config.key_file, password="")
    except OSError as error:  # an SSLError is one; so is that of a file that is replaced just now
        problem = "are not a certificate and its key, both PEM and without a password"
        files = f"{config.certificate_file} and {config.key_file}"
        raise _wrong(f"{files} {problem}: {_why(error)}", "tls") from error
    context.set_alpn_protocols([protocol])
    if config.client_ca_file is None:
        return context
    try:
        context.load_verify_locations(config.client_ca_file)
    except OSError as error:
        problem = f"{config.client_ca_file} holds no certificates in PEM: {_why(error)}"
        raise _wrong(problem, "tls.client_ca_file") from error
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _why(error: OSError) -> str:
    return str((error.reason if isinstance(error, ssl.SSLError) else error.strerror) or error)


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

    def tenant_of(self, authorization: str, named: str = _IN_METADATA) -> str:
        """Return the tenant of "Bearer TOKEN". Raises UnauthenticatedError where there is no token,
        or none that is known; `named`: what the caller should have sent."""
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise UnauthenticatedError(f"this router wants a bearer token: {named}")
        token = authorization[len(_SCHEME) :].strip()
        tenant = self._known.value[0].get(self._digest(token))
        if tenant is None:
            raise UnauthenticatedError("this router does not know the bearer token")
        return tenant

    def limits_of(self, tenant: str) -> TenantLimits:
        return self._known.value[1].get(tenant, self._limits)

    def is_operator(self, tenant: str | None) -> bool:
        return tenant in self._operators

    def check_operator(self, authorization: str) -> None:
        """Raises UnauthenticatedError, PermissionDeniedError."""
        if not self.is_operator(tenant := self.tenant_of(authorization)):
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
    """Yield each tenant, its tokens and its limits, `limits` where it names none. Raises
    ConfigError, which never quotes a token."""
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
    """Yield each tenant with what a file says of it."""
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
    """Return the tenants' files. Names with a leading dot are Kubernetes' own, for swapping a
    mounted Secret."""
    try:
        return sorted(file for file in path.iterdir() if not file.name.startswith("."))
    except OSError:  # a file, or nothing
        return [path]


def _wrong(problem: str, field: str = "auth.tokens") -> ConfigError:
    return ConfigError(f"router.{field}: {problem}", field=f"router.{field}")


def confine(message: Any, tenant: str | None) -> None:
    """Fill in the caller's tenant where the message has one. Raises PermissionDeniedError if it
    names another."""
    is_wrapped = isinstance(message, router_pb2.ExplainRouteRequest)
    asked, field = (message.request, "request.tenant") if is_wrapped else (message, "tenant")
    if tenant is None or "tenant" not in asked.DESCRIPTOR.fields_by_name:
        return
    if asked.tenant not in ("", tenant):
        raise PermissionDeniedError(f"{field}: the token is another tenant's", field=field)
    asked.tenant = tenant


class Credentials:
    """Own certificate and tokens; `follow` keeps them up to date."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises ConfigError when their files cannot be read."""
        self._certificates: Reread[Contexts] | None = None
        if (tls := config.tls) is not None:
            named = (getattr(tls, name) for name in _TLS_FILES)
            files = [Path(name) for name in named if name is not None]
            self._certificates = Reread(lambda: files, partial(read_certificates, tls))
        self.callers = None if config.auth is None else Callers(config)
        for warning in open_to_others(config.secret_files):
            log.warning(warning)

    @property
    def contexts(self) -> Contexts | None:
        """Return the newest certificate's contexts; None: plain text. Connections that are there
        keep theirs."""
        return None if self._certificates is None else self._certificates.value

    def look(self) -> None:
        """Read again what has changed."""
        for part in (self._certificates, self.callers):
            if part is not None:
                part.look()

    async def follow(self, on_contexts: Callable[[Contexts], None]) -> None:
        """Look again and again. `on_contexts` gets the contexts of a new certificate."""
        shown = self.contexts
        while True:
            await asyncio.sleep(_LOOK_S)
            await asyncio.to_thread(self.look)
            if self.contexts is not None and self.contexts is not shown:
                shown = self.contexts
                on_contexts(shown)
