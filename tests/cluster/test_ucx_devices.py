"""Where UCX listens, beside a second network interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.config.cluster import parse_config
from cluster.worker.config import worker_config
from kv_transfer.rank import make_transport

_SECOND = (
    "mount -t sysfs sysfs /sys && ip link set lo up && "
    "ip link add one type veth peer name other && "
    "ip addr add 10.9.0.1/24 dev one && ip link set one up && ip link set other up && exec "
)
_LISTENS = "0A"


def listening() -> set[str]:
    """The addresses, as the kernel writes them, at which anyone listens in this namespace."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == _LISTENS}


def show(transfer: str, runs_on: str) -> None:
    """Print where a worker's transport listens."""
    cluster = {"model": "fake", "runs_on": runs_on, "transfer": json.loads(transfer)}
    config = parse_config(cluster | {"pools": {"decode": {"role": "decode"}}})
    transport = make_transport(worker_config(config, "decode", "decode-0", "").transfer)
    print(json.dumps(sorted(listening())))
    transport.close()


def shown(transfer: str, runs_on: str, **environment: str) -> set[str]:
    command = f"{sys.executable} -m tests.cluster.test_ucx_devices '{transfer}' {runs_on}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    unshare = ["unshare", "--net", "--mount", "sh", "-c", _SECOND + command]
    said = subprocess.run(unshare, env=environment, stdout=subprocess.PIPE, timeout=60, check=True)
    return set(json.loads(said.stdout.splitlines()[-1]))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces")
def test_on_one_machine_ucx_listens_on_loopback_alone_unless_told_otherwise() -> None:
    loopback, second = "0100007F", "0100090A"
    assert shown("{}", "machine") == {loopback}
    assert second in shown("{}", "pods")
    assert second in shown('{"net_devices": "all"}', "machine")
    assert shown("{}", "machine", UCX_NET_DEVICES="one") == {second}


if __name__ == "__main__":
    show(*sys.argv[1:])
