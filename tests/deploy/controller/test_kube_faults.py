"""Answers that no sound API server gives, and silence: each is an error with a name, in time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from kubernetes.client import Configuration

from deploy.controller.kit.connection import Connection
from deploy.controller.kit.errors import (
    StatusError,
    UnreachableError,
    WriteRefusedError,
)
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Resource, Selection
from deploy.controller.kit.watch_stream import WatchEventType, Window
from tests.deploy.controller.scripted_api import Exchange, kube_of, scripted
from tests.deploy.controller.things import CONFIG_MAPS, config_map, gone

_KEY = Key("n", "a")
_WINDOW = Window(watch_s=5, grace_s=1)


def watched(kube: Kube, window: Window = _WINDOW) -> list[WatchEventType]:
    with kube.watch(CONFIG_MAPS, Selection("n"), "1", window) as stream:
        return [event.type for event in stream]


@pytest.mark.parametrize(
    ("body", "status", "error", "words"),
    [
        (b"<html>Welcome</html>", 200, UnreachableError, r"no API server's answer.*Welcome"),
        (b"bad gateway", 502, StatusError, "GET /api/v1/namespaces/n/configmaps/a: bad gateway"),
    ],
)
def test_what_a_proxy_says_is_no_answer(
    body: bytes, status: int, error: type[Exception], words: str
) -> None:
    with (
        scripted(lambda exchange: exchange.answer(body, status)) as server,
        pytest.raises(error, match=words),
    ):
        kube_of(server).get(CONFIG_MAPS, _KEY)


def test_a_busy_server_says_when_to_come_back() -> None:
    def busy(exchange: Exchange) -> None:
        exchange.answer(b"Too many requests, please try again later.", 429, {"Retry-After": "7"})

    with scripted(busy) as server, pytest.raises(StatusError, match=r"try again.*429") as refused:
        kube_of(server).get(CONFIG_MAPS, _KEY)
    assert refused.value.retry_after_s == 7


@pytest.mark.parametrize("verb", ["get", "delete", "merge_patch"])
def test_silence_ends_within_the_timeout_and_nothing_is_sent_twice(verb: str) -> None:
    with scripted(Exchange.hang) as server:
        kube = kube_of(server, read_s=0.2)
        calls: dict[str, Callable[[], object]] = {
            "get": lambda: kube.get(CONFIG_MAPS, _KEY),
            "delete": lambda: kube.delete(CONFIG_MAPS, _KEY),
            "merge_patch": lambda: kube.merge_patch(CONFIG_MAPS, _KEY, {}),
        }
        began_at = time.monotonic()
        with pytest.raises(UnreachableError, match="timed out"):
            calls[verb]()
        assert 0.2 <= time.monotonic() - began_at < 10
        assert len(server.requests) == 1


def test_after_silence_the_next_call_takes_a_new_connection() -> None:
    is_silent = False

    def script(exchange: Exchange) -> None:
        if is_silent and exchange.path.endswith("/silent"):
            exchange.hang()
        exchange.answer(config_map(_KEY))

    with scripted(script) as server:
        kube = kube_of(server, read_s=0.1)
        kube.get(CONFIG_MAPS, _KEY)
        kube.get(CONFIG_MAPS, _KEY)
        assert server.num_connections == 1, "a sound one is used again"
        is_silent = True
        with pytest.raises(UnreachableError):
            kube.get(CONFIG_MAPS, Key("n", "silent"))
        kube.get(CONFIG_MAPS, _KEY)
        assert server.num_connections == 2


def test_a_refused_connection_is_unreachable() -> None:
    with scripted(Exchange.hang) as server:
        kube = kube_of(server)
    with pytest.raises(UnreachableError, match="refused"):
        kube.get(CONFIG_MAPS, _KEY)


def test_a_watch_that_is_too_old_says_so_also_within_the_stream() -> None:
    def script(exchange: Exchange) -> None:
        exchange.begin_stream({"type": "ERROR", "object": gone()})
        exchange.end_stream()

    with scripted(script) as server, pytest.raises(StatusError, match="too old resource version"):
        watched(kube_of(server))
    with (
        scripted(lambda exchange: exchange.answer(gone(), 410)) as server,
        pytest.raises(StatusError, match="too old resource version"),
    ):
        watched(kube_of(server))


def test_an_event_may_come_in_pieces_and_several_in_one() -> None:
    def script(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.send_piece(b'{"type": "ADDED", "obj')
        exchange.send_piece(b'ect": {}}\n{"type": "BOOKMARK", "object": {}}\n{"type"')
        exchange.send_piece(b': "DELETED", "object": {}}\n')
        exchange.end_stream()

    with scripted(script) as server:
        types = watched(kube_of(server))
    assert types == [WatchEventType.ADDED, WatchEventType.BOOKMARK, WatchEventType.DELETED]


@pytest.mark.parametrize(
    "piece",
    [
        b'{"type": "ADDED", "object"',
        b"<html>\n",
        b'{"type": "NEW", "object": {}}\n',
        b"[]\n",
        None,
    ],
)
def test_what_is_no_event_or_a_connection_that_breaks_ends_a_watch(piece: bytes | None) -> None:
    def script(exchange: Exchange) -> None:
        exchange.begin_stream({"type": "ADDED", "object": {}})
        if piece is None:
            exchange.close_connection = True
            return
        exchange.send_piece(piece)
        exchange.end_stream()

    with scripted(script) as server, pytest.raises(UnreachableError):
        watched(kube_of(server))


def test_a_silent_watch_ends_when_the_server_should_have_ended_it() -> None:
    def script(exchange: Exchange) -> None:
        exchange.begin_stream({"type": "ADDED", "object": {}})
        exchange.hang()

    with scripted(script) as server:
        began_at = time.monotonic()
        with pytest.raises(UnreachableError, match="timed out"):
            watched(kube_of(server), Window(watch_s=0, grace_s=0.2))
        assert 0.2 <= time.monotonic() - began_at < 10
        assert "timeoutSeconds=0" in server.requests[0]
        assert "allowWatchBookmarks=true" in server.requests[0]


def test_who_may_not_write_reads_on_and_sends_no_write() -> None:
    with scripted(lambda exchange: exchange.answer(config_map(_KEY))) as server:
        kube = kube_of(server)
        guarded = kube.guarded(lambda: False)
        guarded.get(CONFIG_MAPS, _KEY)
        for write in (
            lambda: guarded.create(CONFIG_MAPS, config_map(_KEY)),
            lambda: guarded.apply(CONFIG_MAPS, config_map(_KEY), force=True),
            lambda: guarded.merge_patch(CONFIG_MAPS, _KEY, {}),
            lambda: guarded.delete(CONFIG_MAPS, _KEY),
        ):
            with pytest.raises(WriteRefusedError):
                write()
        kube.merge_patch(CONFIG_MAPS, _KEY, {})
        assert [request.split()[0] for request in server.requests] == ["GET", "PATCH"]


def test_each_call_shows_the_token_as_it_is_by_then() -> None:
    shown: list[str] = []
    tokens = iter(["zeroth", "first", "second"])

    def script(exchange: Exchange) -> None:
        shown.append(exchange.headers["Authorization"])
        exchange.answer(config_map(_KEY))

    with scripted(script) as server:
        configuration = Configuration(host=f"http://127.0.0.1:{server.server_port}")
        configuration.proxy = None

        def renew(configuration: Configuration) -> None:
            configuration.api_key["authorization"] = f"Bearer {next(tokens)}"

        renew(configuration)
        configuration.refresh_api_key_hook = renew  # type: ignore[assignment]
        kube = Kube(Connection(configuration), "test")
        kube.get(CONFIG_MAPS, _KEY)
        with kube.watch(CONFIG_MAPS, Selection("n"), "1", _WINDOW):
            pass
    assert shown == ["Bearer first", "Bearer second"]


def test_a_name_cannot_lead_to_another_path() -> None:
    pods = Resource("", "v1", "pods")
    assert pods.path_of(Key("n", "a/../b?x=1")) == "/api/v1/namespaces/n/pods/a%2F..%2Fb%3Fx%3D1"
    for name in ("", ".", ".."):
        with pytest.raises(AssertionError):
            pods.path_of(Key("n", name))


def test_paths_of_groups_subresources_and_kinds_without_namespace() -> None:
    pools = Resource("baton.dev", "v1alpha1", "workerpools")
    path = pools.path_of(Key("n", "decode"), "scale")
    assert path == "/apis/baton.dev/v1alpha1/namespaces/n/workerpools/decode/scale"
    assert pools.path_of_all(None) == "/apis/baton.dev/v1alpha1/workerpools"
    nodes = Resource("", "v1", "nodes", namespaced=False)
    assert nodes.path_of(Key("", "one")) == "/api/v1/nodes/one"
