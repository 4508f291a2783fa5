"""Which ServingClusters a change concerns."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.controller.kit.objects import Key
from deploy.controller.manifests.common import CLUSTER_LABEL
from deploy.controller.reconcile.caches import Caches
from tests.deploy.controller.following import FAST, TIMEOUT_S
from tests.deploy.controller.scripted_api import Exchange, kube_of, scripted

NAMESPACE = "models"
DECODE = {"decode": {"role": "decode"}}


def obj(name: str, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    metadata = {"namespace": NAMESPACE, "name": name, "resourceVersion": "1"}
    return {"metadata": metadata | {"labels": labels or {}}, "spec": spec}


class Server:
    """Three ServingClusters and a WorkerPool, which goes once it may."""

    def __init__(self, pool: dict[str, Any]) -> None:
        self.pool, self.may_go = pool, threading.Event()
        self.lists = {
            "servingclusters": [
                obj("main", pools=DECODE),
                obj("default", pools={"main-decode": DECODE["decode"]}),
                obj("other", pools=DECODE),
            ],
            "workerpools": [pool],
        }

    def __call__(self, exchange: Exchange) -> None:
        plural = exchange.path.partition("?")[0].rpartition("/")[2]
        if not exchange.is_watch:
            kind = {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}
            exchange.answer(kind | {"items": self.lists.get(plural, [])})
            return
        exchange.begin_stream()
        if plural == "workerpools" and self.may_go.wait(TIMEOUT_S):
            gone = self.pool | {"metadata": self.pool["metadata"] | {"resourceVersion": "2"}}
            event = {"type": "DELETED", "object": gone}
            exchange.send_piece(json.dumps(event).encode() + b"\n")
        exchange.hang()


@contextlib.contextmanager
def caches_of(server: Server) -> Iterator[tuple[Caches, queue.Queue[Key]]]:
    """Complete ones, and what a handler hears from then on."""
    heard: queue.Queue[Key] = queue.Queue()
    with scripted(server) as running:
        caches = Caches(kube_of(running), None, FAST)
        caches.add_handler(heard.put)
        caches.start()
        try:
            assert caches.wait_synced(TIMEOUT_S)
            while not heard.empty():
                heard.get_nowait()
            yield caches, heard
        finally:
            assert caches.stop()


def test_a_cluster_that_is_gone_is_known_while_a_worker_pool_is_left_of_it() -> None:
    """Whoever begins to lead has to let that go."""
    with caches_of(Server(obj("gone-decode", {CLUSTER_LABEL: "gone"}))) as (caches, _):
        known = {Key(NAMESPACE, name) for name in ("main", "default", "other", "gone")}
        assert caches.known_clusters == known


@pytest.mark.parametrize("labels", [{CLUSTER_LABEL: "default"}, {}])
def test_a_worker_pool_concerns_each_cluster_that_has_a_pool_of_its_name(
    labels: dict[str, str],
) -> None:
    """Of two one waits for the other's to go; and who takes its label away changes nothing."""
    server = Server(obj("main-decode", labels))
    with caches_of(server) as (_, heard):
        server.may_go.set()
        said = {heard.get(timeout=TIMEOUT_S), heard.get(timeout=TIMEOUT_S)}
        assert said == {Key(NAMESPACE, "main"), Key(NAMESPACE, "default")}
