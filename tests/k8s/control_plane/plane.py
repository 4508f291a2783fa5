"""What tests use: a control plane with its administrator's kubectl and helm."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.k8s.control_plane.assets import Assets, Clients, RunningCluster
from tests.k8s.control_plane.errors import CommandError
from tests.k8s.control_plane.servers import Servers, started, write_kubeconfig

_CEL_SINCE = (1, 25)
_TOKEN_S = 3600
_MEMORY = Path("/dev/shm")
_NEEDED_BYTES = 1 << 30
_PREFIX = "baton-control-plane"


@dataclass(frozen=True)
class ControlPlane:
    """A real API server, with its controllers."""

    kubeconfig: Path
    """The administrator's."""
    clients: Clients
    folder: Path
    """For what tests write; goes when the control plane does."""
    servers: Servers | None
    """None: somebody else's cluster, which no test may stop."""
    has_controllers: bool
    """Whether anything makes ReplicaSets, collects garbage and ends namespaces."""

    def kubectl(
        self, *arguments: str | Path, stdin: str | None = None, timeout_s: float = 30.0
    ) -> str:
        """Its stdout. Raises CommandError when it fails, or takes longer."""
        return self._run(self.clients.kubectl, arguments, stdin, timeout_s)

    def helm(self, *arguments: str | Path, timeout_s: float = 120.0) -> str:
        """Its stdout. Raises CommandError when it fails, takes longer, or there is none."""
        if self.clients.helm is None:
            raise CommandError("helm is neither beside kubectl nor on PATH")
        return self._run(self.clients.helm, arguments, None, timeout_s)

    def read(self, *arguments: str) -> Any:
        """What `kubectl get ARGUMENTS` finds: an object, or a List of them."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self, *objects: Mapping[str, object], field_manager: str = "test") -> None:
        """Server-side. Raises CommandError where another manager owns a field."""
        items = {"apiVersion": "v1", "kind": "List", "items": objects}
        arguments = ("apply", "--server-side", f"--field-manager={field_manager}", "-f", "-")
        self.kubectl(*arguments, stdin=json.dumps(items))

    @property
    def environment(self) -> dict[str, str]:
        """What kubectl and helm are run with; they write nothing into the user's home.

        Somebody else's kubeconfig may name a program that reads its own files there.
        """
        return {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "KUBECACHEDIR": str(self.folder / "kubectl-cache"),
            **({"HOME": str(self.folder)} if self.servers is not None else {}),
            **{
                f"HELM_{n}_HOME": str(self.folder / "helm" / n) for n in ("CACHE", "CONFIG", "DATA")
            },
        }

    @property
    def address(self) -> str:
        """The API server's URL."""
        return str(self._cluster()["server"])

    def version(self) -> tuple[int, int]:
        """The API server's, like (1, 20)."""
        said = json.loads(self.kubectl("get", "--raw", "/version"))["gitVersion"]
        major, minor = re.findall(r"\d+", said)[:2]
        return int(major), int(minor)

    def has_cel(self) -> bool:
        """Whether the API server applies a CRD's `x-kubernetes-validations`."""
        return self.version() >= _CEL_SINCE

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """A kubeconfig that acts as the service account, for an hour."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        asked = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": _TOKEN_S},
        }
        answer = self.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(asked))
        kubeconfig = self.folder / f"{namespace}-{name}.kubeconfig"
        write_kubeconfig(kubeconfig, self._cluster(), json.loads(answer)["status"]["token"])
        return kubeconfig

    @contextlib.contextmanager
    def without_api_server(self) -> Iterator[None]:
        """It is killed, and is back, ready, at the same address, when the block ends."""
        assert self.servers is not None, "no test may stop somebody else's API server"
        self.servers.kill_api_server()
        try:
            yield
        finally:
            self.servers.start_api_server()

    def restart_api_server(self) -> None:
        """Killed, and ready again at the same address on return."""
        with self.without_api_server():
            pass

    def restart_controllers(self) -> None:
        """For a test that has made custom resources' kinds and whose objects own others.

        The garbage collector looks for new kinds at its start, and then every 30 s.
        """
        assert self.servers is not None, "no test may stop somebody else's controllers"
        self.servers.restart_controllers()

    def _cluster(self) -> dict[str, object]:
        """The kubeconfig's part about the cluster, certificates inline."""
        view = ("config", "view", "--raw", "--minify", "--flatten", "-o", "json")
        cluster: dict[str, object] = json.loads(self.kubectl(*view))["clusters"][0]["cluster"]
        return cluster

    def _run(
        self, program: Path, arguments: tuple[str | Path, ...], stdin: str | None, timeout_s: float
    ) -> str:
        command = [str(program), *map(str, arguments)]
        said = " ".join([program.name, *command[1:]])
        try:
            done = subprocess.run(
                command,
                env=self.environment,
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"{said}: not done after {timeout_s:.0f} s") from error
        if done.returncode:
            raise CommandError(f"{said}: {done.stderr.strip()}")
        return done.stdout


@contextlib.contextmanager
def control_plane_of(found: Assets | RunningCluster) -> Iterator[ControlPlane]:
    """One that is ready; what was started ends with the block. Raises ControlPlaneError."""
    with scratch_folder() as folder:
        if isinstance(found, RunningCluster):
            yield ControlPlane(found.kubeconfig, found.clients, folder, None, True)
            return
        has_controllers = found.kube_controller_manager is not None
        with started(found, folder) as servers:
            yield ControlPlane(servers.kubeconfig, found.clients, folder, servers, has_controllers)


@contextlib.contextmanager
def scratch_folder(memory: Path = _MEMORY) -> Iterator[Path]:
    """An empty one in memory, since every write of etcd waits for its disk; on disk where `memory`
    has no room. It goes with the block. That of a killed process goes when the next one comes."""
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > _NEEDED_BYTES
    parent = memory if has_room else Path(tempfile.gettempdir())
    for left_over in parent.glob(f"{_PREFIX}.*"):
        pid = left_over.name.split(".")[1]
        if not Path("/proc", pid).exists():
            shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}.{os.getpid()}.", dir=parent) as folder:
        yield Path(folder)
