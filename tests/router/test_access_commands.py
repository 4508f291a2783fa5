"""`baton generate` and its like, at a router behind TLS and tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli.main import main
from tests.certificates import Authority
from tests.router.deployment import deployment
from tests.router.secured import BLUE, RED, Site, secured

Capture = pytest.CaptureFixture[str]


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    for name in ("BATON_TOKEN", "BATON_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    authority = Authority(tmp_path)
    async with deployment(**secured(tmp_path, authority)) as d:
        yield Site(d, authority, tmp_path / "tokens")


async def generate(site: Site, *options: str) -> int:
    words = ["generate", "--raw", "hello", "--router", site.address, "--max-tokens", "3"]
    return await asyncio.to_thread(main, [*words, *options])


async def test_an_authority_and_a_token_s_file_are_all_it_takes(
    site: Site, capsys: Capture
) -> None:
    token = str(site.tokens / "red")
    assert await generate(site, "--tls-ca", str(site.authority.ca), "--token-file", token) == 0
    assert capsys.readouterr().out.strip()


async def test_both_may_be_in_the_environment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_TLS_CA", str(site.authority.ca))
    monkeypatch.setenv("BATON_TOKEN", BLUE)
    assert await generate(site) == 0
    explain = ["explain", "--raw", "hello", "--router", site.address]
    assert await asyncio.to_thread(main, explain) == 0


async def test_what_is_missing_is_named_with_the_option_that_gives_it(
    site: Site, tmp_path: Path, capsys: Capture
) -> None:
    ca = str(site.authority.ca)
    stranger = Authority(tmp_path / "strangers", "stranger")
    (tmp_path / "guess").write_text("guess")
    for options, code, message in (
        ((), 3, "it may want TLS"),
        ((), 3, "--tls-ca FILE"),
        (("--tls-ca", str(stranger.ca)), 3, "certificate is not trusted"),
        (("--tls-ca", ca), 1, "wants a bearer token"),
        (("--tls-ca", ca), 1, "--token-file"),
        (("--tls-ca", ca, "--token-file", str(tmp_path / "guess")), 1, "not know the bearer token"),
        (("--tls-ca", ca, "--token-file", str(tmp_path / "none")), 2, "none cannot be read"),
        (("--tls-ca", str(tmp_path / "none")), 2, "none cannot be read"),
        (("--tls-cert", ca), 2, "certificate and its key are needed together"),
    ):
        assert await generate(site, *options) == code
        assert message in " ".join(capsys.readouterr().err.split())


async def test_no_token_is_ever_shown(site: Site, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "two").write_text(f"{RED} {BLUE}")
    ca = ("--tls-ca", str(site.authority.ca))
    assert await generate(site, *ca, "--token-file", str(tmp_path / "two")) == 2
    shown = capsys.readouterr()
    assert "must be one word" in shown.err
    assert RED not in shown.out + shown.err
