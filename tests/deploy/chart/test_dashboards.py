"""The dashboards ask for what routers and workers tell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.v1 import control_pb2, worker_pb2
from cluster.worker_metrics import WorkerCollector
from deploy.api.chart import DEPLOY
from router.metrics import RouterMetrics
from tests.deploy.chart.chart import Helm, of_kind

DASHBOARDS = sorted((DEPLOY / "dashboards").glob("*.json"))


def registries() -> tuple[CollectorRegistry, CollectorRegistry]:
    load, progress = worker_pb2.WorkerLoad(), control_pb2.StepProgress()
    collector = WorkerCollector("w", "p", lambda: load, lambda: progress, lambda: 0, lambda: 0)
    return RouterMetrics().registry, collector.registry()


def told() -> set[str]:
    """The names of metrics, without what a histogram or counter appends."""
    return {metric.name for registry in registries() for metric in registry.collect()}


def expressions(path: Path) -> Iterable[str]:
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def asked(path: Path) -> set[str]:
    names = {name for text in expressions(path) for name in re.findall(r"baton_\w+", text)}
    return {re.sub(r"_(bucket|total)$", "", name) for name in names}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_no_panel_asks_for_a_metric_that_nobody_tells(path: Path) -> None:
    assert asked(path)
    assert asked(path) <= told()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_labels_are_those_of_the_metrics(path: Path) -> None:
    """Beside `namespace`, which Prometheus adds for a pod."""
    labels = {
        label
        for registry in registries()
        for metric in registry.collect()
        for sample in metric.samples
        for label in sample.labels
    } | {"namespace", "le", "state", "end", "failure"}
    for text in expressions(path):
        assert set(re.findall(r"(\w+)=~", text)) <= labels
        grouped = re.findall(r"by \(([\w, ]+)\)", text)
        assert {name for group in grouped for name in group.split(", ")} <= labels


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_ids_of_their_own_and_do_not_lie_on_each_other(path: Path) -> None:
    dashboard: dict[str, Any] = json.loads(path.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_grafanas_sidecar_finds_each_as_it_was_written(helm: Helm) -> None:
    maps = of_kind(helm.template({"dashboards": {"enabled": True}}), "ConfigMap")
    found = {name: text for each in maps for name, text in each["data"].items()}
    assert {name: json.loads(text) for name, text in found.items()} == {
        path.name: json.loads(path.read_text()) for path in DASHBOARDS
    }
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in maps)
