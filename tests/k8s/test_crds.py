"""The custom resources on a real API server: defaults, kubectl's views, and refusals at admission.

Rules that cross fields are CEL: a server without it takes what breaks them, and the operator tells
it in a condition (tests/deploy/api/test_rules.py shows that both say the same).
"""

from __future__ import annotations

from typing import Any

import pytest

from deploy.api.naming import API_VERSION
from deploy.controller.resources import WORKER_POOLS
from tests.k8s.api_clients import kube_of
from tests.k8s.control_plane.errors import CommandError
from tests.k8s.control_plane.plane import ControlPlane

pytestmark = pytest.mark.usefixtures("crds")


def cluster(namespace: str, **spec: Any) -> dict[str, Any]:
    usual = {
        "model": {"name": "models/demo"},
        "pools": {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}},
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "ServingCluster",
        "metadata": {"name": "main", "namespace": namespace},
        "spec": usual | spec,
    }


def pool(namespace: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "WorkerPool",
        "metadata": {"name": "decode", "namespace": namespace},
        "spec": {"role": "decode", "cluster": "main", "pool": "decode"} | spec,
    }


def test_a_small_cluster_is_taken_and_its_defaults_are_seen(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.apply(cluster(namespace))
    spec = control_plane.read("servingcluster/main", "-n", namespace)["spec"]
    assert spec["router"]["replicas"] == 2
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


@pytest.mark.parametrize(
    "section",
    [
        {"template": {"spec": {"containers": [{"name": "ray-worker", "image": "a"}]}}},
        {"engine": {"fake": {"vocabSize": 300}}},
        {"rollout": {"maxSurge": 2}},
        {"rolePlan": {"prefill": 1, "decode": 1}, "role": "mixed"},
    ],
    ids=lambda section: next(iter(section)),
)
def test_a_section_that_the_operator_takes_back_leaves_nothing_behind(
    control_plane: ControlPlane, namespace: str, section: dict[str, Any]
) -> None:
    """Where an API server owns what is inside of it one by one, an old one leaves a null there."""
    kube = kube_of(control_plane)
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
        ({"model": {"uri": "ftp://host/model"}}, "spec.model.uri"),
        ({"logLevel": "loud"}, "spec.logLevel"),
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


def test_kubectl_explains_a_setting_in_the_words_of_its_dataclass(
    control_plane: ControlPlane, namespace: str
) -> None:
    told = control_plane.kubectl("explain", "servingcluster.spec.engine.maxNumSeqs")
    assert "Requests running at once." in told
