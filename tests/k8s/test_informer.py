"""An informer on a real API server that goes away, and behind a proxy that goes silent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.controller.kit.informer import InformerSettings
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Selection
from tests.deploy.controller.following import Heard, following, until
from tests.deploy.controller.things import CONFIG_MAPS, config_map
from tests.k8s.api_clients import fresh_namespace, kube_of, kube_through
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.cut_proxy import CutProxy, cut_proxy


@pytest.fixture
def kube(control_plane: ControlPlane) -> Kube:
    return kube_of(control_plane)


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    with fresh_namespace(kube) as name:
        yield name


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


def test_what_happens_is_told_and_shown(kube: Kube, namespace: str) -> None:
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
        assert "c" not in heard.rest(), "what did not change is not told again"


@pytest.mark.usefixtures("three")
def test_a_server_that_cannot_be_reached_for_a_while_is_reached_again(
    kube: Kube, cut_off: Kube, proxy: CutProxy, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    with following(cut_off, ours(namespace)) as heard:
        assert heard.informer.wait_synced(5)
        proxy.silence()
        change_all_three(kube, namespace)
        until(lambda: caplog.text.count("watch on in") >= 2, "the second window without an answer")
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
def test_a_restarted_api_server_is_found_again_and_nothing_is_missed(
    control_plane: ControlPlane, kube: Kube, namespace: str
) -> None:
    if control_plane.servers is None:
        pytest.skip("somebody else's API server is not restarted")
    with following(kube, ours(namespace)) as heard:
        assert sorted(heard.next() for _ in "abc") == ["a", "b", "c"]
        control_plane.restart_api_server()
        change_all_three(kube, namespace)
        expect_all_three(heard, namespace)
        assert "c" not in heard.rest(), "what did not change is not told again"


@pytest.mark.full
@pytest.mark.usefixtures("three")
def test_who_was_away_for_too_long_lists_again(
    control_plane: ControlPlane,
    kube: Kube,
    cut_off: Kube,
    proxy: CutProxy,
    namespace: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A restarted API server knows nothing of what happened before its start: it answers 410."""
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
        assert "c" not in heard.rest(), "what did not change is not told again"


@pytest.mark.full
@pytest.mark.usefixtures("three")
def test_with_the_usual_settings_a_silent_cut_is_made_up_for_within_a_minute(
    kube: Kube, control_plane: ControlPlane, proxy: CutProxy, namespace: str, tmp_path: Path
) -> None:
    usual = kube_through(proxy, control_plane, tmp_path, timeout_s=10.0)
    with following(usual, ours(namespace), InformerSettings()) as heard:
        assert heard.informer.wait_synced(10)
        proxy.silence()
        change_all_three(kube, namespace)
        began_at = time.monotonic()
        until(lambda: time.monotonic() - began_at > 27, "the first try to make up", timeout_s=30)
        proxy.heal()  # only now: it has met a proxy that is silent still
        until(lambda: heard.informer.get(Key(namespace, "d")) is not None, "the news", 60)
        expect_all_three(heard, namespace)
        assert time.monotonic() - began_at < 60
