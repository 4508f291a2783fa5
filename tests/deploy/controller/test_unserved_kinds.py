"""An informer of a kind that the server does not serve: others install it, or never do."""

from __future__ import annotations

import threading

from deploy.controller.kit.objects import Key
from tests.deploy.controller.following import TIMEOUT_S, following, until
from tests.deploy.controller.scripted_api import Exchange, kube_of, scripted
from tests.deploy.controller.things import config_map, config_map_list, gone

_A = Key("n", "a")


class Kind:
    """Served from `install` to `remove`, with one object; a watch lasts for as long."""

    def __init__(self) -> None:
        self._installed, self._removed = threading.Event(), threading.Event()

    def install(self) -> None:
        self._installed.set()

    def remove(self) -> None:
        self._removed.set()

    def __call__(self, exchange: Exchange) -> None:
        if not self._installed.is_set() or self._removed.is_set():
            exchange.answer(b"404 page not found", 404)
        elif exchange.is_watch:
            exchange.begin_stream()
            assert self._removed.wait(TIMEOUT_S)
            exchange.end_stream()
        else:
            exchange.answer(config_map_list(config_map(_A, version="1"), version="10"))


def test_a_kind_of_others_is_known_to_have_nothing_and_followed_from_when_it_is_served() -> None:
    kind = Kind()
    with scripted(kind) as server, following(kube_of(server), is_of_others=True) as heard:
        assert heard.informer.wait_synced(TIMEOUT_S)
        assert not heard.informer.is_served
        assert not heard.informer.snapshot()
        kind.install()
        assert heard.next() == "a"
        assert heard.informer.is_served
        kind.remove()
        assert heard.next() == "a", "what it had is gone"
        assert heard.informer.get(_A) is None
        assert not heard.informer.is_served


def test_a_list_that_does_not_find_the_kind_once_takes_nothing_away() -> None:
    """As of a server that has just started, or a proxy."""
    served = config_map_list(config_map(_A, version="1"), version="10")
    lists: list[tuple[object, int]] = [(served, 200), (b"404 page not found", 404), (served, 200)]
    states = []

    def script(exchange: Exchange) -> None:
        if exchange.is_watch and lists:
            exchange.answer(gone(), 410)
        elif exchange.is_watch:
            exchange.begin_stream()
            exchange.hang()
        else:
            states.append((heard.informer.is_served, len(heard.informer.snapshot())))
            exchange.answer(*lists.pop(0))

    with scripted(script) as server, following(kube_of(server), is_of_others=True) as heard:
        until(lambda: len(states) == 3, "a list after the one that found nothing")
        assert heard.rest() == ["a"], "it was there all the time"
    assert states[1:] == [(True, 1)] * 2


def test_nothing_is_known_without_a_kind_of_our_own() -> None:
    with scripted(Kind()) as server, following(kube_of(server)) as heard:
        until(lambda: len(server.requests) >= 3, "it is asked for again and again")
        assert not heard.informer.wait_synced(0)
