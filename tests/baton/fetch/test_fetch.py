"""A checkpoint comes whole or not at all, however often it is cut off on its way."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.fetch.sources import FetchError
from tests.baton.fetch.checkpoint_server import CheckpointServer
from tests.baton.fetch.nodes import (
    CHECKPOINT,
    LARGE,
    OTHERS,
    SHARDS,
    TEXT,
    Node,
    under,
)


def sums_of(files: dict[str, bytes]) -> bytes:
    lines = (f"{hashlib.sha256(content).hexdigest()}  {name}" for name, content in files.items())
    return "\n".join(lines).encode()


@pytest.fixture
def server() -> Iterator[CheckpointServer]:
    with CheckpointServer(under("m", CHECKPOINT | OTHERS)) as server:
        yield server


@pytest.fixture
def node(server: CheckpointServer, tmp_path: Path) -> Node:
    return Node(f"{server.address}/m", tmp_path / "cache" / "0123")


def test_a_checkpoints_files_come_once_to_a_node_and_no_others(
    server: CheckpointServer, node: Node
) -> None:
    node.fetch()
    assert node.files() == CHECKPOINT
    server.asked.clear()
    node.fetch()
    assert server.asked == []
    assert node.reported[-1].endswith("is there")


def test_a_single_file_of_weights_needs_no_index(server: CheckpointServer, node: Node) -> None:
    server.files = under("m", TEXT | {"model.safetensors": b"w" * 999})
    node.fetch()
    assert node.files() == TEXT | {"model.safetensors": b"w" * 999}


def test_text_alone_gives_way_to_all_of_it_at_the_same_path_and_not_the_other_way(
    server: CheckpointServer, node: Node
) -> None:
    node.fetch(text_only=True)
    assert node.files() == TEXT
    node.fetch()
    assert node.files() == CHECKPOINT
    server.asked.clear()
    node.fetch(text_only=True)
    assert (server.asked, node.files()) == ([], CHECKPOINT)


def test_a_file_that_is_cut_off_goes_on_where_it_was(server: CheckpointServer, node: Node) -> None:
    server.cuts[f"m/{LARGE}"] = [1_000_000, 500_000]
    node.fetch()
    assert node.files() == CHECKPOINT
    starts = [asked.start for asked in server.asked if asked.path == f"m/{LARGE}"]
    assert starts == [0, 1_000_000, 1_500_000]


@pytest.mark.parametrize("has_versions", [True, False])
def test_what_came_before_a_cut_is_thrown_away_where_it_may_be_of_another_file(
    server: CheckpointServer, node: Node, has_versions: bool
) -> None:
    server.has_versions = has_versions
    server.cuts[f"m/{LARGE}"] = [1_000_000] + [0] * 6
    assert f"{LARGE}: cut off at byte" in node.refused()
    server.files[f"m/{LARGE}"] = b"n" * 2_000_000
    server.cuts.clear()
    node.fetch()
    assert node.files() == CHECKPOINT | {LARGE: b"n" * 2_000_000}


def test_another_part_than_was_asked_for_is_never_taken(
    server: CheckpointServer, node: Node
) -> None:
    server.cuts[f"m/{LARGE}"] = [1_000_000]
    server.part_offset = 1
    assert f"{LARGE}: the server sent another part than it was asked for" in node.refused()


def test_a_try_that_failed_leaves_what_came_to_the_next_start(
    server: CheckpointServer, node: Node
) -> None:
    server.cuts[f"m/{LARGE}"] = [2_000_000] + [0] * 6
    said = node.refused()
    assert said.startswith("spec.model.uri: ")
    assert "given up after 6 tries; the next start continues at 2.0 MB" in said
    server.asked.clear()
    node.fetch()
    assert node.files() == CHECKPOINT
    starts = {asked.start for asked in server.asked if asked.path == f"m/{LARGE}"}
    assert starts == {2_000_000}


def test_a_file_that_is_not_what_its_checksum_says_is_fetched_anew(
    server: CheckpointServer, node: Node
) -> None:
    server.files["m/SHA256SUMS"] = sums_of(CHECKPOINT)
    server.files[f"m/{LARGE}"] = b"?" * 3_000_000
    assert f"{LARGE}: its SHA-256 is " in node.refused()
    server.files |= under("m", CHECKPOINT)
    server.asked.clear()
    node.fetch()
    assert node.files() == CHECKPOINT
    assert f"m/{LARGE}" in server.paths()


@pytest.mark.parametrize("name", ["Repr-Digest", "x-amz-checksum-sha256"])
def test_a_checksum_that_the_server_reports_is_kept_also_across_a_cut(
    server: CheckpointServer, node: Node, name: str
) -> None:
    digest = base64.b64encode(hashlib.sha256(CHECKPOINT[LARGE]).digest()).decode()
    reported = f"sha-256=:{digest}:" if name == "Repr-Digest" else digest
    server.headers[f"m/{LARGE}"] = {name: reported}
    server.cuts[f"m/{LARGE}"] = [1_000_000]
    node.fetch()
    assert node.files() == CHECKPOINT
    node.folder = node.folder.with_name("other")
    server.files[f"m/{LARGE}"] = b"?" * 3_000_000
    assert "its SHA-256 is " in node.refused()


def test_a_tar_file_is_unpacked_from_where_its_config_lies(
    server: CheckpointServer, node: Node
) -> None:
    with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w:gz") as tar:
        for name, content in {**under("top", CHECKPOINT | OTHERS), "../evil.json": b"x"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    server.files["t/model.tar.gz"] = packed.getvalue()
    server.cuts["t/model.tar.gz"] = [len(packed.getvalue()) // 2]
    node.uri = f"{server.address}/t/model.tar.gz"
    node.fetch(text_only=True)
    assert node.files() == TEXT
    node.fetch()
    assert node.files() == CHECKPOINT
    assert sorted(path.name for path in node.folder.parent.iterdir()) == sorted(
        ["0123", "0123.all", "0123.lock", "0123.text"]
    )


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        ("m/config.json", None, "spec.model.uri: .*/m/config.json is not there .HTTP 404.: the "),
        (f"m/{LARGE}", None, f"spec.model.uri: .*/m/{LARGE} is not there"),
        ("m/model.safetensors.index.json", b"{}", "index.json: no index of weights"),
        (
            "m/model.safetensors.index.json",
            b'{"weight_map": {"a": "../../etc/passwd"}}',
            "'../../etc/passwd' is no name of a file beside it",
        ),
        ("m/SHA256SUMS", b"<html>", "SHA256SUMS: not what sha256sum writes"),
        ("m/SHA256SUMS", sums_of(SHARDS), "config.json is not among its files"),
    ],
)
def test_what_cannot_be_fetched_is_named_with_what_to_do(
    server: CheckpointServer, node: Node, path: str, content: bytes | None, said: str
) -> None:
    if content is None:
        del server.files[path]
    else:
        server.files[path] = content
    with pytest.raises(FetchError, match=said):
        node.fetch()
    assert not node.folder.exists()


def test_a_token_opens_the_server_that_it_is_for_and_no_other(
    server: CheckpointServer, node: Node
) -> None:
    server.forbidden.add("m/config.json")
    assert node.refused().startswith("spec.model.credentialsSecretName: ")
    server.forbidden.clear()
    node.environment["BEARER_TOKEN"] = "open"
    with CheckpointServer({"elsewhere": SHARDS[LARGE]}) as other:
        server.moved[f"m/{LARGE}"] = f"{other.address}/elsewhere"
        node.fetch()
    assert node.files() == CHECKPOINT
    assert {asked.authorization for asked in server.asked[1:]} >= {"Bearer open"}
    assert [asked.authorization for asked in other.asked] == [None]


def test_a_cache_that_cannot_be_written_is_named(node: Node) -> None:
    node.folder = Path("/sys/baton/0123")
    with pytest.raises(FetchError, match=r"^weights cache: /sys/baton may not be written"):
        node.fetch()
