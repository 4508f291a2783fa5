"""An informer on a real API server that goes away, and behind a proxy that cuts it off. In the end
it knows what there is."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.controller.kit.errors import NotFoundError
from deploy.controller.kit.informer import Informer, InformerSettings
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Object, Selection, key_of, resource_version_of
from tests.deploy.controller.following import FAST, Heard, following
from tests.deploy.controller.things import CONFIG_MAPS, config_map
from tests.k8s.api_clients import kube_through
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import eventually
from tests.k8s.tcp_proxy import CutProxy, cut_proxy

_SOAK_S = 20.0


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[CutProxy]:
    with cut_proxy(control_plane.address) as proxy:
        yield proxy


@pytest.fixture
def cut_off(proxy: CutProxy, control_plane: ControlPlane, tmp_path: Path) -> Kube:
    """A client that goes through the proxy."""
    return kube_through(proxy, control_plane, tmp_path)


def ours(namespace: str) -> Selection:
    """Without what a controller puts into each namespace."""
    return Selection(namespace, fields="metadata.name!=kube-root-ca.crt")


def put(kube: Kube, key: Key, x: str) -> None:
    kube.apply(CONFIG_MAPS, config_map(key, {"x": x}), force=False)


def change_all_three(kube: Kube, namespace: str) -> None:
    """Of a, b and c: a is deleted, b changes, c stays as it is; d is new."""
    kube.delete(CONFIG_MAPS, Key(namespace, "a"))
    put(kube, Key(namespace, "b"), "2")
    put(kube, Key(namespace, "d"), "1")


def expect_all_three(heard: Heard, namespace: str) -> None:
    heard.until_data_is(Key(namespace, "d"), {"x": "1"})
    heard.until_data_is(Key(namespace, "b"), {"x": "2"})
    heard.until_data_is(Key(namespace, "a"), None)
    heard.until_data_is(Key(namespace, "c"), {"x": "1"})


@pytest.fixture
def three(kube: Kube, namespace: str) -> None:
    for name in "abc":
        put(kube, Key(namespace, name), "1")


def test_what_happens_is_reported_and_shown(kube: Kube, namespace: str) -> None:
    a, b = Key(namespace, "a"), Key(namespace, "b")
    put(kube, a, "1")
    with following(kube, ours(namespace)) as heard:
        assert heard.next() == "a"
        assert heard.informer.wait_synced(5)
        put(kube, b, "1")
        assert heard.next() == "b"
        kube.delete(CONFIG_MAPS, a)
        assert heard.next() == "a"
        assert list(heard.informer.snapshot()) == [b]
        assert heard.rest() == []


def test_an_object_that_is_no_longer_selected_is_gone(kube: Kube, namespace: str) -> None:
    key = Key(namespace, "a")
    put(kube, key, "1")
    with following(kube, Selection(namespace, labels="mine=yes")) as heard:
        assert heard.informer.wait_synced(5)
        assert heard.informer.get(key) is None
        kube.merge_patch(CONFIG_MAPS, key, {"metadata": {"labels": {"mine": "yes"}}})
        assert heard.next() == "a"
        assert heard.informer.get(key) is not None
        kube.merge_patch(CONFIG_MAPS, key, {"metadata": {"labels": {"mine": "no"}}})
        assert heard.next() == "a"
        assert heard.informer.get(key) is None


@pytest.mark.usefixtures("three")
def test_a_watch_that_is_cut_silently_is_noticed_and_made_up_for(
    kube: Kube, cut_off: Kube, proxy: CutProxy, namespace: str
) -> None:
    with following(cut_off, ours(namespace)) as heard:
        assert sorted(heard.next() for _ in "abc") == ["a", "b", "c"]
        proxy.silence()
        change_all_three(kube, namespace)
        proxy.heal()
        healed_at = time.monotonic()
        expect_all_three(heard, namespace)
        # 1 s of watch, 0.5 s of grace, 0.1 s of back-off; the rest is a loaded machine's
        assert time.monotonic() - healed_at < 5
        assert "c" not in heard.rest(), "what did not change is not reported again"


@pytest.mark.usefixtures("three")
def test_a_server_that_cannot_be_reached_for_a_while_is_reached_again(
    kube: Kube, cut_off: Kube, proxy: CutProxy, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    with following(cut_off, ours(namespace)) as heard:
        assert heard.informer.wait_synced(5)
        proxy.silence()
        change_all_three(kube, namespace)
        eventually(
            lambda: caplog.text.count("watch on in") >= 2, "the second window without an answer"
        )
        proxy.heal()
        expect_all_three(heard, namespace)


@pytest.mark.usefixtures("three")
def test_a_connection_that_breaks_is_made_again(
    kube: Kube, cut_off: Kube, proxy: CutProxy, namespace: str
) -> None:
    with following(cut_off, ours(namespace)) as heard:
        assert sorted(heard.next() for _ in "abc") == ["a", "b", "c"]
        for number in range(2, 5):
            proxy.cut()
            put(kube, Key(namespace, "a"), str(number))
            heard.until_data_is(Key(namespace, "a"), {"x": str(number)})
        assert set(heard.rest()) <= {"a"}


@pytest.mark.parametrize("is_silent", [False, True])
def test_an_informer_that_watches_ends_within_a_second(
    kube: Kube,
    cut_off: Kube,
    proxy: CutProxy,
    namespace: str,
    is_silent: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with following(cut_off, ours(namespace), InformerSettings()) as heard:
        assert heard.informer.wait_synced(5)
        put(kube, Key(namespace, "a"), "1")
        assert heard.next() == "a", "it watches"
        if is_silent:
            proxy.silence()
        began_at = time.monotonic()
        assert heard.informer.stop()
        assert time.monotonic() - began_at < 1
    assert "will" not in caplog.text, "an end is no failure"


@pytest.mark.full
@pytest.mark.usefixtures("three")
def test_an_informer_that_a_restarted_api_server_forgot_lists_again(
    control_plane: ControlPlane,
    kube: Kube,
    cut_off: Kube,
    proxy: CutProxy,
    namespace: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A restarted API server does not know what happened before its start: it answers 410."""
    if control_plane.servers is None:
        pytest.skip("somebody else's API server is not restarted")
    with following(cut_off, ours(namespace)) as heard:
        assert sorted(heard.next() for _ in "abc") == ["a", "b", "c"]
        proxy.silence()
        change_all_three(kube, namespace)
        control_plane.restart_api_server()
        assert heard.rest() == []
        proxy.heal()
        expect_all_three(heard, namespace)
        assert "410" in caplog.text
        assert "list again" in caplog.text
        assert "c" not in heard.rest(), "what did not change is not reported again"


