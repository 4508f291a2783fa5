"""`baton up` behind TLS and tokens, asked by the commands that people have."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.client import Client
from baton.client.credentials import Tls, token_in
from baton.client.events import Tokens
from baton.config.router import AuthConfig, TlsConfig
from baton.errors import UnauthenticatedError
from tests.certificates import Authority, swap
from tests.cluster.up_command import brought_up, cluster, expected
from tests.cluster.whole_cluster import PROMPT

pytestmark = [pytest.mark.full, pytest.mark.cluster, pytest.mark.timeout(300)]


def generate(address: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "cli.main", "generate", "--raw", "hello"),
            *("--max-tokens", "5", "--temperature", "0", "--router", address, *options),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )


def until_refused(client: Client) -> None:
    """The test's time limit bounds the wait."""
    while True:
        try:
            client.models()
        except UnauthenticatedError:
            return
        time.sleep(0.05)


def test_a_cluster_behind_tls_and_tokens_answers_those_who_have_them(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    made = authority.issue("router")
    token = tmp_path / "tokens" / "red"
    token.parent.mkdir()
    token.write_text("red-token-1")
    config = cluster(tmp_path, drain_timeout_s=5.0)
    routing = dataclasses.replace(
        config.router,
        tls=TlsConfig(str(made.certificate), str(made.key)),
        auth=AuthConfig(str(token.parent)),
    )
    config = dataclasses.replace(config, router=routing)
    tls = Tls(ca_file=str(authority.ca))
    with brought_up(config, tmp_path) as up:
        address = up.until_printed("is served at").split()[-1]
        up.until_printed("try: baton generate --tls-ca FILE --token-file FILE ")
        shown = ("--tls-ca", str(authority.ca), "--token-file", str(token))
        answered = generate(address, *shown)
        assert answered.returncode == 0, answered.stderr
        assert answered.stdout.strip()
        for options, reported in ((shown[:2], "bearer token"), (shown[2:], "it may want TLS")):
            refused = generate(address, *options)
            assert refused.returncode != 0
            assert reported in " ".join(refused.stderr.split())
            assert "ssl_transport_security" not in refused.stderr
        with Client(address, tls=tls, token=token_in(str(token))) as client:
            events = list(
                client.generate(token_ids=PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True)
            )
            ids = [i for event in events if isinstance(event, Tokens) for i in event.ids]
            assert ids == expected(config, PROMPT, 8)
            (held := tmp_path / "held").write_text("red-token-1")
            swap(token, b"red-token-2")
            with Client(address, tls=tls, token=token_in(str(held))) as late:
                until_refused(late)
            assert client.models()
        os.killpg(up.process.pid, signal.SIGTERM)
        up.status(60)
