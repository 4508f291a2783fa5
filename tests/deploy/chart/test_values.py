"""What the chart refuses, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.chart.chart import Helm, RefusedError, first_cluster, one

SECRET_ENV = {"name": "HF_TOKEN", "value": "hf_abc"}


def pods_with(env: dict[str, Any]) -> dict[str, Any]:
    containers = [{"name": "ray-worker", "env": [env]}]
    pool = {"role": "decode", "template": {"spec": {"containers": containers}}}
    return first_cluster(spec={"pools": {"decode": pool}})


@pytest.mark.parametrize(
    ("values", "words"),
    [
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
            first_cluster(nodes={"weightsCache": {"hostPath": "/mnt/weights"}})
            | {"hub": {"offline": True}},
            "weightsCache.claimName that holds it: routers and the head read its text, too",
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
    (container,) = cluster["spec"]["pools"]["decode"]["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "HF_TOKEN", "valueFrom": source}]


def test_large_numbers_arrive_as_they_are(helm: Helm) -> None:
    cluster = one(
        helm.template(first_cluster(spec={"engine": {"kvMemoryBytes": 80 << 30}})), "ServingCluster"
    )
    assert cluster["spec"]["engine"]["kvMemoryBytes"] == 80 << 30
