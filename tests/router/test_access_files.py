"""The files of TLS and bearer tokens: what is refused at the start, and how they are read again."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from baton.config.cluster import ClusterConfig, load_config
from baton.config.router import AuthConfig, RouterConfig, TlsConfig
from baton.errors import ConfigError
from router.door.access import Access, Reread, ServerTls
from tests.certificates import Authority, swap
from tests.router.secured import secured


def test_relative_files_are_those_beside_the_cluster_file(tmp_path: Path) -> None:
    config = RouterConfig(
        tls=TlsConfig("tls.crt", "/keys/tls.key", "ca.crt"), auth=AuthConfig("tokens")
    )
    file = tmp_path / "cluster.yaml"
    file.write_text(ClusterConfig(router=config).to_yaml())
    told = load_config(file).router
    assert told.tls == TlsConfig(f"{tmp_path}/tls.crt", "/keys/tls.key", f"{tmp_path}/ca.crt")
    assert told.auth == AuthConfig(f"{tmp_path}/tokens")


def a_site(folder: Path) -> tuple[Authority, RouterConfig]:
    authority = Authority(folder)
    return authority, RouterConfig(**secured(folder, authority))


def test_files_that_hold_no_certificate_with_its_key_are_named_at_the_start(
    tmp_path: Path,
) -> None:
    authority, config = a_site(tmp_path)
    assert config.tls is not None
    key = Path(config.tls.key_file)
    other = authority.issue("other")
    for spoil, told in (
        (lambda: key.write_bytes(other.key.read_bytes()), "KEY_VALUES_MISMATCH"),
        (lambda: key.write_text("nonsense"), "not a certificate and its key"),
        (key.unlink, "router.tls.key_file: .* cannot be read: No such file"),
    ):
        spoil()
        with pytest.raises(ConfigError, match=told):
            Access(config)


def test_a_key_that_is_taken_away_while_it_is_read_leaves_what_was_read_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, config = a_site(tmp_path)
    assert config.tls is not None
    tls = ServerTls(config.tls)
    key = Path(config.tls.key_file)
    key.write_bytes(authority.issue("other").key.read_bytes())
    load = ssl.SSLContext.load_cert_chain

    def too_late(context: ssl.SSLContext, *files: str, password: str) -> None:
        key.unlink()
        load(context, *files, password=password)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", too_late)
    tls.look()
    assert not key.exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "green has no token"),
        ("two\none", "green and red have the same token"),
        ("caf\xe9", "is no text"),
        ("semi;colon", "green: a token is made of"),
    ],
)
def test_tokens_that_cannot_be_are_refused_at_the_start(
    tmp_path: Path, content: str, told: str
) -> None:
    _, config = a_site(tmp_path)
    (tmp_path / "tokens" / "red").write_text("one")
    (tmp_path / "tokens" / "green").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=told):
        Access(config)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[red, blue]", "a mapping from tenants to tokens"),
        ("red: 123", "put them into quotes"),
        ("red: one\nred: two", "red stands there twice"),
        ("red: 'secret", "not valid YAML$"),
        ("red: 2024-13-45", "not valid YAML$"),
        ("red: 0x_", "not valid YAML$"),
        ("[" * 5000, "not valid YAML$"),
    ],
)
def test_a_file_of_tokens_that_cannot_be_read_is_refused_and_not_quoted(
    tmp_path: Path, text: str, told: str
) -> None:
    (tmp_path / "tokens.yaml").write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        Access(RouterConfig(auth=AuthConfig(str(tmp_path / "tokens.yaml"))))
    assert "secret" not in caught.value.message


def test_what_changes_while_it_is_read_is_read_again_at_the_next_look(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    during: list[str] = []

    def read() -> str:
        text = file.read_text()
        if during:
            swap(file, during.pop().encode())
        return text

    reread = Reread(lambda: [file], read)
    swap(file, b"half")
    during.append("whole")
    reread.look()
    assert reread.value == "old"
    reread.look()
    assert reread.value == "whole"
