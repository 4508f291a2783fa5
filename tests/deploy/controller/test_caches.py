"""Which ServingClusters a change concerns."""

from __future__ import annotations

import queue
from typing import Any

from deploy.controller.kit.objects import Key
from deploy.controller.manifests.common import CLUSTER_LABEL
from deploy.controller.reconcile.caches import Caches
from tests.deploy.controller.following import FAST, TIMEOUT_S
from tests.deploy.controller.scripted_api import Exchange, kube_of, scripted

NAMESPACE = "models"


def obj(name: str, labels: dict[str, str] | None = None) -> dict[str, Any]:
    metadata = {"namespace": NAMESPACE, "name": name, "resourceVersion": "1"}
    return {"metadata": metadata | {"labels": labels or {}}, "spec": {}}


def test_a_cluster_that_is_gone_is_heard_of_while_a_worker_pool_is_left_of_it() -> None:
    """Whoever leads has to let that go."""
    lists = {
        "servingclusters": [obj("main")],
        "workerpools": [obj("gone-decode", {CLUSTER_LABEL: "gone"}), obj("nobodys")],
    }

    def server(exchange: Exchange) -> None:
        plural = exchange.path.partition("?")[0].rpartition("/")[2]
        if exchange.is_watch:
            exchange.begin_stream()
            exchange.hang()
        else:
            kind = {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}
            exchange.answer(kind | {"items": lists.get(plural, [])})

    heard: queue.Queue[Key] = queue.Queue()
    with scripted(server) as running:
        caches = Caches(kube_of(running), None, FAST)
        caches.add_handler(heard.put)
        caches.start()
        assert caches.wait_synced(TIMEOUT_S)
        said = {heard.get(timeout=TIMEOUT_S), heard.get(timeout=TIMEOUT_S)}
        assert caches.stop()
    assert said == {Key(NAMESPACE, "main"), Key(NAMESPACE, "gone")}
    assert heard.empty()
