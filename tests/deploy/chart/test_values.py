"""What the chart refuses, and in which words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from deploy.api.generate import CHART
from tests.deploy.chart.chart import (
    MONITORS,
    NOT_KUBERNETES,
    Helm,
    RefusedError,
    first_cluster,
    one,
)
from tests.deploy.chart.golden import text_of
from tests.deploy.chart.matrix import ON, joined
from tests.deploy.schemas import check_kubernetes

SECRET_ENV = {"name": "HF_TOKEN", "value": "hf_abc"}


def pods_with(env: dict[str, Any]) -> dict[str, Any]:
    containers = [{"name": "ray-worker", "env": [env]}]
    pool = {"role": "decode", "podTemplate": {"spec": {"containers": containers}}}
    return first_cluster(spec={"pools": {"decode": pool}})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            first_cluster(spec={"pools": {"decode": {"role": "decode", "env": [SECRET_ENV]}}}),
            "valueFrom",
        ),
        ({"replicas": 2}, "Additional property replicas is not allowed"),
        ({"operator": {"replica": 2}}, "operator: Additional property replica is not allowed"),
        ({"operator": {"replicas": "2"}}, "operator.replicas: Invalid type"),
        ({"operator": {"logLevel": "loud"}}, "operator.logLevel"),
        ({"images": {"controller": {"name": "x"}}}, "images.controller: Additional property name"),
        ({"images": {"pullPolicy": "Often"}}, "images.pullPolicy"),
        ({"images": {"worker": {"digest": "sha256:1"}}}, "images.worker.digest"),
        ({"images": {"rayVersion": "2.51.0"}}, "images.rayVersion"),
        ({"watchNamespaces": ["A"]}, "watchNamespaces.0"),
        ({"cluster": {"name": "7b"}}, "cluster.name"),
        ({"cluster": {"nodes": {"preset": "tpu"}}}, "cluster.nodes.preset"),
        ({"cluster": {"nodes": {"shmSize": "a lot"}}}, "cluster.nodes.shmSize"),
        ({"cluster": {"nodes": {"shmSize": "5K"}}}, "cluster.nodes.shmSize"),
        *(
            ({"cluster": {"redis": {"storage": it}}}, "cluster.redis.storage")
            for it in ("5K", "0", "0.0Gi", "-1Gi")
        ),
        ({"images": None}, "images is required"),
        ({"cluster": {"nodes": {"weightsCache": None}}}, "cluster.nodes: weightsCache is required"),
        ({"cluster": {"redis": {"image": None}}}, "cluster.redis: image is required"),
        ({"cluster": {"nodes": {"gpu": True}}}, "cluster.nodes: Additional property gpu"),
        (first_cluster(spec={"modle": {}}), "cluster.spec: Additional property modle"),
        (first_cluster(spec={"engine": {"dtype": 16}}), "cluster.spec.engine.dtype"),
        (first_cluster(spec={"engine": {"block": 1}}), "cluster.spec.engine: Additional property"),
        (first_cluster(spec={"pools": {"d": {"role": "both"}}}), "cluster.spec.pools.d.role"),
        (first_cluster(spec={"pools": {"d": {}}}), "cluster.spec.pools.d: role is required"),
        (first_cluster(spec={"router": {"replicas": 0}}), "cluster.spec.router.replicas"),
        (first_cluster(spec={"router": {"hostname": "LLM"}}), "cluster.spec.router.hostname"),
        (
            first_cluster(spec={"router": {"hostname": "a.b", "ingress": {"class": "nginx"}}}),
            "cluster.spec.router.ingress: Additional property class",
        ),
        ({"hub": {"token": "hf_abc"}}, "hub: Additional property token"),
        ({"hub": {"endpoint": "hub.example.com"}}, "hub.endpoint"),
        ({"cluster": {"nodes": {"env": {"HF_TOKEN": "hf_abc"}}}}, "HF_TOKEN"),
        (pods_with(SECRET_ENV), "only by valueFrom.secretKeyRef"),
        ({"kuberay": {"enable": True}}, "kuberay: Additional property enable"),
        *(
            ({"podMonitor": {"interval": it}}, "podMonitor.interval")
            for it in ("0s", "121s", "3m", "10m", "1h", "120001ms", "200000ms", "0ms", "15")
        ),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Helm, values: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedError, match=words.replace(".", r"\.")):
        helm.template(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cluster": {"enabled": True}}, "cluster.spec.model must be given"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name must be given"),
        (
            first_cluster(nodes={"weightsCache": {"hostPath": "/w", "claimName": "w"}}),
            "cluster.nodes.weightsCache: hostPath or claimName, not both",
        ),
        (first_cluster() | {"watchNamespaces": ["blue"]}, "watchNamespaces must name serving"),
        (
            first_cluster() | {"hub": {"offline": True}},
            "hub.offline: models/demo would have to come from the hub",
        ),
        (
            first_cluster(spec={"hub": {"offline": True}}),
            "hub.offline: models/demo would have to come from the hub",
        ),
        (
            first_cluster(nodes={"weightsCache": {"hostPath": "/mnt/weights"}})
            | {"hub": {"offline": True}},
            "weightsCache.claimName that holds it: the head reads its text, too",
        ),
        ({"kuberay": {"enabled": True}}, "kuberay.enabled: KubeRay's chart has not been fetched"),
    ],
)
def test_values_that_do_not_suit_each_other_are_refused(
    helm: Helm, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(RefusedError, match=words):
        helm.template(values)


def test_a_secret_by_reference_is_taken(helm: Helm) -> None:
    source = {"secretKeyRef": {"name": "hub", "key": "token"}}
    cluster = one(
        helm.template(pods_with({"name": "HF_TOKEN", "valueFrom": source})), "ServingCluster"
    )
    (container,) = cluster["spec"]["pools"]["decode"]["podTemplate"]["spec"]["containers"]
    assert container["env"] == [{"name": "HF_TOKEN", "valueFrom": source}]


def test_large_numbers_arrive_as_they_are(helm: Helm) -> None:
    cluster = one(
        helm.template(first_cluster(spec={"engine": {"kvMemoryBytes": 80 << 30}})), "ServingCluster"
    )
    assert cluster["spec"]["engine"]["kvMemoryBytes"] == 80 << 30


def test_a_hub_that_the_cluster_itself_may_ask_is_asked(helm: Helm) -> None:
    values = first_cluster(spec={"hub": {"offline": False}}) | {"hub": {"offline": True}}
    assert one(helm.template(values), "ServingCluster")["spec"]["hub"] == {"offline": False}


@pytest.mark.parametrize("size", ["5k", "1.5Gi", "0.5Gi", "1e9", "10", "2Ti"])
def test_sizes_are_kubernetes_own(helm: Helm, size: str) -> None:
    objects = helm.template(first_cluster(nodes={"shmSize": size}, redis={"storage": size}))
    claim = one(objects, "PersistentVolumeClaim")
    assert claim["spec"]["resources"]["requests"]["storage"] == size


@pytest.mark.parametrize("interval", ["500ms", "99999ms", "120000ms", "1s", "15s", "120s", "2m"])
def test_metrics_may_be_asked_for_as_often_as_the_alerts_take(helm: Helm, interval: str) -> None:
    values = {"podMonitor": {"enabled": True, "interval": interval}}
    monitor = one(helm.template(values, "--api-versions", MONITORS), "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["interval"] == interval


def settings(values: dict[str, Any], way: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where each is."""
    for name, value in values.items():
        yield (*way, name)
        if isinstance(value, dict):
            yield from settings(value, (*way, name))


