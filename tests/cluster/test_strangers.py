"""Another user of the machine, and another network namespace, at a cluster's ports: each attack is
refused, by whom the log says, and what runs is not disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.fleet import Role
from baton.link.frames import CALLERS as LINK_CALLERS
from cluster.registry.control_access import CALLERS
from cluster.registry.control_service import Changes, serve
from tests.cluster.test_control_service import make_registry
from tests.cluster.up_command import brought_up, cluster
from tests.identities import OPERATOR
from tests.k8s.kubelet.errors import KernelError
from tests.k8s.kubelet.network import Network

_ATTACKER = (sys.executable, "-m", "tests.cluster.attacker")
_NOBODY = "65534"
_UNSIGNED = "it is not signed with a key of this cluster"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root becomes another user, and makes network namespaces"
)


@contextlib.contextmanager
def attackers(kind: str) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """The host where the cluster is to listen, what goes before the attacker, its user."""
    if kind == "another user":
        yield "127.0.0.1", (), _NOBODY
        return
    try:
        network = Network({})
        stranger = network.join("stranger")
    except KernelError as error:
        pytest.skip(f"no network namespaces can be made: {error}")
    try:
        yield network.gateway, ("nsenter", f"--net=/proc/{stranger.pid}/ns/net"), "0"
    finally:
        stranger.leave()
        network.close()


def check_refused(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, str] = json.loads(done.stdout)
    assert not [name for name, outcome in said.items() if outcome == "taken"], said
    for name in CALLERS:
        for how in ("without a key", "with its own key"):
            assert said.pop(f"{name} {how}") == f"UNAUTHENTICATED: {_UNSIGNED}"
    for method, callers in LINK_CALLERS.items():
        assert "this side has none" in said.pop(f"{method.name} without a key")
        unproved = f"PERMISSION_DENIED: it says that it is a {min(callers)!r} and does not prove it"
        assert unproved in said.pop(f"{method.name} with its own key")
    assert set(said.values()) <= {"PermissionError"}


@pytest.mark.parametrize("kind", ["another user", "another network namespace"])
async def test_a_stranger_at_a_worker_and_the_control_service_is_refused_everything(
    kit: Any, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    registry = make_registry()
    with attackers(kind) as (host, before, user):
        async with (
            serve(registry, Changes(), f"{host}:0", OPERATOR) as control,
            kit.running_worker("decode-0", Role.DECODE, host=host) as worker,
        ):
            link = await kit.decode_link(worker.address, "router-a").open()
            spec = kit.make_spec("victim", 60)
            spec.sampling.max_tokens = 400
            await link.reserve(spec)
            command = (*before, *_ATTACKER, control, worker.address, "victim", user)
            await asyncio.to_thread(check_refused, *command)
            await link.until(lambda: link.of("victim").finished)
            assert link.of("victim").in_order() == kit.oracle.tokens(spec)
            assert not worker.left.is_set()
            await link.close()
    assert registry.pools.desired_replicas() == {"decode": 1}
    assert not registry.workers()
    told = [each.getMessage() for each in caplog.records if "is refused" in each.getMessage()]
    for what in (*(f"a call of {name}" for name in CALLERS), "a link"):
        assert len([line for line in told if line.startswith(f"{what} from ")]) == 1, what


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_another_user_gets_nothing_of_baton_up_and_its_own_user_needs_no_more_than_before(
    tmp_path: Path,
) -> None:
    def run(*arguments: str, **environment: str) -> tuple[int, str]:
        own = {name: os.environ[name] for name in os.environ if name != "BATON_IDENTITY"}
        command = [sys.executable, "-m", "cli.main", *arguments, "--control", control]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=90, env=own | environment, check=False
        )
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    with brought_up(cluster(tmp_path, drain_timeout_s=5.0), tmp_path) as up:
        up.until_printed("is served at")
        control = up.until_printed("control service at ").split()[3].rstrip(";")
        status, shown = run("status")
        assert status == 0, shown
        record = Path(os.environ["XDG_RUNTIME_DIR"]) / "baton" / control.rpartition(":")[2]
        folder = Path(record.read_text())
        files = [folder, *folder.rglob("*"), record]
        assert not [each for each in files if each.stat().st_mode & 0o077]
        worker = next(word for word in shown.split() if word.startswith("127.0.0.1:"))
        reads = (str(folder), str(record.parent))
        check_refused(*_ATTACKER, control, worker, "victim", _NOBODY, *reads)
        status, said = run("scale", "decode", "0", XDG_RUNTIME_DIR=str(tmp_path))
        assert (status, "no operator's identity for the control" in said) == (2, True), said
        status, said = run("scale", "decode", "0", "--identity", os.environ["BATON_IDENTITY"])
        assert (status, _UNSIGNED in said, "--identity FOLDER, or" in said) == (1, True, True), said
        assert run("scale", "decode", "2", "--timeout", "60")[0] == 0
        logs = {path.stem: path.read_text() for path in folder.parent.glob("*.log")}
        refused = f"a call of AddPool from ipv4:127.0.0.1 is refused: {_UNSIGNED}"
        assert refused in logs["supervisor"]
        assert "a link from 127.0.0.1 is refused: " in logs["prefill-0"] + logs["decode-0"]
        up.ctrl_c()
        assert up.status(60) == 0
        assert not record.exists()
