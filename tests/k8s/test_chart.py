"""The chart's life on a real API server: install, upgrade, rollback, uninstall.

Nothing runs pods here: the one Job that helm waits for is run by the test, with that Job's own
account.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.api.crd import KINDS, SERVING_CLUSTER
from deploy.api.generate import CHART
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Resource, Selection
from deploy.controller.manifests.resources import (
    DEPLOYMENTS,
    RAY_CLUSTERS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVING_CLUSTERS,
)
from deploy.controller.upgrade_crds import CRDS, upgrade_crds
from tests.deploy.chart.chart import NO_HELM
from tests.k8s.api_clients import fresh_namespace, kube_of
from tests.k8s.control_plane.errors import CommandError
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import eventually, operator_of

JOBS = Resource("batch", "v1", "jobs")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles")
REDIS = "default-redis"
"""It goes with the cluster of several nodes, not with the release."""
_JOB_TIMEOUT_S = 60.0


class Release:
    """A release called `baton` in a namespace of its own, which it looks after."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self.control_plane, self.namespace = control_plane, namespace
        self.kube: Kube = kube_of(control_plane)

    def install(self, **values: Any) -> str:
        return self._helm("install", CHART, *self._values(values))

    def upgrade(self, **values: Any) -> str:
        return self._helm("upgrade", CHART, *self._values(values))

    def rollback(self, revision: int) -> str:
        return self._helm("rollback", str(revision))

    def uninstall(self) -> str:
        return self._helm("uninstall")

    def deployment(self) -> dict[str, Any]:
        """The operator's."""
        (found,) = (d for d in self.all(DEPLOYMENTS) if d["metadata"]["name"] != REDIS)
        return dict(found)

    def redis_password(self) -> str:
        found: str = self.kube.get(SECRETS, Key(self.namespace, REDIS))["data"]["password"]
        return found

    def redis(self) -> tuple[Any, ...]:
        """What the spec says of one, which pod runs, and with which password; (): none."""
        wanted = self.cluster()["spec"].get("ray", {}).get("gcsFaultTolerance")
        runs = [
            (d["metadata"]["uid"], d["spec"]["template"]["spec"])
            for d in self.all(DEPLOYMENTS)
            if d["metadata"]["name"] == REDIS
        ]
        assert bool(wanted) is bool(runs)
        return (wanted, runs, self.redis_password()) if wanted else ()

    def redis_volume(self) -> tuple[bool, list[str]]:
        """Whether it has one, and the sizes that are claimed."""
        ((_, pod),) = self.redis()[1]
        claims = self.control_plane.read("pvc", "-n", self.namespace)["items"]
        sizes = [claim["spec"]["resources"]["requests"]["storage"] for claim in claims]
        return "persistentVolumeClaim" in pod["volumes"][0], sizes

    def cluster(self) -> dict[str, Any]:
        return self.kube.get(SERVING_CLUSTERS, Key(self.namespace, "default"))

    def all(self, resource: Resource) -> list[Any]:
        return list(self.kube.list(resource, Selection(namespace=self.namespace)).items)

    def _values(self, values: dict[str, Any]) -> tuple[str, ...]:
        path = self.control_plane.folder / f"{self.namespace}-values.json"
        usual = {
            "watchNamespaces": [self.namespace],
            "cluster": {
                "enabled": True,
                "nodes": {"preset": "gpu-rdma", "weightsCache": {"hostPath": "/mnt/weights"}},
                "spec": {"model": {"name": "models/demo"}},
            },
        }
        path.write_text(json.dumps(usual | values))
        return ("--values", str(path))

    def _helm(self, verb: str, *arguments: Any) -> str:
        return self.control_plane.helm(
            verb, "baton", *arguments, "--namespace", self.namespace, "--timeout", "60s"
        )


@pytest.fixture
def release(control_plane: ControlPlane) -> Iterator[Release]:
    if control_plane.clients.helm is None:
        pytest.skip(NO_HELM)
    if control_plane.servers is None:
        pytest.skip("the cluster of BATON_TEST_KUBECONFIG has CRDs and Jobs of its own")
    kube = kube_of(control_plane)
    with fresh_namespace(kube) as namespace:
        yield Release(control_plane, namespace)
        upgrade_crds(kube)  # whatever a test that failed has left of them


