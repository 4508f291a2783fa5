"""The processes that bench.router measures, each kind a class: start it, its address, its CPU."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path

import psutil

from bench.report import first_line
from cluster.worker.rank import free_port
from tests.certificates import Certificate
from tests.identities import used_everywhere
from tests.router.scripted_worker import MODEL

_IDENTITIES = tempfile.TemporaryDirectory(prefix="baton-bench-")
used_everywhere(Path(_IDENTITIES.name))  # by the workers and routers that are started here

READY_WITHIN_S, STOP_WITHIN_S = 60.0, 5.0
_FIND_SGLANG = "import importlib.util as u; print(u.find_spec('sglang_router') or '')"


class Server(ABC):
    """Own a process and those that it has started."""

    ids_path = "/v1/completions"
    """Where HTTP prompts of token ids are taken."""

    def __init__(self, certificate: Certificate | None = None) -> None:
        """`certificate`: for TLS."""
        self.address = self.http_address = ""
        self._files: tuple[str, ...] = ()
        if certificate is not None:
            self._files = (str(certificate.certificate), str(certificate.key))
        self._process: asyncio.subprocess.Process | None = None

    @abstractmethod
    async def start(self) -> None:
        """Return once it answers."""

    async def stop(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_WITHIN_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    @property
    def tree(self) -> list[psutil.Process]:
        assert self._process is not None
        top = psutil.Process(self._process.pid)
        return [top, *top.children(recursive=True)]

    def cpu_s(self) -> float:
        times = [process.cpu_times() for process in self.tree]
        return sum(each.user + each.system for each in times)

    async def _run(self, *command: str, says: bool = True) -> list[str]:
        """Start a process, and return the words of its first line, if it `says` one."""
        output = asyncio.subprocess.PIPE if says else asyncio.subprocess.DEVNULL
        errors = None if says else asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=errors)
        if self._process.stdout is None:
            return []
        async with asyncio.timeout(READY_WITHIN_S):
            return (await self._process.stdout.readline()).decode().split()


class FreeWorkers(Server):
    """A registry, two prefill and two decode workers; `address` is the registry's."""

    prefill = decode = ""

    async def start(self) -> None:
        words = await self._run(sys.executable, "-m", "bench.free_worker")
        self.address, self.prefill, self.decode = words


class NullServer(Server):
    async def start(self) -> None:
        (self.address,) = await self._run(sys.executable, "-m", "bench.peers", "null", *self._files)


class Proxy(Server):
    """The bare proxy before a null server."""

    def __init__(self, backend: NullServer, certificate: Certificate | None = None) -> None:
        super().__init__(certificate)
        self._backend = backend.address

    async def start(self) -> None:
        command = (sys.executable, "-m", "bench.peers", self._backend, *self._files)
        (self.address,) = await self._run(*command)


class HttpWorker(Server):
    ids_path = "/generate"  # as SGLang's

    async def start(self) -> None:
        (self.http_address,) = await self._run(sys.executable, "-m", "bench.peers", "http")


class BatonRouter(Server):
    def __init__(
        self, workers: FreeWorkers, certificate: Certificate | None = None, shared_port: int = 0
    ) -> None:
        """`shared_port`: of several router processes; 0: one of its own."""
        super().__init__(certificate)
        self._control, self._shared_port = workers.address, shared_port

    async def start(self) -> None:
        port = free_port("127.0.0.1")
        self.http_address = f"127.0.0.1:{port}"
        text = f"served_model_name: {MODEL}\nrouter:\n  http: {{port: {port}}}\n"
        text += "  placement: {local_prefill: never}\n"
        if self._shared_port:
            text += "  reuse_port: true\n"
        if self._files:
            made, key = self._files
            text += f"  tls:\n    certificate_file: {made}\n    key_file: {key}\n"
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "cluster.yaml"
            config.write_text(text)
            command = [sys.executable, "-m", "router", "--control", self._control]
            command += ["--config", str(config), "--listen", f"127.0.0.1:{self._shared_port}"]
            self.address = (await self._run(*command, "--log-level", "warning"))[-1]


class SglangRouter(Server):
    """SGLang's router, with its defaults, before one HTTP worker."""

    ids_path = "/generate"

    def __init__(
        self, python: str, worker: HttpWorker, certificate: Certificate | None = None
    ) -> None:
        super().__init__(certificate)
        self._python, self._worker = python, worker.http_address

    async def start(self) -> None:
        port = free_port("127.0.0.1")
        command = [self._python, "-m", "sglang_router.launch_router", "--log-level", "error"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(free_port("127.0.0.1"))]
        command += ["--worker-urls", f"http://{self._worker}"]
        if self._files:
            made, key = self._files
            command += ["--tls-cert-path", made, "--tls-key-path", key]
        await self._run(*command, says=False)
        self.http_address = f"127.0.0.1:{port}"
        async with asyncio.timeout(READY_WITHIN_S):
            while not await _listens(port):  # noqa: ASYNC110  it says so to nobody
                await asyncio.sleep(0.1)

    @staticmethod
    def is_installed(python: str | None) -> bool:
        return python is not None and bool(first_line(python, "-c", _FIND_SGLANG))


async def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return True
    return False


class Syscalls:
    """Counts the system calls of a server while it is attached to it."""

    def __init__(self, server: Server) -> None:
        self._pids = [str(process.pid) for process in server.tree]
        self.number = 0

    async def __aenter__(self) -> Syscalls:
        targets = [word for pid in self._pids for word in ("-p", pid)]
        self._strace = await asyncio.create_subprocess_exec(
            "strace", "-c", "-f", *targets, stderr=asyncio.subprocess.PIPE
        )
        assert self._strace.stderr is not None
        line = (await self._strace.stderr.readline()).decode()
        if "attached" not in line:
            await self._strace.wait()
            raise OSError(line.strip())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._strace.send_signal(signal.SIGINT)
        table = (await self._strace.communicate())[1]
        total = [line.split() for line in table.decode().splitlines() if line.endswith("total")]
        if not total:
            raise OSError("strace printed no table")
        self.number = int(total[-1][3])
