"""What an informer knows, and each change of it."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.controller.kit.informer import Cache, Change
from deploy.controller.kit.kube import Listing
from deploy.controller.kit.objects import Key, Object
from deploy.controller.kit.watch_stream import WatchEvent, WatchEventType


def thing(name: str, version: str, **fields: Any) -> dict[str, Any]:
    metadata = {"namespace": "n", "name": name, "resourceVersion": version}
    return {"metadata": metadata, **fields}


def states(change: Change) -> list[str]:
    metadata = [state["metadata"] for state in change]
    return [f"{each['name']}{each['resourceVersion']}" for each in metadata]


@pytest.fixture
def cache() -> Cache:
    cache = Cache()
    cache.replace(Listing((thing("a", "1"), thing("b", "1"), thing("c", "1")), "1"))
    return cache


def test_a_relist_tells_what_is_new_changed_or_gone_and_nothing_else(cache: Cache) -> None:
    changes = cache.replace(Listing((thing("b", "1"), thing("c", "2"), thing("d", "2")), "2"))
    assert [*map(states, changes)] == [["a1"], ["c1", "c2"], ["d2"]]
    assert {key.name for key in cache.snapshot()} == {"b", "c", "d"}


def test_an_event_tells_the_states_before_and_after(cache: Cache) -> None:
    def follow(type_: WatchEventType, obj: Object) -> list[str]:
        return states(cache.follow(WatchEvent(type_, obj)))

    assert follow(WatchEventType.ADDED, thing("d", "2")) == ["d2"]
    assert follow(WatchEventType.MODIFIED, thing("a", "3")) == ["a1", "a3"]
    assert follow(WatchEventType.MODIFIED, thing("a", "3")) == [], "seen already"
    assert follow(WatchEventType.DELETED, thing("a", "4")) == ["a3"]
    assert follow(WatchEventType.DELETED, thing("a", "4")) == [], "gone already"
    assert cache.get(Key("n", "a")) is None


def test_a_snapshot_stays_as_it_was(cache: Cache) -> None:
    before = cache.snapshot()
    cache.replace(Listing((), "2"))
    assert len(before) == 3
    assert not cache.snapshot()
    with pytest.raises(TypeError):
        before[Key("n", "x")] = {}  # type: ignore[index]


def test_managed_fields_are_left_out() -> None:
    obj = thing("a", "1")
    obj["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    cache = Cache()
    cache.replace(Listing((obj,), "1"))
    cached = cache.get(Key("n", "a"))
    assert cached is not None
    assert "managedFields" not in cached["metadata"]
    assert "managedFields" in obj["metadata"]
