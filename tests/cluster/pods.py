"""A cluster on pods: a head pod and pool pods, each a Ray node of its own, and a router process.

What Kubernetes would do for it is a method here: a pod joins, drains, is ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from baton.config.cluster import ClusterConfig
from baton.config.settings import changed
from baton.config.workers import pod_resource
from baton.control.client import ControlClient
from baton.v1 import control_pb2
from cluster.local.bring_up import RouterProcess
from cluster.local.process_tree import Process, Reaper, watched_over
from cluster.node.pod import Pod
from cluster.worker.rank import free_port
from tests.cluster.ray_nodes import NodeProcess, start_head, start_worker
from tests.cluster.redis_server import WAITS_FOR_THE_GCS, Redis
from tests.cluster.whole_cluster import (
    Fleet,
    Site,
    live_workers,
    supervisor_among,
)

_NUMBERS = itertools.count(11)


# As containers have it: nobody outside can end a process by its number, nor see that it is over.
OWN_PIDS = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child")


def may_have_own_pids() -> bool:
    try:
        return subprocess.run([*OWN_PIDS, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@dataclass
class PodProcess:
    """One pod of a pool: its node, and what its containers have in their environment."""

    pool: str
    pod: Pod
    node: NodeProcess
    environment: dict[str, str]

    def rank(self) -> Process:
        """Its one rank, by its pid outside."""
        (rank,) = (p for p in self.node.tree() if "::RankActor" in _title(p.pid))
        return rank

    def drain(self, timeout_s: float) -> subprocess.Popen[str]:
        """What its `preStop` runs."""
        return subprocess.Popen(
            [sys.executable, "-m", "cluster.node.pod_drain", f"--timeout={timeout_s}"],
            env=os.environ | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@dataclass
class PodCluster:
    """A head pod, with Ray and what serves beside it, and the pods that have joined."""

    config_path: Path
    run_dir: Path
    environment: dict[str, str]
    """Of all its processes: Ray's address and token, the reaper's mark."""
    reaper: Reaper
    stack: contextlib.ExitStack
    folder: Path
    """For Ray's own."""
    redis: Redis | None = None
    """Where the GCS keeps its state; None: in its memory."""
    pods: dict[str, PodProcess] = field(default_factory=dict)
    head: NodeProcess = field(init=False)
    control_address: str = ""
    router_address: str = ""

    @property
    def ray_address(self) -> str:
        return self.environment["RAY_ADDRESS"]

    def start_ray(self) -> None:
        """The head pod's, at its address also when it is started anew; nobody waits for it here."""
        port = int(self.ray_address.rpartition(":")[2])
        command, environment = start_head(port, self.folder / "head"), self.environment
        if self.redis is not None:
            command, environment = self.redis.keeps(command, environment)
        log = self.run_dir / f"head-{next(_NUMBERS)}.log"
        self.head = NodeProcess(command, environment, log)
        self.stack.callback(self.head.kill)

    def serve(self) -> NodeProcess:
        """What runs beside Ray in the head pod, until it has a supervisor."""
        log = self.run_dir / f"serving-{next(_NUMBERS)}.log"
        serving = NodeProcess(self.head_command(), self.environment, log)
        self.stack.callback(serving.kill)
        give_up_at = time.monotonic() + 60
        while "control service at " not in (said := log.read_text()):
            assert serving.process.poll() is None, said
            assert time.monotonic() < give_up_at, said
            time.sleep(0.05)
        self.control_address = said.partition("control service at ")[2].split()[0]
        self.reaper.name(self.head.tree())
        return serving

    def head_command(self) -> list[str]:
        command = [sys.executable, "-m", "cluster.supervisor.head", f"--config={self.config_path}"]
        return [*command, f"--run-dir={self.run_dir}"]

    def end_all(self) -> subprocess.CompletedProcess[str]:
        """What ends supervisor and replicas."""
        return subprocess.run(
            [sys.executable, "-m", "cluster.supervisor.head", "--end"],
            env=os.environ | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )

    def join(self, pool: str, num_ranks: int = 1) -> PodProcess:
        """A pod more; returns once Ray knows it."""
        joined = self.start_pod(pool, num_ranks)
        self.wait_until_up(joined)
        return joined

    def wait_until_up(self, *pods: PodProcess) -> None:
        for pod in pods:
            pod.node.wait_until_up()
            self.reaper.name(pod.node.tree())

    def start_pod(self, pool: str, num_ranks: int = 1, run_by: tuple[str, ...] = ()) -> PodProcess:
        """`run_by`: the command that its main process is run by."""
        number = next(_NUMBERS)
        pod = Pod(f"{pool}-{number}-{secrets.token_hex(3)}", f"127.0.0.{number}", f"node-{number}")
        environment = self.environment | {
            "POD_NAME": pod.name,
            "POD_IP": str(pod.ip),
            "NODE_NAME": pod.node_name,
        }
        offers = {pod_resource(pool): num_ranks}
        command = start_worker(self.ray_address, offers, self.folder / str(number), pod.name)
        if self.redis is not None:
            environment |= WAITS_FOR_THE_GCS
        node = NodeProcess([*run_by, *command], environment, self.run_dir / f"{pod.name}.log")
        joined = PodProcess(pool, pod, node, environment)
        self.stack.callback(shutil.rmtree, pod.folder, ignore_errors=True)
        self.pods[pod.name] = joined
        return joined

    def start_again(self, pod: PodProcess) -> None:
        """Its container, all of whose processes are over; what its volumes hold is still there."""
        pod.node = pod.node.again()
        self.stack.callback(pod.node.kill)

    def num_of(self, pool: str) -> int:
        return sum(each.pool == pool for each in self.pods.values())

    def have(self, **sizes: int) -> None:
        """As many pods of each pool as that, if there are fewer."""
        started = []
        for pool, num_pods in sizes.items():
            started += [self.start_pod(pool) for _ in range(self.num_of(pool), num_pods)]
        self.wait_until_up(*started)

    def end(self, *gone: PodProcess) -> None:
        """Kubernetes deletes them."""
        for pod in gone:
            pod.node.ask_to_end()
        for pod in gone:
            pod.node.end()
            del self.pods[pod.pod.name]

    def start_router(self, config: ClusterConfig) -> None:
        router = RouterProcess(
            config.router, self.control_address, self.run_dir, self.reaper.variables
        )
        self.stack.callback(router.close)
        router.start(60.0)
        self.router_address = router.address

    def pod_of(self, fleet: Fleet, worker_id: str) -> PodProcess:
        return self.pods[live_workers(fleet)[worker_id].pod_name]

    def supervisor(self) -> Process:
        return supervisor_among(self.head.tree())

    def check(self, fleet: Fleet) -> None:
        """Each live worker has a pod of its own pool to itself, and tells of that pod."""
        workers = live_workers(fleet)
        assert len({worker.pod_name for worker in workers.values()}) == len(workers), workers
        for worker in workers.values():
            found = self.pods[worker.pod_name]
            assert (found.pool, found.pod.node_name) == (worker.pool, worker.node_name)
            assert worker.address.rpartition(":")[0] == found.pod.ip


