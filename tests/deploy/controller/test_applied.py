"""What would change nothing is not written; what somebody else has changed is put back."""

from __future__ import annotations

import contextlib
import json
import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.clock import ManualClock
from deploy.controller.kit.applied import Applied
from deploy.controller.kit.kube import Discovery, Kube
from deploy.controller.kit.objects import Key
from deploy.controller.reconcile.companions import Companions
from tests.deploy.controller.clusters import RELEASE
from tests.deploy.controller.following import following, until
from tests.deploy.controller.scripted_api import Exchange, kube_of, scripted
from tests.deploy.controller.things import CONFIG_MAPS, config_map, config_map_list
from tests.deploy.controller.views import view_of

CLUSTER = Key("models", "main")
OWNER_UID = "u1"


@dataclass
class Server:
    """Objects by path; every PATCH is an apply that makes the object what it says."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    served: dict[str, list[str]] = field(default_factory=dict)
    """Kinds by `group/version`."""
    writes: list[str] = field(default_factory=list)
    num_versions: int = 0

    def __call__(self, exchange: Exchange) -> None:
        path = exchange.path.partition("?")[0]
        if exchange.command == "GET":
            self._read(exchange, path)
            return
        self.writes.append(f"{exchange.command} {path}")
        if exchange.command == "DELETE":
            del self.objects[path]
            exchange.answer({"kind": "Status"})
            return
        body = json.loads(exchange.body)
        if exchange.command == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                exchange.answer({"kind": "Status", "reason": "AlreadyExists"}, 409)
                return
        self.put(path, body)
        exchange.answer(self.objects[path])

    def put(self, path: str, obj: dict[str, Any]) -> None:
        self.num_versions += 1
        version = {"resourceVersion": str(self.num_versions), "uid": f"uid-{path}"}
        self.objects[path] = obj | {"metadata": obj["metadata"] | version}

    def _read(self, exchange: Exchange, path: str) -> None:
        if path == "/version":
            exchange.answer({"major": "1", "minor": "31"})
        elif path in self.objects:
            exchange.answer(self.objects[path])
        elif (kinds := self.served.get(path.removeprefix("/apis/"))) is not None:
            exchange.answer({"resources": [{"name": kind} for kind in kinds]})
        else:
            exchange.answer({"kind": "Status", "reason": "NotFound"}, 404)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def kube(server: Server) -> Iterator[Kube]:
    with scripted(server) as running:
        yield kube_of(running)


THING = Key("models", "thing")
PATH = "/api/v1/namespaces/models/configmaps/thing"


def test_an_equal_apply_is_left_out_and_another_one_is_not(server: Server, kube: Kube) -> None:
    applied = Applied(kube, {})
    for value in ("1", "1", "1", "2", "2"):
        answer = applied.apply(CLUSTER, CONFIG_MAPS, config_map(THING, {"a": value}))
        assert answer["data"] == {"a": value}
    assert server.writes == [f"PATCH {PATH}"] * 2


def test_what_nobody_follows_is_applied_again_after_a_while(server: Server, kube: Kube) -> None:
    clock = ManualClock()
    applied = Applied(kube, {}, clock.now_s)
    for passes_s in (0.0, 5.0, 24.0, 2.0, 4.0):
        clock.advance(passes_s)
        applied.apply(CLUSTER, CONFIG_MAPS, config_map(THING))
    assert len(server.writes) == 2


def test_a_cluster_that_is_forgotten_is_applied_anew(server: Server, kube: Kube) -> None:
    applied = Applied(kube, {})
    for _ in range(2):
        applied.apply(CLUSTER, CONFIG_MAPS, config_map(THING))
        applied.forget(CLUSTER)
    assert len(server.writes) == 2


def test_of_a_followed_kind_an_edit_is_put_back_at_once_and_a_status_is_none() -> None:
    """The server's watch tells what the test puts into it."""
    server = Server()
    told: queue.Queue[dict[str, Any]] = queue.Queue()

    def script(exchange: Exchange) -> None:
        if exchange.is_watch:
            exchange.begin_stream()
            with contextlib.suppress(queue.Empty):
                event = {"type": "MODIFIED", "object": told.get(timeout=1)}
                exchange.send_piece(json.dumps(event).encode() + b"\n")
            exchange.end_stream()
        elif exchange.path.partition("?")[0] == "/api/v1/configmaps":
            exchange.answer(config_map_list(*server.objects.values()))
        else:
            server(exchange)

    with scripted(script) as running:
        kube = kube_of(running)
        wanted = config_map(THING, {"a": "1"})
        first = Applied(kube, {})
        first.apply(CLUSTER, CONFIG_MAPS, wanted)
        with following(kube) as heard:
            heard.until_data_is(THING, {"a": "1"})
            applied = Applied(kube, {CONFIG_MAPS: heard.informer})
            applied.apply(CLUSTER, CONFIG_MAPS, wanted)
            is_known = lambda: heard.informer.get(THING) == server.objects[PATH]  # noqa: E731
            num_writes = len(server.writes)
            server.put(PATH, wanted | {"status": {"phase": "well"}})
            told.put(server.objects[PATH])
            until(is_known, "the status is heard of")
            assert applied.apply(CLUSTER, CONFIG_MAPS, wanted)["status"] == {"phase": "well"}
            assert len(server.writes) == num_writes
            server.put(PATH, config_map(THING, {"a": "somebody's"}))
            told.put(server.objects[PATH])
            until(is_known, "the edit is heard of")
            applied.apply(CLUSTER, CONFIG_MAPS, wanted)
            assert len(server.writes) == num_writes + 1
            assert server.objects[PATH]["data"] == {"a": "1"}


