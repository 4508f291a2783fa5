"""An informer before a server that misbehaves: nothing is missed, nothing is asked in a loop."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from baton.pacing import Backoff
from deploy.controller.kit.informer import Informer
from deploy.controller.kit.objects import Key, Object
from tests.deploy.controller.following import FAST, TIMEOUT_S, Heard, following, until
from tests.deploy.controller.scripted_api import Exchange, kube_of, scripted
from tests.deploy.controller.things import CONFIG_MAPS, config_map, config_map_list, gone

_A, _B = Key("n", "a"), Key("n", "b")


def event(type_: str, obj: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": type_, "object": obj}


def bookmark(version: str) -> dict[str, Any]:
    return event("BOOKMARK", {"kind": "ConfigMap", "metadata": {"resourceVersion": version}})


class Script:
    """Answers each list and each watch with the next thing that was given for it, the last one
    again and again."""

    def __init__(self, lists: list[Any], watches: list[Any]) -> None:
        self._lists, self._watches = lists, watches
        self.watched_from: list[str] = []
        self.num_lists = 0

    def __call__(self, exchange: Exchange) -> None:
        if not exchange.is_watch:
            self.num_lists += 1
            answer = self._lists.pop(0) if len(self._lists) > 1 else self._lists[0]
            exchange.answer(*answer) if isinstance(answer, tuple) else exchange.answer(answer)
            return
        self.watched_from.append(exchange.query["resourceVersion"])
        events = self._watches.pop(0) if len(self._watches) > 1 else self._watches[0]
        exchange.begin_stream(*events)
        if not self._watches[0] and not events:
            exchange.hang()
        exchange.end_stream()


def test_a_window_begins_where_the_last_event_or_bookmark_was() -> None:
    a2 = config_map(_A, {"x": "2"}, version="20")
    script = Script(
        lists=[config_map_list(config_map(_A, {"x": "1"}, version="9"), version="10")],
        watches=[[event("MODIFIED", a2)], [bookmark("30")], []],
    )
    with scripted(script) as server, following(kube_of(server)) as heard:
        heard.until_data_is(_A, {"x": "2"})
        until(lambda: len(script.watched_from) >= 3, "a third window")
        assert script.watched_from[:3] == ["10", "20", "30"]
        assert script.num_lists == 1


@pytest.mark.parametrize("refusal", [event("ERROR", gone()), event("ERROR", {"code": 500})])
def test_a_server_that_cannot_go_on_is_listed_again_and_what_was_deleted_is_noticed(
    refusal: dict[str, Any],
) -> None:
    script = Script(
        lists=[
            config_map_list(config_map(_A, version="1"), config_map(_B, version="2"), version="10"),
            config_map_list(config_map(_B, version="2"), version="90"),
        ],
        watches=[[refusal], []],
    )
    with scripted(script) as server, following(kube_of(server)) as heard:
        assert [heard.next(), heard.next()] == ["a", "b"]
        assert heard.next() == "a"
        assert heard.informer.get(_A) is None
        until(lambda: len(script.watched_from) >= 2, "a second window")
        assert script.watched_from[:2] == ["10", "90"]
        assert heard.rest() == [], "what is as it was is not told again"


def test_lists_that_fail_are_tried_again_later_and_later() -> None:
    settings = dataclasses.replace(FAST, backoff=Backoff(first_s=0.05, longest_s=0.4))
    script = Script(
        lists=[({"code": 500}, 500)] * 3 + [config_map_list(config_map(_A, version="1"))],
        watches=[[]],
    )
    with scripted(script) as server:
        began_at = time.monotonic()
        with following(kube_of(server), settings=settings) as heard:
            assert not heard.informer.wait_synced(0)
            assert heard.next() == "a"
            assert heard.informer.wait_synced(TIMEOUT_S)
        assert time.monotonic() - began_at >= 0.025 + 0.05 + 0.1
    assert script.num_lists == 4


def test_a_server_that_ends_each_window_at_once_is_not_asked_in_a_loop() -> None:
    settings = dataclasses.replace(FAST, backoff=Backoff(first_s=0.4, longest_s=0.4))

    def script(exchange: Exchange) -> None:
        if not exchange.is_watch:
            exchange.answer(config_map_list())
            return
        exchange.begin_stream()
        exchange.end_stream()

    with scripted(script) as server, following(kube_of(server), settings=settings) as heard:
        assert heard.informer.wait_synced(TIMEOUT_S)
        until(lambda: len(server.requests) >= 4, "a third window")
        began_at = time.monotonic()
        until(lambda: len(server.requests) >= 5, "a fourth window")
        assert time.monotonic() - began_at >= 0.15


def test_a_handler_that_fails_takes_nothing_from_the_others() -> None:
    names = [Key("n", name) for name in "abc"]
    items = [config_map(key, version="1") for key in names]
    heard: list[str] = []
    all_heard = threading.Event()

    def handle(key: Key) -> None:
        if key.name == "a":
            raise ValueError("a bug")
        heard.append(key.name)
        if key.name == "c":
            all_heard.set()

    with scripted(Script([config_map_list(*items)], [[]])) as server:
        informer = Informer(kube_of(server), CONFIG_MAPS, settings=FAST)
        informer.add_handler(handle)
        informer.start()
        assert all_heard.wait(TIMEOUT_S)
        assert informer.wait_synced(TIMEOUT_S)
        assert informer.stop()
    assert heard == ["b", "c"]


def test_an_owner_that_lost_an_object_hears_of_it_too() -> None:
    def owned_by(owner: str, version: str) -> dict[str, Any]:
        return config_map(_A, {"owner": owner}, version=version)

    def owner_of(obj: Object) -> list[Key]:
        return [Key("n", obj["data"]["owner"])]

    script = Script(
        lists=[config_map_list(owned_by("x", "1"), version="1")],
        watches=[[event("MODIFIED", owned_by("y", "2"))], [event("DELETED", owned_by("y", "3"))]],
    )
    heard: list[str] = []
    with scripted(script) as server:
        informer = Informer(kube_of(server), CONFIG_MAPS, settings=FAST)
        informer.add_handler(lambda key: heard.append(key.name), owner_of)
        informer.start()
        until(lambda: len(heard) >= 4, "x, then x and y, then y")
        assert informer.stop()
    assert heard[:4] == ["x", "x", "y", "y"]


@pytest.mark.parametrize("silent_at", ["watch", "list", "back-off"])
def test_a_stop_takes_less_than_a_second(silent_at: str) -> None:
    settings = dataclasses.replace(FAST, backoff=Backoff(first_s=60, longest_s=60))

    def script(exchange: Exchange) -> None:
        if silent_at == "back-off":
            exchange.answer({}, 500)
        elif silent_at == "list" or exchange.is_watch:
            if exchange.is_watch:
                exchange.begin_stream()
            exchange.hang()
        else:
            exchange.answer(config_map_list())

    with scripted(script) as server:
        informer = Informer(kube_of(server, read_s=3), CONFIG_MAPS, settings=settings)
        Heard(informer)
        informer.start()
        asked = 2 if silent_at == "watch" else 1
        until(lambda: len(server.requests) == asked, "the request that hangs")
        began_at = time.monotonic()
        has_ended = informer.stop()
        assert time.monotonic() - began_at < 2.5
        assert has_ended == (silent_at != "list")
    if not has_ended:
        until(informer.stop, "the end of the list's timeout")
