"""HTTP to one API server: where it is, how we prove who we are, and calls with deadlines.

The official client does here what has to follow kubectl: reading a kubeconfig or a service account,
renewing tokens, TLS, proxies. The requests themselves go straight to its urllib3 pool, because:

- its REST layer leaves urllib3's retries on (three, silently, for a PUT, DELETE or GET), so a call
  takes up to four times the timeout that it was given, and a retried DELETE reports 404;
- its `Watch` goes on by itself with what it believes to be the last resourceVersion, swallows the
  first 410, gives no bookmarks and has no deadline of its own: a connection that was cut silently
  hangs for ever (kubernetes-client/python#1402, #2527). `kubernetes.informer` is built on it.
- its typed API has no server-side apply of a custom resource's dict, and turns every answer into
  model objects that know one release of Kubernetes.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
from kubernetes import config as kubernetes_config
from kubernetes.client import Configuration, rest
from urllib3.exceptions import ConnectTimeoutError, HTTPError, ReadTimeoutError

from deploy.controller.kit.errors import NotConfiguredError, UnreachableError, status_error

_NUM_POOLED_CONNECTIONS = 32
_LONGEST_QUOTE = 300
"""Characters of an answer that is none of an API server's."""


@dataclass(frozen=True)
class Timeouts:
    """How long a call may take to connect, and to the next piece of its answer, the first
    included."""

    connect_s: float = 5.0
    read_s: float = 10.0


USUAL = Timeouts()


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    """JSON; None: no body."""
    content_type: str = "application/json"

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class Connection:
    """Own the sockets to one API server. Threads share it."""

    def __init__(self, configuration: Configuration) -> None:
        configuration.connection_pool_maxsize = _NUM_POOLED_CONNECTIONS
        self._configuration = configuration
        self._token_lock = threading.Lock()
        self._pool = self._new_pool()

    @classmethod
    def from_kubeconfig(cls, path: Path | None = None) -> Connection:
        """Connect by a kubeconfig; None: by kubectl's own. Raises NotConfiguredError."""
        file = None if path is None else str(path)
        load = partial(kubernetes_config.load_kube_config, file, persist_config=False)
        return cls(_loaded(f"kubeconfig {path or ''}", load))

    @classmethod
    def in_cluster(cls) -> Connection:
        """Connect by the service account of the pod that we are in. Raises NotConfiguredError."""
        return cls(_loaded("service account", kubernetes_config.load_incluster_config))

    def answer(self, call: Call, timeouts: Timeouts) -> dict[str, Any]:
        """Return the JSON object of a call's answer. Raises StatusError and UnreachableError."""
        body = self._send(call, timeouts, streamed=False).data
        answer = _object_in(body)
        if answer is None:
            raise UnreachableError(f"{call}: no API server's answer: {body[:_LONGEST_QUOTE]!r}")
        return answer

    def stream(self, call: Call, timeouts: Timeouts) -> urllib3.BaseHTTPResponse:
        """Return a call's answer, whose body the caller reads as it comes, and closes."""
        return self._send(call, timeouts, streamed=True)

    def _send(self, call: Call, timeouts: Timeouts, *, streamed: bool) -> urllib3.BaseHTTPResponse:
        url = self._configuration.host + call.path
        if call.query:
            url += "?" + urlencode(call.query)
        try:
            response = self._pool.request(
                call.method,
                url,
                body=None if call.body is None else json.dumps(call.body).encode(),
                headers=self._headers(call),
                timeout=urllib3.Timeout(connect=timeouts.connect_s, read=timeouts.read_s),
                retries=False,
                redirect=False,
                preload_content=not streamed,
            )
            if not 200 <= response.status < 300:
                raise status_error(_status_of(response, response.data), str(call))
        except HTTPError as error:
            raise self.unreachable(call, error) from error
        return response

    def unreachable(self, call: Call, error: HTTPError) -> UnreachableError:
        """Make the error of a call that broke."""
        if isinstance(error, ConnectTimeoutError | ReadTimeoutError):
            # The pool's idle connections may be silent, too. Calls under way end on the old pool,
            # which closes its connections once nobody uses it.
            self._pool = self._new_pool()
        return UnreachableError(f"{call}: {type(error).__name__}: {error}")

    def _headers(self, call: Call) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": "baton-controller"}
        if call.body is not None:
            headers["Content-Type"] = call.content_type
        with self._token_lock:
            try:
                auth = self._configuration.auth_settings()
            except (kubernetes_config.ConfigException, OSError) as error:
                raise NotConfiguredError(f"token: {error}") from error
        if "BearerToken" in auth and (token := auth["BearerToken"]["value"]):
            headers["Authorization"] = token
        return headers

    def _new_pool(self) -> urllib3.PoolManager:
        pool: urllib3.PoolManager = rest.RESTClientObject(self._configuration).pool_manager
        return pool


def _loaded(what: str, load: Callable[..., None]) -> Configuration:
    configuration = Configuration()
    try:
        load(client_configuration=configuration)
    except (kubernetes_config.ConfigException, OSError) as error:
        raise NotConfiguredError(f"{what}: {str(error).rstrip('.')}") from error
    return configuration


def _object_in(body: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(body)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _status_of(response: urllib3.BaseHTTPResponse, body: bytes) -> dict[str, Any]:
    """Return an answer's Status, made up where a proxy answers, or a server too busy to write
    one."""
    status = _object_in(body)
    if status is None or status.get("kind") != "Status":
        status = {"message": body[:_LONGEST_QUOTE].decode(errors="replace").strip()}
    retry_after = response.headers.get("Retry-After", "")
    details = dict(status.get("details") or {})
    if retry_after.isdecimal():
        details["retryAfterSeconds"] = int(retry_after)
    return {**status, "code": response.status, "details": details}


def command_connection(kubeconfig: Path | None) -> Connection:
    """Connect by a kubeconfig, or by the account of the pod that we are in. Without either the
    process ends with a hint."""
    try:
        return Connection.from_kubeconfig(kubeconfig) if kubeconfig else Connection.in_cluster()
    except NotConfiguredError as error:
        hint = "" if kubeconfig else "; outside of a pod name a file by --kubeconfig"
        sys.exit(f"{error}{hint}")