@contextlib.contextmanager
def job_is_run(release: Release, *, succeeds: bool = True) -> Iterator[None]:
    """What a kubelet does to the one Job that comes meanwhile: runs its command, as its account,
    and reports how it ended."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(_run_job, release, succeeds)
        yield
        running.result(_JOB_TIMEOUT_S)


def _run_job(release: Release, succeeds: bool) -> None:
    def new() -> list[Any]:
        return [job for job in release.all(JOBS) if not job.get("status", {}).get("conditions")]

    (job,) = eventually(new, "a Job", _JOB_TIMEOUT_S)
    pod = job["spec"]["template"]["spec"]
    if succeeds:
        account = release.control_plane.service_account_kubeconfig(
            release.namespace, pod["serviceAccountName"]
        )
        program, *arguments = pod["containers"][0]["command"]
        assert program == "python"
        command = [sys.executable, *arguments, "--kubeconfig", str(account)]
        subprocess.run(command, check=True, timeout=_JOB_TIMEOUT_S)
    kind = "Complete" if succeeds else "Failed"
    status = {"status": {"conditions": [{"type": kind, "status": "True"}]}}
    release.kube.merge_patch(
        JOBS, Key(release.namespace, job["metadata"]["name"]), status, "status"
    )


@pytest.mark.full
def test_a_release_lives_and_its_cluster_outlives_it(release: Release) -> None:
    notes = release.install()
    assert "get servingcluster,wp" in notes
    for kind in KINDS:
        crd = release.kube.get(CRDS, Key("", kind.crd_name))
        assert {c["type"]: c["status"] for c in crd["status"]["conditions"]}[
            "Established"
        ] == "True"
    first = release.cluster()
    assert first["spec"]["pools"]["decode"]["role"] == "decode"
    assert release.deployment()["spec"]["replicas"] == 1

    _age_crd(release)
    with job_is_run(release):
        release.upgrade(operator={"replicas": 2})
    assert "servedModelName" in _properties(release)
    assert release.deployment()["spec"]["replicas"] == 2
    budgets = release.control_plane.read("pdb", "-n", release.namespace)["items"]
    (budget,) = (each for each in budgets if each["metadata"]["name"] != REDIS)
    assert budget["spec"]["selector"] == release.deployment()["spec"]["selector"]
    assert _same(release.cluster(), first)
    assert not [each for each in release.all(SERVICE_ACCOUNTS)
                if each["metadata"]["name"] == "baton-crds"]  # fmt: skip

    release.rollback(1)
    assert release.deployment()["spec"]["replicas"] == 1
    assert _same(release.cluster(), first)

    release.uninstall()
    assert [each["metadata"]["name"] for each in release.all(DEPLOYMENTS)] == [REDIS]
    assert not release.all(ROLES)
    assert _same(release.cluster(), first)


@pytest.mark.full
@pytest.mark.usefixtures("ray_clusters")
def test_the_operator_under_the_releases_account_makes_pods_as_the_values_say(
    release: Release, tmp_path: Path
) -> None:
    release.install(serviceAccount={"name": "operator"})
    namespace = release.namespace
    account = release.control_plane.service_account_kubeconfig(namespace, "operator")

    def ray_cluster() -> Any:
        return next(iter(release.all(RAY_CLUSTERS)), None)

    with operator_of(release.control_plane, namespace, tmp_path, account):
        groups = eventually(ray_cluster, "a RayCluster")["spec"]["workerGroupSpecs"]
    pools = [group["groupName"] for group in groups]
    assert pools == ["decode", "prefill"]
    for pod in (group["template"]["spec"] for group in groups):
        volumes = {each.pop("name"): each for each in pod["volumes"]}
        assert volumes["weights"] == {"hostPath": {"path": "/mnt/weights", "type": "Directory"}}
        limits = pod["containers"][0]["resources"]["limits"]
        assert limits == {"nvidia.com/gpu": "1", "rdma/hca": 1}


@pytest.mark.full
def test_an_upgrade_changes_the_cluster_and_nothing_where_the_crds_cannot_be_upgraded(
    release: Release,
) -> None:
    release.install()
    first = release.cluster()
    with job_is_run(release, succeeds=False), pytest.raises(CommandError, match="pre-upgrade"):
        release.upgrade(operator={"replicas": 2})
    assert release.deployment()["spec"]["replicas"] == 1
    spec = {"model": {"name": "models/demo"}, "router": {"replicas": 3}}
    with job_is_run(release):
        release.upgrade(cluster={"enabled": True, "nodes": {"preset": "gpu"}, "spec": spec})
    now = release.cluster()
    assert now["metadata"]["uid"] == first["metadata"]["uid"]
    assert now["spec"]["router"]["replicas"] == 3
    assert "transfer" not in now["spec"] or "ucxLibrary" not in now["spec"]["transfer"]


@pytest.mark.full
def test_a_release_that_comes_again_has_its_cluster_back_and_its_rediss_secret_never_changes(
    release: Release,
) -> None:
    release.install(hub={"tokenSecretName": "hub"})
    made = [s["metadata"]["name"] for s in release.all(SECRETS) if s["type"] == "Opaque"]
    assert made == [REDIS]
    first = release.redis_password()
    with job_is_run(release):
        release.upgrade()
    assert release.redis_password() == first
    cluster = release.cluster()
    release.uninstall()
    release.install()
    assert release.redis_password() == first
    assert _same(release.cluster(), cluster)


ONE_WORKER = {"prefill": None, "decode": None, "both": {"role": "mixed"}}
SCALED_BY_PLANNER = {**ONE_WORKER, "both": {"role": "mixed", "scaling": {"mode": "planner"}}}


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "then"),
    [({}, ONE_WORKER), (ONE_WORKER, {}), (ONE_WORKER, SCALED_BY_PLANNER)],
    ids=["with one", "without", "without, and scaled by the planner since"],
)
def test_an_upgrade_leaves_a_cluster_the_redis_that_it_has_or_has_not(
    release: Release, first: dict[str, Any], then: dict[str, Any]
) -> None:
    release.install(cluster=_with_pools(first))
    before = release.redis()
    assert bool(before) is (first is not ONE_WORKER)
    with job_is_run(release):
        release.upgrade(cluster=_with_pools(then))
    assert release.redis() == before


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "volume"),
    [({}, (True, ["1Gi"])), ({"storage": "2Gi"}, (True, ["2Gi"])), ({"storage": ""}, (False, []))],
    ids=["as the chart has it", "a larger one", "none"],
)
def test_an_upgrade_leaves_a_redis_the_volume_that_it_has_or_has_not(
    release: Release, first: dict[str, Any], volume: tuple[bool, list[str]]
) -> None:
    """Another one begins empty: all workers would end."""
    release.install(cluster=_with_pools({}, **first))
    before = release.redis()
    assert release.redis_volume() == volume
    with job_is_run(release):
        release.upgrade(cluster=_with_pools({}))
    assert release.redis() == before
    assert release.redis_volume() == volume


@pytest.mark.full
def test_an_upgrade_that_asks_for_a_redis_or_for_none_is_heard(release: Release) -> None:
    release.install(cluster=_with_pools(ONE_WORKER))
    with job_is_run(release):
        release.upgrade(cluster=_with_pools(ONE_WORKER, enabled=True))
    assert release.redis()
    with job_is_run(release):
        release.upgrade(cluster=_with_pools({}, enabled=False))
    assert "gcsFaultTolerance" not in release.cluster()["spec"].get("ray", {})


def _with_pools(pools: dict[str, Any], **redis: Any) -> dict[str, Any]:
    spec = {"model": {"name": "models/demo"}, "pools": pools}
    return {"enabled": True, "spec": spec, "redis": redis}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """The object that it was, with the spec that it had."""
    return all(one["metadata"][key] == other["metadata"][key] for key in ("uid", "generation"))


def _age_crd(release: Release) -> None:
    """As an older release had it: without one of the spec's fields."""
    path = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/servedModelName"
    patch = json.dumps([{"op": "remove", "path": path}])
    name = f"crd/{SERVING_CLUSTER.crd_name}"
    release.control_plane.kubectl("patch", name, "--type=json", "-p", patch)
    assert "servedModelName" not in _properties(release)


def _properties(release: Release) -> dict[str, Any]:
    crd = release.kube.get(CRDS, Key("", SERVING_CLUSTER.crd_name))
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    properties: dict[str, Any] = schema["properties"]["spec"]["properties"]
    return properties
