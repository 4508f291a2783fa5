"""The router as `baton up` keeps it: a child process."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.config.router import TlsConfig
from baton.errors import ConfigError, UnavailableError
from cluster.local.bring_up import RouterProcess, with_own_ports
from cluster.local.process_tree import descendants, wait_until_gone
from tests.certificates import Authority
from tests.cluster.whole_cluster import fake_cluster, wait_until

pytestmark = pytest.mark.timeout(60)


def router_at(folder: Path, **changes: Any) -> RouterProcess:
    config = fake_cluster(folder)
    routing = with_own_ports(dataclasses.replace(config.router, **changes))
    config = dataclasses.replace(config, router=routing)
    (folder / "cluster.yaml").write_text(config.to_yaml())
    return RouterProcess(config.router, "127.0.0.1:1", folder, {})


def test_a_router_with_a_wrong_configuration_is_not_tried_again_and_its_message_is_raised(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        router = router_at(tmp_path, port=port)
        with pytest.raises(ConfigError) as failure:
            router.start(30.0)
        router.close()
    assert failure.value.message.startswith(f"cannot listen on 127.0.0.1:{port}: ")
    log = (tmp_path / "router.log").read_text()
    assert log.count("router: cannot listen on") == 1


def test_a_router_that_has_served_is_started_again_however_it_ends_until_it_is_closed(
    tmp_path: Path,
) -> None:
    before = descendants()
    router = router_at(tmp_path)
    router.start(30.0)
    pid = router.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: router.pid != pid and serves(router))
    router.close()
    assert wait_until_gone(descendants() - before, 0.0) == set()


def test_a_router_that_serves_tls_is_waited_for_at_its_port_for_health(tmp_path: Path) -> None:
    made = Authority(tmp_path).issue("router")
    tls = TlsConfig(str(made.certificate), str(made.key), str(tmp_path / "root.crt"))
    router = router_at(tmp_path, tls=tls)
    try:
        router.start(30.0)
        assert serves(router)
    finally:
        router.close()


def test_a_router_that_cannot_be_launched_is_reported_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, real = tmp_path / "python", sys.executable
    monkeypatch.setattr(sys, "executable", str(python))
    router = router_at(tmp_path)
    with pytest.raises(UnavailableError) as failure:
        router.start(0.1)
    assert f"could not be started: [Errno 2] No such file or directory: '{python}'" in str(
        failure.value
    )
    assert router.pid is None
    python.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    python.chmod(0o755)
    wait_until(lambda: serves(router))
    router.close()


def serves(router: RouterProcess) -> bool:
    host, _, port = router.address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True