SETTINGS = [*settings(yaml.safe_load((CHART / "values.yaml").read_text()))]


def null_at(way: tuple[str, ...]) -> Any:
    value: Any = None
    for name in reversed(way):
        value = {name: value}
    return value


def default_at(way: tuple[str, ...]) -> Any:
    found = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in way:
        found = found[name]
    return found


def is_entry(way: tuple[str, ...]) -> bool:
    """Of a mapping of which a null is known to take entries away."""
    return "resources" in way or way[:-1] == ("cluster", "spec", "pools")


def refused_by_name(words: str, way: tuple[str, ...]) -> bool:
    """By the schema: the setting itself, or what must stand below it."""
    *above, name = way
    here, below = ".".join(above) or "(root)", ".".join(way)
    told = rf"^- ({re.escape(here)}: {name}|{re.escape(below)}: \w+) is required$"
    return re.search(told, words, re.MULTILINE) is not None


@pytest.mark.full
@pytest.mark.parametrize("way", SETTINGS, ids=".".join)
def test_a_null_is_the_default_or_is_refused_by_name(helm: Helm, way: tuple[str, ...]) -> None:
    everything = {name: {"enabled": True} for name in ("dashboards", "alerts", "podMonitor")}
    values = first_cluster(spec=ON, redis={"enabled": True}) | everything
    arguments = ("--is-upgrade", "--api-versions", MONITORS)
    refused = ""
    try:
        objects = helm.template(joined(values, null_at(way)), *arguments)
    except RefusedError as error:
        objects, refused = [], str(error)
    assert not refused or refused_by_name(refused, way), refused
    for each in objects:
        if each["kind"] not in NOT_KUBERNETES:
            check_kubernetes(each)
    if default_at(way) and not refused and not is_entry(way):
        assert text_of(objects) == text_of(helm.template(values, *arguments))
