"""Events, as a person reads them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.controller.kit.events import EVENTS, EventRecorder, EventType
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Object, Selection, key_of
from tests.deploy.controller.things import CONFIG_MAPS, config_map
from tests.k8s.api_clients import kube_through
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import eventually
from tests.k8s.tcp_proxy import cut_proxy


@pytest.fixture
def pool(kube: Kube, namespace: str) -> Object:
    """Something that events are about."""
    return kube.create(CONFIG_MAPS, config_map(Key(namespace, "decode")))


@contextlib.contextmanager
def recording(kube: Kube) -> Iterator[EventRecorder]:
    """All is written when the block has ended."""
    recorder = EventRecorder(kube, "baton-operator")
    recorder.start()
    yield recorder
    assert recorder.stop(10)


def events_of(kube: Kube, namespace: str) -> list[dict[str, Any]]:
    return [dict(item) for item in kube.list(EVENTS, Selection(namespace)).items]


def test_kubectl_describe_shows_what_happened_and_how_often(
    control_plane: ControlPlane, kube: Kube, pool: Object, namespace: str
) -> None:
    with recording(kube) as recorder:
        recorder.record(pool, EventType.NORMAL, "Drained", "decode-1 has drained")
        for _ in range(3):
            recorder.record(pool, EventType.WARNING, "Unschedulable", "no node has 8 GPUs")
    describe = ("--namespace", namespace, "describe", "configmap", "decode")
    lines = [line.split() for line in control_plane.kubectl(*describe).splitlines()]
    (drained,) = [line for line in lines if "Drained" in line]
    (unschedulable,) = [line for line in lines if "Unschedulable" in line]
    assert drained[0] == "Normal"
    assert drained[3:] == ["baton-operator", "decode-1", "has", "drained"]
    assert unschedulable[0] == "Warning"
    assert "(x3" in unschedulable
    assert "<unknown>" not in drained


def test_an_event_that_the_server_has_forgotten_is_written_anew(
    kube: Kube, pool: Object, namespace: str
) -> None:
    with recording(kube) as recorder:
        recorder.record(pool, EventType.NORMAL, "Drained", "decode-1 has drained")
        eventually(lambda: len(events_of(kube, namespace)) == 1, "the event")
        kube.delete(EVENTS, key_of(events_of(kube, namespace)[0]))
        recorder.record(pool, EventType.NORMAL, "Drained", "decode-1 has drained")
    (event,) = events_of(kube, namespace)
    assert event["count"] == 2


def test_to_record_never_waits_and_never_fails(
    control_plane: ControlPlane, kube: Kube, pool: Object, tmp_path: Path
) -> None:
    with cut_proxy(control_plane.address) as proxy:
        recorder = EventRecorder(kube_through(proxy, control_plane, tmp_path, 10.0), "test")
        recorder.start()
        proxy.silence()
        began_at = time.monotonic()
        for number in range(3000):
            recorder.record(pool, EventType.NORMAL, "Drained", f"decode-{number} has drained")
        assert time.monotonic() - began_at < 5
        assert not recorder.stop(0.1), "its thread waits for the silent server"
        assert events_of(kube, key_of(pool).namespace) == []
