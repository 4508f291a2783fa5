"""What a pod's init container runs: killed at any time, and two at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.baton.fetch.checkpoint_server import CheckpointServer, write_certificate
from tests.baton.fetch.nodes import CHECKPOINT, LARGE, WITHIN_S, under


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def server(certificate: Path) -> Iterator[CheckpointServer]:
    with CheckpointServer(under("m", CHECKPOINT), certificate) as server:
        yield server


def start(server: CheckpointServer, folder: Path, trusted: Path | None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "baton.fetch", "--uri", f"{server.address}/m"]
    environment = dict(os.environ)
    if trusted is not None:
        environment["SSL_CERT_FILE"] = str(trusted)
    return subprocess.Popen(
        [*command, "--folder", str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=WITHIN_S)
    return process.returncode, said


def test_of_two_pods_one_fetches_and_when_it_is_killed_the_other_goes_on_where_it_was(
    server: CheckpointServer, certificate: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "0123"
    server.cuts[f"m/{LARGE}"] = [-1]
    first = start(server, folder, certificate)
    assert server.stopped.wait(WITHIN_S)
    part = folder.with_name("0123.all.partial") / f"{LARGE}.part"
    second = start(server, folder, certificate)
    assert second.stdout is not None
    assert "waiting for another pod" in second.stdout.readline()
    assert part.exists()
    assert not folder.exists()
    first.terminate()
    code, _ = ended(first)
    assert code == 128 + 15
    code, said = ended(second)
    assert code == 0, said
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CHECKPOINT
    starts = [asked.start for asked in server.asked if asked.path == f"m/{LARGE}"]
    assert len(starts) == 2
    assert starts[0] == 0 < starts[1]


@pytest.mark.full
def test_a_server_that_nobody_vouches_for_is_refused_with_what_to_do(
    server: CheckpointServer, tmp_path: Path
) -> None:
    code, said = ended(start(server, tmp_path / "0123", None))
    assert code == 1
    assert "cannot fetch the model: spec.model.uri: " in said
    assert "SSL_CERT_FILE" in said
    assert server.asked == []
