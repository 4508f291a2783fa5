"""What an informer knows: no reader can change it, every change is told."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from deploy.controller.kit.informer import Cache, Change
from deploy.controller.kit.kube import Listing
from deploy.controller.kit.objects import Key, Object
from deploy.controller.kit.watch_stream import WatchEvent, WatchEventType


def thing(name: str, version: str, **fields: Any) -> dict[str, Any]:
    metadata = {"namespace": "n", "name": name, "resourceVersion": version}
    return {"metadata": metadata, **fields}


def told(changes: list[Change]) -> list[tuple[str | None, str | None]]:
    def named(state: Object | None) -> str | None:
        if state is None:
            return None
        return f"{state['metadata']['name']}{state['metadata']['resourceVersion']}"

    return [(named(change.before), named(change.after)) for change in changes]


@pytest.fixture
def cache() -> Cache:
    cache = Cache()
    cache.replace(Listing((thing("a", "1"), thing("b", "1"), thing("c", "1")), "1"))
    return cache


def test_a_relist_tells_what_is_new_changed_or_gone_and_nothing_else(cache: Cache) -> None:
    changes = cache.replace(Listing((thing("b", "1"), thing("c", "2"), thing("d", "2")), "2"))
    assert told(changes) == [("a1", None), ("c1", "c2"), (None, "d2")]
    assert {key.name for key in cache.snapshot()} == {"b", "c", "d"}


def test_an_event_tells_the_states_before_and_after(cache: Cache) -> None:
    def follow(type_: WatchEventType, obj: Object) -> list[tuple[str | None, str | None]]:
        change = cache.follow(WatchEvent(type_, obj))
        return told([change] if change is not None else [])

    assert follow(WatchEventType.ADDED, thing("d", "2")) == [(None, "d2")]
    assert follow(WatchEventType.MODIFIED, thing("a", "3")) == [("a1", "a3")]
    assert follow(WatchEventType.MODIFIED, thing("a", "3")) == [], "seen already"
    assert follow(WatchEventType.DELETED, thing("a", "4")) == [("a3", None)]
    assert follow(WatchEventType.DELETED, thing("a", "4")) == [], "gone already"
    assert cache.get(Key("n", "a")) is None


def test_a_snapshot_stays_as_it_was(cache: Cache) -> None:
    before = cache.snapshot()
    cache.replace(Listing((), "2"))
    assert len(before) == 3
    assert not cache.snapshot()
    with pytest.raises(TypeError):
        before[Key("n", "x")] = {}  # type: ignore[index]


def test_no_reader_can_change_what_is_cached() -> None:
    obj = thing("a", "1", spec={"list": [{"deep": 1}], "dict": {"x": 1}})
    cache = Cache()
    cache.replace(Listing((obj,), "1"))
    obj["spec"]["list"].append("by who gave it")
    got: Any = cache.get(Key("n", "a"))
    attempts: list[Callable[[], object]] = [
        lambda: got.update(a=1),
        lambda: got["spec"].pop("dict"),
        lambda: got["spec"]["dict"].setdefault("y", 1),
        lambda: got["spec"]["dict"].clear(),
        lambda: got["spec"]["list"].append(1),
        lambda: got["spec"]["list"].sort(),
        lambda: got["spec"]["list"].__setitem__(0, 1),
        lambda: got["spec"]["list"].__delitem__(0),
        lambda: got["spec"]["list"].__iadd__([1]),
        lambda: got["spec"]["list"][0].__setitem__("deep", 2),
        lambda: got["spec"].__delitem__("list"),
        lambda: got["spec"].__ior__({"z": 1}),
    ]
    for attempt in attempts:
        with pytest.raises(TypeError, match="must not be changed"):
            attempt()
    assert got["spec"] == {"list": [{"deep": 1}], "dict": {"x": 1}}


def test_a_copy_of_a_cached_object_is_free_to_change() -> None:
    cache = Cache()
    cache.replace(Listing((thing("a", "1", spec={"list": [{"deep": 1}]}),), "1"))
    got = cache.get(Key("n", "a"))
    mine: Any = copy.deepcopy(got)
    mine["spec"]["list"][0]["deep"] = 2
    mine["spec"]["list"].append(3)
    assert mine["spec"] == {"list": [{"deep": 2}, 3]}
    assert json.loads(json.dumps(got))["spec"] == {"list": [{"deep": 1}]}


def test_managed_fields_are_left_out() -> None:
    obj = thing("a", "1")
    obj["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    cache = Cache()
    cache.replace(Listing((obj,), "1"))
    cached = cache.get(Key("n", "a"))
    assert cached is not None
    assert "managedFields" not in cached["metadata"]
    assert "managedFields" in obj["metadata"]