@contextlib.contextmanager
def running_head(
    config: ClusterConfig, run_dir: Path, redis: Redis | None = None
) -> Iterator[PodCluster]:
    """A head pod's Ray, and nothing else yet; afterwards no process is left."""
    config = dataclasses.replace(config, router=changed(config.router, http={"port": None}))
    with contextlib.ExitStack() as stack:
        reaper = stack.enter_context(watched_over())
        folder = Path(tempfile.mkdtemp(prefix="bray-", dir="/tmp"))  # short: Ray has sockets there
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        (config_path := run_dir / "cluster.yaml").write_text(config.to_yaml())
        environment = reaper.variables | {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # `baton up` in this process may forbid it
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_ADDRESS": f"127.0.0.1:{free_port('0.0.0.0')}",
        }
        pods = PodCluster(config_path, run_dir, environment, reaper, stack, folder, redis)
        pods.start_ray()
        pods.head.wait_until_up()
        stack.callback(lambda: [pod.node.kill() for pod in pods.pods.values()])
        yield pods


DRAINING = control_pb2.WORKER_STATE_DRAINING


GONE = control_pb2.WORKER_STATE_GONE


@dataclasses.dataclass
class PodSite(Site):
    """A cluster on pods, and what its requests must say."""

    @property
    def pods(self) -> PodCluster:
        return cast(PodCluster, self.cluster)

    def scale(self, pool: str, replicas: int) -> None:
        with ControlClient(self.pods.control_address) as control:
            control.set_replicas(pool, replicas)

    def settled(self, decode: int = 1) -> Fleet:
        """Live at this size, each worker on a pod of its own pool's."""
        self.scale("decode", decode)
        fleet = self.wait_for(lambda seen: live_at(seen, {"prefill": 1, "decode": decode}))
        self.pods.check(fleet)
        return fleet


def live_at(fleet: Fleet, sizes: dict[str, int]) -> bool:
    """Nobody leaves any more, either."""
    live = {pool.name: pool.live_replicas for pool in fleet.pools}
    there = [worker for worker in fleet.workers if worker.state != GONE]
    return live == sizes and len(live_workers(fleet)) == len(there) == sum(sizes.values())


def states_of(fleet: Fleet) -> dict[str, int]:
    return {worker.info.ref.worker_id: worker.state for worker in fleet.workers}


def pool_of(fleet: Fleet, name: str) -> Any:
    return next(pool for pool in fleet.pools if pool.name == name)


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):  # it is over
        return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]
    return ""
