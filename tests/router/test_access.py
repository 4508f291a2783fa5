"""TLS and bearer tokens at the router's port, with real certificates, by Baton's own client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from baton.client import AsyncClient
from baton.client.credentials import Tls, token_in
from baton.client.request_stream import build_request
from baton.config.cluster import ClusterConfig, load_config
from baton.config.router import AuthConfig, RouterConfig, TlsConfig
from baton.config.settings import changed
from baton.errors import (
    AlreadyExistsError,
    BatonError,
    ConfigError,
    HandshakeError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from baton.reread import Reread
from baton.v1 import router_pb2, router_pb2_grpc
from router.__main__ import operator_port
from router.door.connections import credentials
from router.door.connections.credentials import Credentials
from tests.certificates import Authority, swap
from tests.router.answers import PROMPT, ask_for, error_of, error_reason
from tests.router.deployment import deployment
from tests.router.scripted_worker import MODEL
from tests.router.secured import BLUE, RED, Site, secured


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(credentials, "_LOOK_S", 0.01)
    authority = Authority(tmp_path)
    async with deployment(**secured(tmp_path, authority)) as d:
        yield Site(d, authority, tmp_path / "tokens")


async def until_it_ends_with(kind: type[BatonError], ask: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                await ask()
            except kind:
                return
            await asyncio.sleep(0.01)


async def until_it_is_done(ask: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(BatonError):
                await ask()
                return
            await asyncio.sleep(0.01)


async def models_at(site: Site, **how: Any) -> list[str]:
    """Over a connection of its own."""
    async with site.client(**how) as client:
        return [model.name for model in await client.models()]


async def test_whoever_trusts_the_authority_and_has_a_token_is_answered(site: Site) -> None:
    async with site.client() as client:
        assert await client.text(PROMPT, max_tokens=4, seed=7)
        assert [model.name for model in await client.models()] == [MODEL]
        assert await client.tokenize("ab") == [97, 98]
        assert await client.explain(build_request(PROMPT))
        assert (await client.fleet()).workers
    await site.d.check_empty()


async def test_without_a_known_token_nothing_is_served_but_health_and_reflection(
    site: Site,
) -> None:
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
    for token in (None, "", "guess", RED[:-1], f"{RED}x"):
        async with grpc.aio.secure_channel(site.address, site.tls.credentials()) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            metadata = () if token is None else (("authorization", f"Bearer {token}"),)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(ask_for(PROMPT), metadata=metadata):
                    pass
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert error_reason(caught.value) == "UNAUTHENTICATED"
            short = (
                stub.ListModels(router_pb2.ListModelsRequest(), metadata=metadata),
                stub.Abort(router_pb2.AbortRequest(request_id="x"), metadata=metadata),
            )
            for call in short:
                assert (await error_of(call)).code() is grpc.StatusCode.UNAUTHENTICATED
            for service in (f"grpc.reflection.{v}.ServerReflection" for v in ("v1alpha", "v1")):
                reflect: Any = channel.stream_stream(
                    f"/{service}/ServerReflectionInfo",
                    request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                )
                assert service.encode() in await reflect(iter(asked)).read()
            health = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest()
            )
            assert health.status == health.SERVING
    assert site.d.worker("d0").num_reserves == 0


async def test_a_token_speaks_for_its_own_tenant_alone(site: Site) -> None:
    async with site.client(RED) as red, site.client(BLUE) as blue:
        with pytest.raises(PermissionDeniedError) as caught:
            await red.text(PROMPT, tenant="blue")
        assert caught.value.field == "tenant"
        with pytest.raises(PermissionDeniedError) as caught:
            await red.explain(build_request(PROMPT, tenant="blue"))
        assert caught.value.field == "request.tenant"
        for ask in (red.abort("r1", tenant="blue"), red.tokenize("ab", tenant="blue")):
            with pytest.raises(PermissionDeniedError):
                await ask
        assert site.d.worker("d0").num_reserves == 0
        assert await red.text(PROMPT, tenant="red", max_tokens=2)
        assert await blue.text(PROMPT, max_tokens=2)


async def test_no_tenant_ends_another_s_request_nor_meets_it(site: Site) -> None:
    worker = site.d.worker("d0")
    worker.may_decode.clear()
    async with site.client(RED) as red, site.client(BLUE) as blue:
        asking = asyncio.create_task(red.text(PROMPT, request_id="r1", max_tokens=4))
        await site.d.until(lambda: bool(worker.runs))
        assert set(worker.runs) == {"red/r1"}
        with pytest.raises(NotFoundError):
            await blue.abort("r1")
        with pytest.raises(AlreadyExistsError):
            await red.text("another prompt", request_id="r1")
        assert not worker.cancels
        worker.may_decode.set()
        assert await asking
        assert await blue.text("another prompt", request_id="r1", max_tokens=2)
    await site.d.check_empty()


async def test_an_authority_that_is_not_trusted_is_named_as_the_cause(
    site: Site, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "strangers", "stranger")
    with pytest.raises(HandshakeError, match="not trusted: unable to get local issuer"):
        await models_at(site, tls=Tls(ca_file=str(stranger.ca)))
    async with AsyncClient(site.address, token=RED) as plain:
        with pytest.raises(HandshakeError, match="it may want TLS"):
            await plain.text(PROMPT)
    assert await models_at(site) == [MODEL]


async def test_a_certificate_of_another_name_is_refused_unless_that_name_is_expected(
    site: Site,
) -> None:
    site.authority.issue("router", host="router.example")
    ask = lambda: models_at(site)  # noqa: E731
    await until_it_ends_with(HandshakeError, ask)
    with pytest.raises(HandshakeError, match="of another name"):
        await ask()
    named = Tls(ca_file=str(site.authority.ca), server_name="router.example")
    assert await models_at(site, tls=named) == [MODEL]


async def test_tokens_go_over_to_the_next_while_the_router_runs(site: Site, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.write_text(RED)
    async with AsyncClient(site.address, tls=site.tls, token=token_in(str(held))) as client:
        assert await client.models()
        swap(site.tokens / "red", f"{RED}\nred-token-2\n".encode())
        await until_it_is_done(lambda: models_at(site, token="red-token-2"))
        assert await client.models()  # both are good
        swap(site.tokens / "red", b"red-token-2")
        await until_it_ends_with(UnauthenticatedError, client.models)
        held.write_text("red-token-2")
        assert await client.models()
        (site.tokens / "red").unlink()
        await until_it_ends_with(UnauthenticatedError, client.models)
        assert await models_at(site, token=BLUE)


async def test_tokens_that_cannot_be_read_change_nothing_and_are_logged(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    swap(site.tokens / "green", RED.encode())
    await site.d.until(lambda: "stays in force" in caplog.text)
    assert "green and red have the same token" in caplog.text
    assert RED not in caplog.text
    assert await models_at(site)
    swap(site.tokens / "green", b"green-token")
    await until_it_is_done(lambda: models_at(site, token="green-token"))


async def test_the_certificate_is_replaced_while_the_router_runs_and_streams_go_on(
    site: Site, tmp_path: Path
) -> None:
    worker = site.d.worker("d0")
    worker.may_decode.clear()
    async with site.client() as client:
        asking = asyncio.create_task(client.text(PROMPT, max_tokens=8, seed=7))
        await site.d.until(lambda: bool(worker.runs))
        successor = Authority(tmp_path / "successor")  # of the same name
        made = successor.issue("router")
        # Key and certificate do not change in one moment: what does not fit is never shown.
        swap(tmp_path / "router.key", made.key.read_bytes())
        swap(tmp_path / "router.crt", made.certificate.read_bytes())
        trusting = Tls(ca_file=str(successor.ca))
        await until_it_is_done(lambda: models_at(site, tls=trusting))
        with pytest.raises(HandshakeError, match="not trusted"):
            await models_at(site)
        worker.may_decode.set()
        assert await asking
    await site.d.check_empty()


async def test_clients_without_a_certificate_of_theirs_are_left_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose authority may be replaced meanwhile."""
    monkeypatch.setattr(credentials, "_LOOK_S", 0.01)
    authority, clients = Authority(tmp_path), Authority(tmp_path / "clients")
    settings = secured(tmp_path, authority, client_ca_file=str(clients.ca)) | {"health_port": 0}
    async with deployment(**settings) as d:
        site = Site(d, authority, tmp_path / "tokens")
        with pytest.raises(HandshakeError, match="a client's certificate"):
            await models_at(site)

        def shown(issuer: Authority) -> Tls:
            own = issuer.issue("someone")
            return Tls(str(authority.ca), str(own.certificate), str(own.key))

        assert await models_at(site, tls=shown(clients)) == [MODEL]
        successor = Authority(tmp_path / "successor")
        for unknown in (authority, successor):
            with pytest.raises(HandshakeError):
                await models_at(site, tls=shown(unknown))
        swap(clients.ca, successor.ca.read_bytes())
        await until_it_is_done(lambda: models_at(site, tls=shown(successor)))
        with pytest.raises(HandshakeError):
            await models_at(site, tls=shown(clients))


