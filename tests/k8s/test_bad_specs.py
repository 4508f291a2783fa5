"""Each spec that tests/deploy/api/specs.py knows to be bad, on a real API server beside a real
operator: the server refuses it, or a condition tells it, by the name of its field.

A server drops keys that it does not know: those are refused by kubectl, which asks it for a schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from deploy.api.naming import API_VERSION
from deploy.controller.kit.errors import NotFoundError, StatusError
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Resource
from deploy.controller.resources import SERVING_CLUSTERS, WORKER_POOLS
from tests.deploy.api.specs import (
    BAD_CLUSTERS,
    BAD_NAMES,
    BAD_POOLS,
    CLUSTER,
    POOL,
    changed,
)
from tests.k8s.api_clients import fresh_namespace, kube_of
from tests.k8s.control_plane.errors import CommandError
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import condition, eventually, operator_of

CLUSTER_CASES = [(f"cluster-{number}", *case) for number, case in enumerate(BAD_CLUSTERS)]
POOL_CASES = [(f"pool-{number}", *case) for number, case in enumerate(BAD_POOLS)]
"""By the names of their ServingClusters; those of bad pools are sound."""
TOLD_WITHIN_S = 60.0


@dataclass
class Site:
    """One operator, and every case at once."""

    control_plane: ControlPlane
    kube: Kube
    namespace: str
    refused: dict[str, str] = field(default_factory=dict)
    """What the API server, or kubectl, said of a case."""

    def make(self, name: str, spec: dict[str, Any]) -> None:
        made = serving_cluster(self.namespace, name, spec)
        try:
            stored = self.kube.create(SERVING_CLUSTERS, made)
        except StatusError as error:
            self.refused[name] = error.message
            return
        if not holds(stored["spec"], spec):
            self.refused[name] = self._said_by_kubectl(made)

    def _said_by_kubectl(self, made: dict[str, Any]) -> str:
        """Once the server's schema, which comes a moment after the kind, is one for kubectl. Until
        then kubectl writes, and may collide with a status that the operator writes."""

        def said() -> str:
            try:
                self.control_plane.kubectl("replace", "-f", "-", stdin=json.dumps(made))
            except CommandError as error:
                return "" if "Error from server (Conflict)" in str(error) else str(error)
            return ""

        return str(eventually(said, "kubectl refuses it"))

    def read(self, resource: Resource, name: str) -> dict[str, Any]:
        return self.kube.get(resource, Key(self.namespace, name))

    def expected(self, path: str) -> str:
        """Of the field's path in what is said. A CEL rule's message begins with where it stands,
        and its own words go on with the rest."""
        return path.rpartition(".")[2] if self.control_plane.has_cel() else path

    def told(self, resource: Resource, name: str) -> str:
        """What its condition says is wrong with its spec; empty: nothing."""
        found = condition(self.read(resource, name), "Degraded")
        return str(found["message"]) if found.get("reason") == "InvalidSpec" else ""


def serving_cluster(namespace: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    return {
        "apiVersion": API_VERSION,
        "kind": "ServingCluster",
        "metadata": metadata,
        "spec": spec,
    }


def holds(stored: Any, spec: Any) -> bool:
    """Whether all keys were kept."""
    if not isinstance(spec, Mapping):
        return True
    return all(key in stored and holds(stored[key], value) for key, value in spec.items())


@pytest.fixture(scope="module")
def site(
    control_plane: ControlPlane,
    crds: None,
    ray_clusters: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    kube, folder = kube_of(control_plane), tmp_path_factory.mktemp("operator")
    with fresh_namespace(kube) as namespace, operator_of(control_plane, namespace, folder):
        made = Site(control_plane, kube, namespace)
        for name, path, value, _ in CLUSTER_CASES:
            made.make(name, changed(CLUSTER, path, value))
        for name in (*BAD_NAMES, *(name for name, *_ in POOL_CASES)):
            made.make(name, CLUSTER)
        yield made


def names_field(said: str, path: str) -> bool:
    """kubectl names a key that it does not know beside where it stands."""
    parent, _, key = path.rpartition(".")
    return path in said or (f"{parent})" in said and f'unknown field "{key}"' in said)


@pytest.mark.parametrize(("name", "path", "value", "named"), CLUSTER_CASES)
def test_a_bad_cluster_is_refused_or_told_by_the_name_of_its_field(
    site: Site, name: str, path: str, value: object, named: str
) -> None:
    def told() -> str:
        return site.refused.get(name) or site.told(SERVING_CLUSTERS, name)

    said = eventually(told, f"{path}: {value} is told", TOLD_WITHIN_S)
    assert names_field(said, site.expected(named))


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_refused_or_told(site: Site, name: str) -> None:
    def told() -> str:
        return site.refused.get(name) or site.told(SERVING_CLUSTERS, name)

    assert "metadata.name" in eventually(told, f"{name} is told", TOLD_WITHIN_S)


@pytest.mark.parametrize(("name", "path", "value", "named"), POOL_CASES)
def test_a_bad_pool_is_refused_or_told_by_the_name_of_its_field_or_put_right(
    site: Site, name: str, path: str, value: object, named: str
) -> None:
    """What the operator itself writes of a pool is put back; nobody has to be told."""
    pool = f"{name}-decode"
    before = eventually(lambda: pool_spec(site, pool), f"{pool} is made", TOLD_WITHIN_S)
    assert before.items() >= {"role": POOL["role"], "replicas": POOL["replicas"]}.items()
    if refused := refusal(site, pool, {path: value}):
        assert names_field(refused, site.expected(named))
        return

    def is_put_right() -> bool:
        return pool_spec(site, pool) == before

    eventually(lambda: site.told(WORKER_POOLS, pool) or is_put_right(), pool, TOLD_WITHIN_S)
    if not is_put_right():
        for resource, of in ((WORKER_POOLS, pool), (SERVING_CLUSTERS, name)):
            said = eventually(lambda r=resource, n=of: site.told(r, n), f"{of} is told so")
            assert names_field(said, site.expected(named))


def refusal(site: Site, pool: str, spec: dict[str, Any]) -> str:
    """What the API server says against such a change; empty: it takes it."""
    try:
        site.kube.merge_patch(WORKER_POOLS, Key(site.namespace, pool), {"spec": spec})
    except StatusError as error:
        return error.message
    return ""


def pool_spec(site: Site, name: str) -> dict[str, Any]:
    """Empty: there is no such pool yet."""
    try:
        spec: dict[str, Any] = site.read(WORKER_POOLS, name)["spec"]
    except NotFoundError:
        return {}
    return spec
