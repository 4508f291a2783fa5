"""Where UCX listens, beside a second network interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SECOND = """mount -t sysfs sysfs /sys && ip link set lo up &&
ip link add one type veth peer name two &&
ip addr add 10.9.0.1/24 dev one && ip link set one up && ip link set two up && exec "$@" """
_WORKER = """import json, sys
from baton.config.cluster import parse_config
from cluster.worker.config import worker_config
from kv_transfer.transports.by_name import make_transport
config = worker_config(parse_config(json.loads(sys.argv[1])), "decode", "decode-0", "")
transport = make_transport(config.transfer)
print(open("/proc/net/tcp").read())
transport.close()"""
_LISTENS, _LOOPBACK, _ONE = "0A", "0100007F", "0100090A"  # as the kernel writes them


def listening(runs_on: str, environment: dict[str, str], **transfer: str) -> set[str]:
    """Addresses at which a worker's transport listens, in a network namespace of its own."""
    cluster = {"model": "fake", "runs_on": runs_on, "transfer": transfer}
    cluster["pools"] = {"decode": {"role": "decode"}}
    worker = [sys.executable, "-c", _WORKER, json.dumps(cluster)]
    said = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", _SECOND, "sh", *worker],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    rows = [row.split() for row in said.stdout.splitlines() if ":" in row]
    return {row[1].partition(":")[0] for row in rows if row[3] == _LISTENS}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces")
def test_on_one_machine_ucx_listens_on_loopback_alone_unless_told_otherwise() -> None:
    assert listening("machine", {}) == {_LOOPBACK}
    assert _ONE in listening("pods", {})
    assert _ONE in listening("machine", {}, net_devices="all")
    assert listening("machine", {"UCX_NET_DEVICES": "one"}) == {_ONE}
