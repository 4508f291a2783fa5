"""etcd, kube-apiserver and kube-controller-manager as child processes, on loopback.

1. etcd first; the API server when etcd listens; the controllers when the API server is ready.
2. All are killed at the end; where the tests themselves are killed, the reaper ends them.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.local.process_tree import watched_over
from tests.k8s.control_plane.assets import Assets
from tests.k8s.control_plane.errors import ControlPlaneError
from tests.k8s.control_plane.process import PortTakenError, Server, free_port

_READY_TIMEOUT_S = 60.0
_PROBE_TIMEOUT_S = 5.0
_NUM_TRIES = 3
_DAYS = "7"
_OPENSSL_TIMEOUT_S = 30.0
# The minor version in which the controllers lost their unprotected port, whose number is fixed.
_WITHOUT_PORT = 24
# Go collects garbage rarely: a third of the processor's time of a start went into it.
_QUICK_START = {"GOGC": "400"}
# None of those that judge nodes, or pods by their nodes: no kubelet reports from a test's nodes.
_CONTROLLERS = (
    "clusterrole-aggregation",
    "cronjob",
    "daemonset",
    "deployment",
    "disruption",
    "endpoint",
    "endpointslice",
    "garbagecollector",
    "horizontalpodautoscaling",
    "job",
    "namespace",
    "replicaset",
    "root-ca-cert-publisher",
    "serviceaccount",
    "serviceaccount-token",
    "statefulset",
)


class Servers:
    """Own the processes of one control plane."""

    def __init__(self, assets: Assets, folder: Path, environment: dict[str, str]) -> None:
        """`environment` is added to each server's."""
        credentials = make_credentials(assets.openssl, folder)
        self._etcd_port, port = free_port(), free_port()
        self.address = f"https://127.0.0.1:{port}"
        self.kubeconfig = folder / "kubeconfig"
        authority = {"server": self.address, "certificate-authority": str(credentials.certificate)}
        write_kubeconfig(self.kubeconfig, authority, credentials.token)
        environment = {**_QUICK_START, **environment}
        self._trust = ssl.create_default_context(cafile=credentials.certificate)
        self._token = credentials.token
        self._etcd = Server(
            _etcd_command(assets.etcd, folder, self._etcd_port), folder, environment
        )
        command = _api_server_command(assets, credentials, self._etcd_port, port)
        self._api_server = Server(command, folder, environment)
        self._controllers: Server | None = None
        if (program := assets.kube_controller_manager) is not None:
            command = _controllers_command(program, credentials, self.kubeconfig)
            self._controllers = Server(command, folder, environment)

    def start(self) -> None:
        """Ready on return. Raises ServerEndedError; PortTakenError when trying again helps."""
        self._etcd.start(lambda: self._etcd.listens(self._etcd_port), _READY_TIMEOUT_S)
        self.start_api_server()
        self.restart_controllers()

    def start_api_server(self) -> None:
        """Ready on return, at the address it has had. Raises ServerEndedError."""
        self._api_server.start(lambda: self._has("/readyz"), _READY_TIMEOUT_S)

    def kill_api_server(self) -> None:
        self._api_server.kill()

    def restart_controllers(self) -> None:
        """Where there are any. The first time they work on return. Raises ServerEndedError."""
        if self._controllers is not None:
            self._controllers.kill()
            account = "/api/v1/namespaces/default/serviceaccounts/default"
            self._controllers.start(lambda: self._has(account), _READY_TIMEOUT_S)

    def kill(self) -> None:
        for server in (self._controllers, self._api_server, self._etcd):
            if server is not None:
                server.kill()

    def _has(self, path: str) -> bool:
        headers = {"Authorization": f"Bearer {self._token}"}
        request = urllib.request.Request(self.address + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=_PROBE_TIMEOUT_S, context=self._trust):
                return True
        except OSError:  # nobody there, not yet ready, no such thing: what urllib raises is one
            return False


@contextlib.contextmanager
def started(assets: Assets, folder: Path) -> Iterator[Servers]:
    """Servers that are ready; they end with the block. Raises ServerEndedError."""
    with contextlib.ExitStack() as stack:
        reaper = stack.enter_context(watched_over())
        for num_left in reversed(range(_NUM_TRIES)):
            servers = Servers(assets, folder, reaper.variables)
            stack.callback(servers.kill)
            try:
                servers.start()
                break
            except PortTakenError:
                servers.kill()
                if not num_left:
                    raise
        yield servers


def _etcd_command(program: Path, folder: Path, port: int) -> tuple[str | Path, ...]:
    return (
        program,
        f"--data-dir={folder}/etcd-{port}",
        f"--listen-client-urls=http://127.0.0.1:{port}",
        f"--advertise-client-urls=http://127.0.0.1:{port}",
        "--listen-peer-urls=http://127.0.0.1:0",  # it has no peers
        "--log-level=warn",
    )


def _api_server_command(
    assets: Assets, credentials: Credentials, etcd_port: int, port: int
) -> tuple[str | Path, ...]:
    command: tuple[str | Path, ...] = (
        assets.kube_apiserver,
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        "--endpoint-reconciler-type=none",  # an address of loopback cannot be an endpoint
        f"--secure-port={port}",
        f"--tls-cert-file={credentials.certificate}",
        f"--tls-private-key-file={credentials.key}",
        f"--token-auth-file={credentials.tokens}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={credentials.key}",
        f"--service-account-key-file={credentials.key}",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--authorization-mode=RBAC",
        "--allow-privileged=true",
    )
    if assets.kube_controller_manager is None:  # nobody makes the accounts that it asks pods for
        command += ("--disable-admission-plugins=ServiceAccount",)
    return command


def _controllers_command(
    program: Path, credentials: Credentials, kubeconfig: Path
) -> tuple[str | Path, ...]:
    return (
        program,
        f"--kubeconfig={kubeconfig}",
        f"--service-account-private-key-file={credentials.key}",
        f"--root-ca-file={credentials.certificate}",
        "--leader-elect=false",
        "--secure-port=0",
        *(("--port=0",) if _minor_version(program) < _WITHOUT_PORT else ()),
        f"--controllers={','.join(_CONTROLLERS)}",
    )


def _minor_version(program: Path) -> int:
    """1.20.2 -> 20. Raises ControlPlaneError."""
    done = subprocess.run(
        [program, "--version"],
        capture_output=True,
        text=True,
        timeout=_PROBE_TIMEOUT_S,
        check=False,
    )
    found = re.search(r"v1\.(\d+)", done.stdout)
    if found is None:
        raise ControlPlaneError(f"{program} --version says {done.stdout or done.stderr!r}")
    return int(found[1])


# --- what the servers and their callers prove themselves with -------------------------------------


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
