"""A pod template with a mistake in it is refused by the name of the field, before it is used."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client

from baton.errors import ConfigError
from deploy.api import pod_template
from deploy.api.checked import read_spec
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import WorkerPoolSpec
from tests.deploy.api.specs import CLUSTER, CLUSTER_KIND, POOL, changed, custom_object


def of_container(**keys: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "ray-worker"} | keys]}}


BAD_TEMPLATES = [
    ({"specs": {}}, ".specs", "did you mean 'spec'"),
    ({"metadata": None}, ".metadata", "must be a mapping, not null"),
    ({"metadata": {"label": {}}}, ".metadata.label", "did you mean 'labels'"),
    ({"metadata": {"labels": None}}, ".metadata.labels", "must be a mapping, not null"),
    ({"metadata": {"annotations": "a=b"}}, ".metadata.annotations", "must be a mapping"),
    ({"metadata": {"annotations": {"a": True}}}, ".metadata.annotations", "must hold text"),
    ({"metadata": {"labels": {"baton.dev/pool": "other"}}}, ".metadata.labels", "baton.dev/pool"),
    ({"metadata": {"labels": {"baton.dev/cluster": None}}}, ".metadata.labels", "must not hold"),
    ({"metadata": {"labels": {"app.kubernetes.io/component": "worker"}}}, ".metadata.labels",
     "app.kubernetes.io/component"),
    ({"spec": None}, ".spec", "must be a mapping, not null"),
    ({"spec": {"contaners": []}}, ".spec.contaners", "did you mean 'containers'"),
    ({"spec": {"containers": None}}, ".spec.containers", "must not be null"),
    ({"spec": {"containers": {"name": "a"}}}, ".spec.containers", "must be a list"),
    ({"spec": {"containers": ["x"]}}, ".spec.containers[0]", "must be a mapping, not 'x'"),
    ({"spec": {"containers": [{"image": "a"}]}}, ".spec.containers[0].name", "is needed"),
    ({"spec": {"containers": [{"name": ["a"]}]}}, ".spec.containers[0].name", "is needed"),
    ({"spec": {"containers": [{"name": "a"}, {"name": "a", "image": "b"}]}}, ".spec.containers[1]",
     "twice"),
    ({"spec": {"initContainers": ["x"]}}, ".spec.initContainers[0]", "must be a mapping"),
    (of_container(resource={}), ".spec.containers[0].resource", "did you mean 'resources'"),
    (of_container(env=["A=b"]), ".spec.containers[0].env[0]", "must be a mapping, not 'A=b'"),
    (of_container(env={"A": "b"}), ".spec.containers[0].env", "must be a list"),
    (of_container(volumeMounts=[{"name": "a"}]), ".spec.containers[0].volumeMounts[0].mountPath",
     "is needed"),
    (of_container(ports=[{"name": "a"}]), ".spec.containers[0].ports[0].containerPort",
     "is needed"),
    (of_container(ports=[{"containerPort": 80, "name": "a"}, {"containerPort": 80, "name": "b"}]),
     ".spec.containers[0].ports[1]", "twice"),
    ({"spec": {"volumes": [{"emptyDir": {}}]}}, ".spec.volumes[0].name", "is needed"),
]  # fmt: skip
GOOD_TEMPLATES: list[dict[str, Any]] = [
    {},
    {"metadata": {"annotations": {"example.com/rack": "7"}, "creationTimestamp": None}},
    {"metadata": {"labels": {"team": "red", "baton.example.com/pool": "a"}}},
    {"metadata": {"labels": {
        "app.kubernetes.io/name": "llm", "app.kubernetes.io/instance": "west",
        "app.kubernetes.io/managed-by": None}}},
    {"spec": {"nodeSelector": None, "initContainers": None, "hostIPC": True}},
    of_container(env=[{"name": "A", "value": "b"}], livenessProbe=None, volumeMounts=None),
    of_container(env=[{"name": "A", "value": "b"}, {"name": "A", "value": "c"}]),
    of_container(ports=[{"containerPort": 53}, {"containerPort": 53, "protocol": "UDP"}]),
    {"spec": {"imagePullSecrets": [{"name": "mirror"}, {"name": "mirror"}]}},
]  # fmt: skip
PLACES = ["pools.decode.podTemplate", "router.podTemplate", "ray.headTemplate"]


def error_of(path: str, template: object) -> ConfigError:
    spec = changed(CLUSTER, path, template)
    with pytest.raises(ConfigError) as caught:
        read_spec(ServingClusterSpec, custom_object(CLUSTER_KIND, spec))
    return caught.value


@pytest.mark.parametrize(("template", "way", "words"), BAD_TEMPLATES)
def test_a_bad_template_is_refused_by_the_name_of_its_field(
    template: dict[str, Any], way: str, words: str
) -> None:
    for place in PLACES:
        error = error_of(place, template)
        assert error.field == f"spec.{place}{way}"
        assert words in error.message


def test_a_pool_that_somebody_changed_is_refused_alike() -> None:
    spec = changed(POOL, "podTemplate", {"spec": {"containers": ["x"]}})
    with pytest.raises(ConfigError) as caught:
        read_spec(WorkerPoolSpec, custom_object("WorkerPool", spec))
    assert caught.value.field == "spec.podTemplate.spec.containers[0]"


@pytest.mark.parametrize("template", GOOD_TEMPLATES)
def test_a_sound_template_is_taken(template: dict[str, Any]) -> None:
    for place in PLACES:
        spec = changed(CLUSTER, place, template)
        read_spec(ServingClusterSpec, custom_object(CLUSTER_KIND, spec))


def test_the_known_keys_are_kubernetes_own() -> None:
    in_no_template = {"ephemeralContainers"}  # only ever added to a pod that runs
    pod, container = client.V1PodSpec, client.V1Container
    assert set(pod_template.POD_KEYS) == set(pod.attribute_map.values()) - in_no_template
    assert set(pod_template.CONTAINER_KEYS) == set(container.attribute_map.values())
    assert set(pod_template.TEMPLATE_KEYS) == set(client.V1PodTemplateSpec.attribute_map.values())
    assert set(pod_template.METADATA_KEYS) < set(client.V1ObjectMeta.attribute_map.values())
