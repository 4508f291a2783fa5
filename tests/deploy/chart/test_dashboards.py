"""The dashboards ask for what routers and workers tell."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from deploy.api.generate import CHART
from tests.deploy.chart.chart import Helm, of_kind
from tests.deploy.chart.told import labels, labels_in, names, names_in

DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))


def expressions(path: Path) -> Iterable[str]:
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_no_panel_asks_for_a_metric_that_nobody_tells(path: Path) -> None:
    for text in expressions(path):
        assert names_in(text)
        assert names_in(text) <= names()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_labels_are_those_of_the_metrics(path: Path) -> None:
    for text in expressions(path):
        assert labels_in(text)
        assert labels_in(text) <= labels()


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
