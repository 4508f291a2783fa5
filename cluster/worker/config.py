"""A worker process's configuration: picklable, so that it can be sent to a Ray actor.

Each rank has its own GPU, the only one that it sees: its bundle holds one, and Ray sets
CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from baton.config.cluster import ClusterConfig, PoolConfig
from baton.config.engine import EngineConfig
from baton.config.transfer import TransferConfig
from baton.config.workers import WorkerSettings
from cluster.node.pod import Pod
from engine.engines import RankPosition as RankPosition
from engine.run import compute_threads


@dataclass(frozen=True)
class WorkerConfig:
    """The configuration of one replica, the same for all its ranks: its cluster's, and the parts of
    that which are its own."""

    worker_id: str
    pool: str
    cluster: ClusterConfig
    engine: EngineConfig
    transfer: TransferConfig
    settings: WorkerSettings
    control_address: str
    host: str = "127.0.0.1"
    pod: Pod | None = None
    log_dir: str = ""
    """Folder of the ranks' log files; empty: the pod's log."""

    @property
    def shape(self) -> PoolConfig:
        return self.cluster.pools[self.pool]

    @property
    def in_pod(self) -> bool:
        """Whether it has its own pod; then `with_node_settings` sets where it listens."""
        return self.cluster.runs_on == "pods"

    def log_file(self, rank: int) -> Path | None:
        name = self.worker_id if rank == 0 else f"{self.worker_id}.r{rank}"
        return Path(self.log_dir) / f"{name}.log" if self.log_dir else None


def worker_config(
    cluster: ClusterConfig, pool: str, worker_id: str, control_address: str
) -> WorkerConfig:
    """The configuration of one replica of a pool."""
    shape, settings = cluster.pools[pool], cluster.worker
    # UCX asks nobody who writes: on one machine nobody beyond it shall reach it.
    devices = cluster.transfer.net_devices or ("all" if cluster.runs_on == "pods" else "lo")
    if shape.drain_timeout_s is not None:
        settings = dataclasses.replace(settings, drain_timeout_s=shape.drain_timeout_s)
    return WorkerConfig(
        worker_id=worker_id,
        pool=pool,
        cluster=cluster,
        engine=cluster.pool_engine(pool),
        transfer=dataclasses.replace(cluster.transfer, net_devices=devices),
        settings=settings,
        control_address=control_address,
    )


def with_node_settings(config: WorkerConfig, pod: Pod | None, node_address: str) -> WorkerConfig:
    """Add what is known only on the worker's node, for a worker with its own pod. Without POD_IP it
    listens at `node_address`, an IP address."""
    if not config.in_pod:
        return config
    address = node_address if pod is None or pod.ip is None else pod.ip
    host = f"[{address}]" if ":" in address else address
    settings = config.settings
    if pod is not None and pod.port:
        settings = dataclasses.replace(settings, port=pod.port)
    return dataclasses.replace(config, pod=pod, host=host, settings=settings)


def num_threads_of(engine: EngineConfig, num_ranks: int) -> int:
    """Compute threads of one rank: its engine setting, or else the machine's cores divided among
    all its ranks. Oversubscribed cores slow torch down 10-100x.
    """
    return engine.num_threads or compute_threads.share(max(1, num_ranks))
