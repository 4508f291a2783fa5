"""The same from a bucket, through boto3."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.baton.fetch.checkpoint_server import CheckpointServer
from tests.baton.fetch.nodes import CHECKPOINT, LARGE, OTHERS, Node, under


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointServer]:
    files = under("bucket/models/tiny", CHECKPOINT | OTHERS) | {"bucket/models/tiny/a/b": b"x"}
    with CheckpointServer(files) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        yield server


@pytest.fixture
def node(server: CheckpointServer, tmp_path: Path) -> Node:
    return Node("s3://bucket/models/tiny/", tmp_path / "cache" / "0123")


@pytest.mark.full
def test_a_bucket_that_everybody_may_read_is_asked_without_credentials(
    server: CheckpointServer, node: Node
) -> None:
    node.fetch()
    assert node.files() == CHECKPOINT
    assert {asked.authorization for asked in server.asked} == {None}


@pytest.mark.full
def test_credentials_of_the_environment_sign_what_is_asked(
    server: CheckpointServer, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    node.fetch()
    assert node.files() == CHECKPOINT
    assert all((asked.authorization or "").startswith("AWS4-HMAC") for asked in server.asked)


def test_an_object_that_is_cut_off_goes_on_where_it_was(
    server: CheckpointServer, node: Node
) -> None:
    path = f"bucket/models/tiny/{LARGE}"
    server.cuts[path] = [1_000_000]
    node.fetch()
    assert node.files() == CHECKPOINT
    assert [a.start for a in server.asked if a.path == path] == [0, 1_000_000]


def test_nothing_is_kept_of_an_object_that_its_checksum_refuses(
    server: CheckpointServer, node: Node
) -> None:
    path = f"bucket/models/tiny/{LARGE}"
    checksum = zlib.crc32(CHECKPOINT[LARGE]).to_bytes(4, "big")
    server.headers[path] = {"x-amz-checksum-crc32": base64.b64encode(checksum).decode()}
    server.files[path] = b"?" * 3_000_000
    assert "did not match calculated checksum" in node.refused()
    assert {asked.start for asked in server.asked} == {0}
    server.files[path] = CHECKPOINT[LARGE]
    node.fetch()
    assert node.files() == CHECKPOINT


@pytest.mark.full
def test_a_bucket_that_may_not_be_listed_is_asked_for_a_checkpoints_usual_files(
    server: CheckpointServer, node: Node
) -> None:
    server.forbidden.add("bucket")
    node.fetch()
    assert node.files() == CHECKPOINT


@pytest.mark.full
def test_an_object_that_may_not_be_read_asks_for_credentials(
    server: CheckpointServer, node: Node
) -> None:
    server.forbidden.add(f"bucket/models/tiny/{LARGE}")
    assert node.refused().startswith(
        f"spec.model.credentialsSecretName: s3://bucket/models/tiny/{LARGE} may not be read"
    )