# --- everything at random -------------------------------------------------------------------------


class Reconciler:
    """Looks at each key that it gets, and remembers what it saw: the least that any does."""

    def __init__(self, informer: Informer) -> None:
        self._informer = informer
        self.seen: dict[Key, str] = {}
        self.num_calls = 0
        informer.add_handler(self._reconcile)

    def _reconcile(self, key: Key) -> None:
        self.num_calls += 1
        obj: Object | None = self._informer.get(key)
        if obj is None:
            self.seen.pop(key, None)
        else:
            self.seen[key] = resource_version_of(obj)


def change_something(kube: Kube, namespace: str, rng: random.Random) -> None:
    key = Key(namespace, f"thing-{rng.randrange(20)}")
    if rng.random() < 0.3:
        try:
            kube.delete(CONFIG_MAPS, key)
        except NotFoundError:
            return
    else:
        kube.apply(CONFIG_MAPS, config_map(key, {"x": str(rng.random())}), force=True)


def trouble(proxy: CutProxy, rng: random.Random, is_over: threading.Event) -> None:
    while not is_over.wait(rng.expovariate(2.0)):
        if rng.random() < 0.5:
            proxy.cut()
        else:
            proxy.silence()
            is_over.wait(rng.uniform(0, 1))
            proxy.heal()


@pytest.mark.full
def test_whatever_happens_to_its_connections_what_it_knows_in_the_end_is_what_there_is(
    kube: Kube, cut_off: Kube, proxy: CutProxy, namespace: str
) -> None:
    rng, is_over = random.Random(5), threading.Event()
    informer = Informer(cut_off, CONFIG_MAPS, ours(namespace), FAST)
    reconciler = Reconciler(informer)
    informer.start()
    troubles = threading.Thread(target=trouble, args=(proxy, random.Random(6), is_over))
    troubles.start()
    ends_at = time.monotonic() + _SOAK_S
    while time.monotonic() < ends_at:
        change_something(kube, namespace, rng)
    is_over.set()
    troubles.join()

    def versions() -> dict[Key, str]:
        items = kube.list(CONFIG_MAPS, ours(namespace)).items
        return {key_of(item): resource_version_of(item) for item in items}

    eventually(lambda: reconciler.seen == versions(), "what there is")
    assert set(informer.snapshot()) == set(versions())
    assert reconciler.num_calls > 100
    assert informer.stop()
