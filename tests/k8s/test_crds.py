"""The custom resources on a real API server: defaults, kubectl's views, and refusals at admission.

Rules that cross fields are CEL: a server without it takes what breaks them, and the operator
reports it in a condition (tests/deploy/api/test_rules.py shows that both say the same).
"""

from __future__ import annotations

from typing import Any

import pytest

from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.resources import SERVING_CLUSTERS, WORKER_POOLS
from tests.k8s.control_plane.errors import CommandError
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.seen import cluster, pool

pytestmark = pytest.mark.usefixtures("crds")


def test_a_small_cluster_is_taken_and_its_defaults_are_seen(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.apply(cluster(namespace))
    spec = control_plane.read("servingcluster/main", "-n", namespace)["spec"]
    assert spec["router"]["serviceType"] == "ClusterIP"
    assert "replicas" not in spec["router"], "their scaler sets it"
    assert spec["pools"]["decode"]["maxReplicas"] == 8
    assert spec["pools"]["decode"]["initialReplicas"] == 1
    assert spec["pools"]["decode"]["scaling"] == {"mode": "manual"}
    assert "engine" not in spec, "what cluster.yaml shares is not written into stored objects"


def test_kubectl_scale_changes_a_pools_size_and_get_shows_it(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.apply(pool(namespace))
    control_plane.kubectl("-n", namespace, "scale", "wp/decode", "--replicas=4")
    assert control_plane.read("wp/decode", "-n", namespace)["spec"]["replicas"] == 4
    header, row = control_plane.kubectl("-n", namespace, "get", "wp").splitlines()
    assert header.split()[:4] == ["NAME", "ROLE", "DESIRED", "READY"]
    assert row.split()[:3] == ["decode", "decode", "4"]


def conditions_of(**conditions: tuple[str, str]) -> list[dict[str, Any]]:
    """Each with its status and reason."""
    return [
        {"type": kind, "status": status, "reason": reason, "message": "so it is",
         "lastTransitionTime": "2026-01-01T10:00:00Z"}
        for kind, (status, reason) in conditions.items()
    ]  # fmt: skip


def shown(control_plane: ControlPlane, namespace: str, *what: str) -> dict[str, str]:
    """The one row of `kubectl get`, by its columns; none may be empty."""
    header, row = control_plane.kubectl("-n", namespace, "get", *what).splitlines()
    return dict(zip(header.split(), row.split(), strict=True))


def test_kubectl_get_shows_how_a_pool_is_and_how_fast_beside_what_it_is_to_be(
    control_plane: ControlPlane, kube: Kube, namespace: str
) -> None:
    control_plane.apply(pool(namespace, replicas=2))
    conditions = conditions_of(
        Available=("True", "Live"),
        Progressing=("True", "Draining"),
        Degraded=("False", "Sound"),
    )
    status = {
        "replicas": 3, "readyReplicas": 2, "drainingReplicas": 1,
        "queue": 7, "kvUsePercent": 40, "desiredReplicas": 5, "conditions": conditions,
        "ttftSeconds": 0.25, "ttftTargetSeconds": 0.5, "itlSeconds": 0.02, "itlTargetSeconds": 0.04,
    }  # fmt: skip
    key = Key(namespace, "decode")
    kube.merge_patch(WORKER_POOLS, key, {"status": status}, "status")
    usual = shown(control_plane, namespace, "wp")
    del usual["AGE"]
    assert usual == {
        "NAME": "decode", "ROLE": "decode", "DESIRED": "2", "READY": "2", "DRAINING": "1",
        "AVAILABLE": "True", "PROGRESS": "Draining", "QUEUE": "7", "KV%": "40",
    }  # fmt: skip
    more = {
        "SCALING": "manual", "PLANNED": "5", "TTFT": "0.25", "TTFT-TARGET": "0.5",
        "ITL": "0.02", "ITL-TARGET": "0.04", "FAULT": "Sound", "CLUSTER": "main",
    }  # fmt: skip
    assert shown(control_plane, namespace, "wp", "-o", "wide").items() >= (usual | more).items()


def test_kubectl_get_shows_what_a_cluster_serves_or_why_it_does_not(
    control_plane: ControlPlane, kube: Kube, namespace: str
) -> None:
    control_plane.apply(cluster(namespace))
    conditions = conditions_of(
        Available=("False", "NoRouterReady"),
        Progressing=("True", "Changing"),
        Degraded=("True", "Refused"),
    )
    status = {
        "model": "demo", "unit": "bcdfg", "conditions": conditions,
        "endpoints": {"grpc": "main-router.here.svc:7100", "external": "llm.example.com",
                      "openai": "http://main-router.here.svc:8000/v1", "externalOpenai": "a.b/v1"},
    }  # fmt: skip
    key = Key(namespace, "main")
    kube.merge_patch(SERVING_CLUSTERS, key, {"status": status}, "status")
    usual = shown(control_plane, namespace, "serving")
    del usual["AGE"]
    assert usual == {
        "NAME": "main", "MODEL": "demo", "AVAILABLE": "False", "REASON": "NoRouterReady",
        "PROGRESSING": "True", "DEGRADED": "True",
    }  # fmt: skip
    more = {
        "PROGRESS": "Changing", "FAULT": "Refused", "ENDPOINT": "main-router.here.svc:7100",
        "EXTERNAL": "llm.example.com", "UNIT": "bcdfg",
        "HTTP": "http://main-router.here.svc:8000/v1", "EXTERNAL-HTTP": "a.b/v1",
    }  # fmt: skip
    wide = shown(control_plane, namespace, "serving", "-o", "wide")
    assert wide.items() >= (usual | more).items()


@pytest.mark.parametrize(
    "section",
    [
        {"podTemplate": {"spec": {"containers": [{"name": "ray-worker", "image": "a"}]}}},
        {"engine": {"maxNumSeqs": 300}},
        {"env": [{"name": "A", "value": "1"}]},
        {"nodeSelector": {"rack": "7"}},
        {"parallelism": {"tensor": 2}},
        {"rolePlan": {"prefill": 1, "decode": 1}, "role": "mixed"},
    ],
    ids=lambda section: next(iter(section)),
)
def test_a_section_that_the_operator_takes_back_leaves_nothing_behind(
    kube: Kube, namespace: str, section: dict[str, Any]
) -> None:
    """Where an API server owns what is inside of it one by one, an old one leaves a null there."""
    (name, _), *rest = section.items()
    plain = pool(namespace, **dict(rest))
    before = kube.apply(WORKER_POOLS, plain, force=True)["spec"]
    kube.apply(WORKER_POOLS, pool(namespace, **section), force=True)
    assert kube.apply(WORKER_POOLS, plain, force=True)["spec"] == before, name


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": {}, "router": {"replicas": 0}}, "spec.router.replicas"),
        ({"pools": {"decode": {"role": "decoder"}}}, "spec.pools.decode.role"),
        ({"pools": {"decode": {"role": "decode", "drainTimeout": "soon"}}}, "drainTimeout"),
        ({"pools": {"decode": {}}}, 'spec.pools.decode.* "role"'),
        ({"engine": {"blockSize": "16"}}, "spec.engine.blockSize"),
        ({"engine": {"dtype": "bf16"}}, "spec.engine.dtype"),
        ({"pools": {"decode": {"role": "decode", "engine": {"device": "gpu"}}}}, "engine.device"),
        ({"model": {"uri": "ftp://host/model"}}, "spec.model.uri"),
        ({"logLevel": "loud"}, "spec.logLevel"),
        ({"ray": {"version": "2.51.0"}}, "spec.ray.version"),
        ({"fabric": {"nodeLabel": "not a label"}}, "spec.fabric.nodeLabel"),
        ({"router": {"hostname": "UPPER_case!"}}, "spec.router.hostname"),
    ],
)
def test_a_bad_spec_is_refused_at_admission_by_the_name_of_its_field(
    control_plane: ControlPlane, namespace: str, spec: dict[str, Any], field: str
) -> None:
    with pytest.raises(CommandError, match=field):
        control_plane.apply(cluster(namespace, **spec))


def test_what_crosses_fields_is_refused_at_admission_where_the_server_has_cel(
    control_plane: ControlPlane, namespace: str
) -> None:
    if not control_plane.has_cel():
        pytest.skip("this API server has no CEL")
    with pytest.raises(CommandError, match="replicas must not be above maxReplicas"):
        control_plane.apply(pool(namespace, replicas=65))
    with pytest.raises(CommandError, match=r"metadata\.name must be of 1 to 47 small letters"):
        control_plane.apply(cluster(namespace, "7b"))


def test_kubectl_explains_a_setting_in_the_words_of_its_dataclass(
    control_plane: ControlPlane, namespace: str
) -> None:
    text = control_plane.kubectl("explain", "servingcluster.spec.engine.maxNumSeqs")
    assert "Most requests that run at once." in text
