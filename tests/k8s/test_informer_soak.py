"""An informer whose connection breaks and goes silent at random, under a stream of changes: what
its handler has seen in the end is what there is."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.controller.kit.errors import NotFoundError
from deploy.controller.kit.informer import Informer
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Object, Selection, key_of, resource_version_of
from tests.deploy.controller.following import FAST, until
from tests.deploy.controller.things import CONFIG_MAPS, config_map
from tests.k8s.api_clients import fresh_namespace, kube_of, kube_through
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.cut_proxy import CutProxy, cut_proxy

_SOAK_S = 20.0


@pytest.fixture
def kube(control_plane: ControlPlane) -> Kube:
    return kube_of(control_plane)


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    with fresh_namespace(kube) as name:
        yield name


class Reconciler:
    """Looks at each key that it is told, and remembers what it saw: the least that any does."""

    def __init__(self, informer: Informer) -> None:
        self._informer = informer
        self.seen: dict[Key, str] = {}
        self.num_told = 0
        informer.add_handler(self._reconcile)

    def _reconcile(self, key: Key) -> None:
        self.num_told += 1
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
    control_plane: ControlPlane, kube: Kube, namespace: str, tmp_path: Path
) -> None:
    rng = random.Random(5)
    selection = Selection(namespace, fields="metadata.name!=kube-root-ca.crt")
    is_over = threading.Event()
    with cut_proxy(control_plane.address) as proxy:
        informer = Informer(
            kube_through(proxy, control_plane, tmp_path), CONFIG_MAPS, selection, FAST
        )
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
            items = kube.list(CONFIG_MAPS, selection).items
            return {key_of(item): resource_version_of(item) for item in items}

        until(lambda: reconciler.seen == versions(), "what there is", timeout_s=20)
        assert set(informer.snapshot()) == set(versions())
        assert reconciler.num_told > 100
        assert informer.stop()
