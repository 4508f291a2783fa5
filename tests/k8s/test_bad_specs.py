"""Each spec that tests/deploy/api/specs.py knows to be bad, on a real API server beside a real
operator: the server refuses it, or a condition reports it, by the name of its field.

A server drops keys that it does not know: those are refused by kubectl, which asks it for a schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from deploy.controller.kit.errors import NotFoundError, StatusError
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Resource
from deploy.controller.manifests.resources import SERVING_CLUSTERS, WORKER_POOLS
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
from tests.k8s.seen import cluster

CLUSTER_CASES = [(f"cluster-{number}", *case) for number, case in enumerate(BAD_CLUSTERS)]
POOL_CASES = [(f"pool-{number}", *case) for number, case in enumerate(BAD_POOLS)]
"""By the names of their ServingClusters; those of bad pools are sound."""


@dataclass
class Site:
    """One operator, and every case at once."""

    control_plane: ControlPlane
    kube: Kube
    namespace: str
    refused: dict[str, str] = field(default_factory=dict)
    """What the API server, or kubectl, said of a case."""

    def make(self, name: str, spec: dict[str, Any]) -> None:
        made = cluster(self.namespace, name, **spec)
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

    def fault(self, resource: Resource, name: str) -> str:
        """What its condition says is wrong with its spec; empty: nothing."""
        found = condition(self.read(resource, name), "Degraded")
        return str(found["message"]) if found.get("reason") == "InvalidSpec" else ""

    def refused_change(self, pool: str, spec: dict[str, Any]) -> str:
        """What the API server says against it; empty: it takes the change."""
        try:
            self.kube.merge_patch(WORKER_POOLS, Key(self.namespace, pool), {"spec": spec})
        except StatusError as error:
            return error.message
        return ""

    def refusal(self, name: str) -> str:
        """What anybody has said against a ServingCluster."""
        refused = lambda: self.refused.get(name) or self.fault(SERVING_CLUSTERS, name)  # noqa: E731
        return str(eventually(refused, f"{name} is refused"))


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
def test_a_bad_cluster_is_refused_or_reported_by_the_name_of_its_field(
    site: Site, name: str, path: str, value: object, named: str
) -> None:
    assert names_field(site.refusal(name), site.expected(named))


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_refused_or_reported(site: Site, name: str) -> None:
    assert "metadata.name" in site.refusal(name)


@pytest.mark.parametrize(("name", "path", "value", "named"), POOL_CASES)
def test_a_bad_pool_is_refused_or_reported_by_the_name_of_its_field_or_put_right(
    site: Site, name: str, path: str, value: object, named: str
) -> None:
    """What the operator itself writes of a pool it puts back, without a report."""
    pool = f"{name}-decode"

    def spec() -> dict[str, Any]:
        try:
            found: dict[str, Any] = site.read(WORKER_POOLS, pool)["spec"]
        except NotFoundError:
            return {}
        return found

    before = eventually(spec, f"{pool} is made")
    assert before.items() >= {"role": POOL["role"], "replicas": POOL["replicas"]}.items()
    if refused := site.refused_change(pool, {path: value}):
        assert names_field(refused, site.expected(named))
        return
    eventually(lambda: site.fault(WORKER_POOLS, pool) or spec() == before, pool)
    if spec() != before:
        for resource, of in ((WORKER_POOLS, pool), (SERVING_CLUSTERS, name)):
            said = eventually(lambda r=resource, n=of: site.fault(r, n), f"{of} is reported")
            assert names_field(said, site.expected(named))