def test_what_is_there_already_is_not_made_again(server: Server, kube: Kube) -> None:
    applied = Applied(kube, {})
    server.put(PATH, config_map(THING, {"a": "theirs"}))
    for _ in range(3):
        applied.make(CLUSTER, CONFIG_MAPS, config_map(THING, {"a": "ours"}))
    assert len(server.writes) == 1
    assert server.objects[PATH]["data"] == {"a": "theirs"}


def test_only_the_owners_own_is_removed_and_only_once(server: Server, kube: Kube) -> None:
    ours = config_map(THING)
    ours["metadata"]["ownerReferences"] = [{"uid": OWNER_UID}]
    for obj, is_removed in ((config_map(THING), False), (ours, True)):
        applied = Applied(kube, {})
        server.put(PATH, obj)
        for _ in range(3):
            applied.remove(CLUSTER, CONFIG_MAPS, THING, OWNER_UID)
        assert (PATH not in server.objects) is is_removed
    assert server.writes == [f"DELETE {PATH}"]


def test_what_was_removed_comes_back_when_it_is_wanted_again(server: Server, kube: Kube) -> None:
    applied = Applied(kube, {})
    wanted = config_map(THING)
    wanted["metadata"]["ownerReferences"] = [{"uid": OWNER_UID}]
    applied.apply(CLUSTER, CONFIG_MAPS, wanted)
    applied.remove(CLUSTER, CONFIG_MAPS, THING, OWNER_UID)
    applied.apply(CLUSTER, CONFIG_MAPS, wanted)
    assert PATH in server.objects


# --- kinds that are served, or not ----------------------------------------------------------------


def kinds_of(server: Server) -> set[str]:
    return {f"{obj['apiVersion']} {obj['kind']}" for obj in server.objects.values()}


def test_the_newest_budget_that_is_served_is_written(server: Server, kube: Kube) -> None:
    for version in ("v1", "v1beta1"):
        server.objects.clear()
        server.served = {f"policy/{version}": ["poddisruptionbudgets"]}
        Companions(Applied(kube, {}), Discovery(kube), RELEASE).keep(view_of())
        assert f"policy/{version} PodDisruptionBudget" in kinds_of(server)


def test_kinds_that_are_not_served_are_told_and_left_out(server: Server, kube: Kube) -> None:
    server.served = {"networking.k8s.io/v1": ["networkpolicies", "ingresses"]}
    view = view_of(router={"hostname": "llm.example.com", "gateway": "edge"})
    refused, unserved = Companions(Applied(kube, {}), Discovery(kube), RELEASE).keep(view)
    assert not refused
    assert unserved == [
        "poddisruptionbudgets.policy (v1) are not served",
        "grpcroutes.gateway.networking.k8s.io (v1) are not served",
    ]
    assert kinds_of(server) == {"networking.k8s.io/v1 NetworkPolicy"}


def test_a_kind_that_is_installed_later_is_noticed(server: Server, kube: Kube) -> None:
    clock = ManualClock()
    discovery = Discovery(kube, clock.now_s)
    assert not discovery.serves(CONFIG_MAPS)
    server.served = {"/api/v1": ["configmaps"]}
    assert not discovery.serves(CONFIG_MAPS), "it is not asked at every look"
    clock.advance(61.0)
    assert discovery.serves(CONFIG_MAPS)