async def test_probes_ask_health_in_plain_text_at_a_port_where_nothing_else_is(
    tmp_path: Path,
) -> None:
    settings = secured(tmp_path, Authority(tmp_path)) | {"health_port": 0}
    async with deployment(**settings) as d:
        port = d.servers[0].health_port
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest()
            )
            assert health.status == health.SERVING
            stub = router_pb2_grpc.RouterServiceStub(channel)
            assert (
                await error_of(stub.ListModels(router_pb2.ListModelsRequest()))
            ).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_tokens_are_wanted_without_tls_too(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(f"red: {RED}\nblue: |\n  {BLUE}\n  blue-token-2\n")
    async with deployment(auth=AuthConfig(str(file))) as d:
        address = d.servers[0].address
        async with AsyncClient(address) as nobody, AsyncClient(address, token=BLUE) as blue:
            with pytest.raises(UnauthenticatedError):
                await nobody.models()
            assert await blue.text(PROMPT, max_tokens=2)


async def test_a_tenant_gets_what_it_is_granted_and_operators_alone_see_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = "{tokens: [T], most_urgent_priority: -2, default_max_tokens: 3, largest_max_tokens: 5}"
    for name, text in (("red", RED), ("ops", "ops-token"), ("b.yaml", f"blue: {limits}")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o640 if name == "red" else 0o600)
    config = changed(RouterConfig(), metrics={"port": 0}, auth=AuthConfig(str(tmp_path), ("ops",)))
    async with deployment(auth=config.auth) as d, contextlib.AsyncExitStack() as stack:
        assert re.findall(r"(\S+) holds a secret", caplog.text) == [str(tmp_path / "red")]
        made = [AsyncClient(d.servers[0].address, token=token) for token in ("T", RED, "ops-token")]
        blue, red, ops = [await stack.enter_async_context(client) for client in made]
        await blue.text(PROMPT, priority=-9)
        await red.text(PROMPT, priority=-9, max_tokens=6)
        asked = [run.spec for run in d.worker("d0").finished.values()]
        assert [(spec.priority, spec.sampling.max_tokens) for spec in asked] == [(-2, 3), (0, 6)]
        for name in ("max_tokens", "min_tokens"):
            with pytest.raises(InvalidRequestError, match="exceeds the 5") as caught:
                await blue.text(PROMPT, **{name: 6})
            assert caught.value.field == f"sampling.{name}"
        assert all(worker.info.address for worker in (await ops.fleet()).workers)
        seen = (await red.fleet()).workers
        assert [worker.info.ref.worker_id for worker in seen] == ["p0", "d0"]
        assert not any(worker.info.address or worker.HasField("load") for worker in seen)
        server = operator_port(config, d.servers[0].units, d.servers[0].api.callers)
        assert server is not None
        await server.start()
        stack.push_async_callback(server.stop)
        basic = f"Basic {base64.b64encode(b'me:ops-token').decode()}"
        sent = {"": 401, f"Bearer {RED}": 403, "Bearer ops-token": 200, basic: 200}
        for path in ("/", "/metrics", "/events"):
            for header, status in sent.items():
                url = f"http://127.0.0.1:{server.port}{path}"
                assert await asyncio.to_thread(status_of, url, header) == status


def status_of(url: str, authorization: str) -> int:
    request = urllib.request.Request(url, headers={"Authorization": authorization})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_relative_files_are_those_beside_the_cluster_file(tmp_path: Path) -> None:
    config = RouterConfig(
        tls=TlsConfig("tls.crt", "/keys/tls.key", "ca.crt"), auth=AuthConfig("tokens")
    )
    file = tmp_path / "cluster.yaml"
    file.write_text(ClusterConfig(router=config).to_yaml())
    loaded = load_config(file).router
    assert loaded.tls == TlsConfig(f"{tmp_path}/tls.crt", "/keys/tls.key", f"{tmp_path}/ca.crt")
    assert loaded.auth == AuthConfig(f"{tmp_path}/tokens")


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
    for spoil, message in (
        (lambda: key.write_bytes(other.key.read_bytes()), "KEY_VALUES_MISMATCH"),
        (lambda: key.write_text("nonsense"), "not a certificate and its key"),
        (key.unlink, "router.tls.key_file: .* cannot be read: No such file"),
    ):
        spoil()
        with pytest.raises(ConfigError, match=message):
            Credentials(config)


def test_a_key_that_is_taken_away_while_it_is_read_leaves_what_was_read_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, config = a_site(tmp_path)
    assert config.tls is not None
    credentials = Credentials(config)
    key = Path(config.tls.key_file)
    key.write_bytes(authority.issue("other").key.read_bytes())
    load = ssl.SSLContext.load_cert_chain

    def too_late(context: ssl.SSLContext, *files: str, password: str) -> None:
        key.unlink()
        load(context, *files, password=password)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", too_late)
    credentials.look()
    assert not key.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "green has no token"),
        ("two\none", "green and red have the same token"),
        ("caf\xe9", "not a text file"),
        ("semi;colon", "green: a token is made of"),
    ],
)
def test_tokens_that_cannot_be_are_refused_at_the_start(
    tmp_path: Path, content: str, message: str
) -> None:
    _, config = a_site(tmp_path)
    (tmp_path / "tokens" / "red").write_text("one")
    (tmp_path / "tokens" / "green").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=message):
        Credentials(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[red, blue]", "a mapping from tenants to tokens"),
        ("red: 123", "put them into quotes"),
        ("red: {tokens: [secret, {}]}", "put them into quotes"),
        ("red: {default_max_tokens: 1}", "red has no token"),
        ("red: {tokens: secret, largest_tokens: 1}", "red.largest_tokens: .*'largest_max_tokens'"),
        ("red: one\nred: two", "key red is given twice"),
        ("red: 'secret", "not valid YAML$"),
        ("red: 2024-13-45", "not valid YAML$"),
        ("red: 0x_", "not valid YAML$"),
        ("[" * 5000, "not valid YAML$"),
    ],
)
def test_a_file_of_tokens_that_cannot_be_read_is_refused_and_not_quoted(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "tokens.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        Credentials(RouterConfig(auth=AuthConfig(str(tmp_path / "tokens.yaml"))))
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
