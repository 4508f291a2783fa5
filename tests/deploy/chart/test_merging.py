"""The chart's merge of pod templates and the operator's make one: what the chart lays over a pool's
template, laid over the operator's own, is as if both had been laid over that one by one."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from deploy.api.generate import CHART
from deploy.controller.manifests.merge import merged
from tests.deploy.chart.chart import Helm

RENDERED = """\
{{- $results := list -}}
{{- range .Values.cases -}}
{{- $case := dict "own" .first "over" .second "key" "" -}}
{{- $results = append $results (include "baton.merged" $case | fromJson).value -}}
{{- end }}
results: {{ $results | toJson }}
"""


VALUES: tuple[dict[str, Any], ...] = (
    {"value": "x"},
    {"value": "y"},
    {"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    {"valueFrom": {"secretKeyRef": {"name": "x", "key": "y"}}},
)
"""Of a variable: it has one of them."""


def pod(rng: random.Random, volumes: str) -> dict[str, Any]:
    """A template with some of what templates have."""
    container = {
        "env": [{"name": name} | rng.choice(VALUES) for name in _names(rng)],
        "volumeMounts": _some(rng, "mountPath", "subPath"),
        "resources": {"limits": {rng.choice(("a", "b.c/d")): rng.randrange(3)}},
    }
    parts = {
        "containers": [{"name": name} | _part(rng, container) for name in _names(rng)],
        "volumes": [{"name": volumes + name, "emptyDir": {}} for name in _names(rng)],
        "tolerations": [{"key": name} for name in _names(rng)],
        "nodeSelector": {name: rng.choice("xy") for name in _names(rng)},
        "affinity": {"nodeAffinity": {rng.choice("ab"): {}}},
        "hostIPC": rng.random() < 0.5,
    }
    return {"metadata": {"annotations": {"a": rng.choice("xy")}}, "spec": _part(rng, parts)}


def _part(rng: random.Random, parts: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in parts.items() if rng.random() < 0.6}


def _names(rng: random.Random) -> list[str]:
    return rng.sample("abcd", rng.randrange(4))


def _some(rng: random.Random, key: str, value: str) -> list[dict[str, Any]]:
    return [{key: name, value: rng.choice("xy")} for name in _names(rng)]


def both(helm: Helm, folder: Path, cases: list[dict[str, Any]]) -> list[Any]:
    """What the chart makes of each case's first and second template."""
    (folder / "templates").mkdir(parents=True)
    (folder / "Chart.yaml").write_text("{apiVersion: v2, name: merging, version: 0.1.0}")
    (folder / "templates" / "results.yaml").write_text(RENDERED)
    shutil.copy(CHART / "templates" / "_merge.tpl", folder / "templates")
    command = ("template", "merging", folder, "--values", "-")
    text = helm.run(*command, stdin=json.dumps({"cases": cases}))
    results: list[Any] = json.loads(text.rpartition("results: ")[2])
    assert len(results) == len(cases)
    return results


def test_the_chart_merges_as_the_operator_does(helm: Helm, tmp_path: Path) -> None:
    rng = random.Random(7)
    cases = [
        {"own": pod(rng, "own-"), "first": pod(rng, "1-"), "second": pod(rng, "2-")}
        for _ in range(200)
    ]
    for case, result in zip(cases, both(helm, tmp_path / "chart", cases), strict=True):
        one_by_one = merged(merged(case["own"], case["first"]), case["second"])
        assert merged(case["own"], result) == one_by_one
        for container in one_by_one.get("spec", {}).get("containers", ()):
            for variable in container.get("env", ()):
                assert variable.keys() - {"name"} in ({"value"}, {"valueFrom"})
                assert len(variable.get("valueFrom", "1")) == 1


def test_null_stays_for_the_operator_to_see(helm: Helm, tmp_path: Path) -> None:
    case = {"first": {"spec": {"a": 1}}, "second": {"spec": {"affinity": None}}}
    (result,) = both(helm, tmp_path / "chart", [case])
    assert result == {"spec": {"a": 1, "affinity": None}}
    assert merged({"spec": {"affinity": {}}}, result) == {"spec": {"a": 1}}


def test_a_volumes_source_is_replaced_and_one_of_the_same_kind_is_merged(
    helm: Helm, tmp_path: Path
) -> None:
    memory = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    folder = {"name": "shm", "hostPath": {"path": "/shm"}}
    limited = {"name": "shm", "emptyDir": {"sizeLimit": "8Gi"}}
    pairs = ((memory, folder, folder), (memory, limited, {
        "name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"},
    }))  # fmt: skip
    cases = [{"first": {"volumes": [one]}, "second": {"volumes": [two]}} for one, two, _ in pairs]
    wanted = [{"volumes": [result]} for _, _, result in pairs]
    assert both(helm, tmp_path / "chart", cases) == wanted
    assert [merged(case["first"], case["second"]) for case in cases] == wanted
