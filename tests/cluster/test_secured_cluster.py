"""`baton up` behind TLS and tokens."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest

from baton.client import Client
from baton.client.credentials import Tls, token_in
from baton.client.events import Tokens
from baton.config.router import AuthConfig, TlsConfig
from tests.certificates import Authority
from tests.cluster.up_command import brought_up, cluster, expected
from tests.cluster.whole_cluster import PROMPT

pytestmark = [pytest.mark.full, pytest.mark.cluster, pytest.mark.timeout(300)]


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
        with Client(address, tls=tls, token=token_in(str(token))) as client:
            events = list(
                client.generate(token_ids=PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True)
            )
            ids = [i for event in events if isinstance(event, Tokens) for i in event.ids]
            assert ids == expected(config, PROMPT, 8)
        os.killpg(up.process.pid, signal.SIGTERM)
        up.status(60)
