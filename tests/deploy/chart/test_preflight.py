"""`helm test`: a Job for each pool, with what that pool's pods have; two of them are a pair."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.preflight.__main__ import parser
from tests.deploy.chart.chart import Helm, Object, first_cluster, of_kind, one
from tests.deploy.chart.matrix import ON, Values, each_once
from tests.deploy.schemas import check_kubernetes

RDMA: dict[str, Any] = {
    "preset": "gpu-rdma",
    "nodeSelector": {"gpu": "h100"},
    "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net"},
    "resources": {"rdma/hca": 1, "hugepages-2Mi": "4Gi"},
    "env": {"UCX_NET_DEVICES": "mlx5_0:1"},
    "sharedMemory": True,
    "weightsCache": {"hostPath": "/mnt/weights"},
}


def jobs(helm: Helm, **cluster: Any) -> dict[str, Object]:
    """By the ends of their names."""
    found = of_kind(helm.tests(first_cluster(**cluster)), "Job")
    for each in found:
        check_kubernetes(each)
    return {each["metadata"]["name"].removeprefix("baton-preflight-"): each for each in found}


def pod(job: Object) -> Object:
    found: Object = job["spec"]["template"]
    return found


def container(job: Object) -> Object:
    (found,) = pod(job)["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def flags(job: Object) -> Any:
    """As the command itself reads them: one that it does not know ends the test."""
    python, *module = container(job)["command"][:3]
    assert (python, module) == ("python", ["-m", "cluster.preflight"])
    return parser().parse_args(container(job)["command"][3:])


@pytest.mark.parametrize("values", each_once())
def test_every_setting_gives_jobs_that_kubernetes_takes(helm: Helm, values: Values) -> None:
    found = helm.tests(values)
    assert bool(found) == values.get("cluster", {}).get("enabled", False)
    for each in found:
        check_kubernetes(each)


def test_a_pools_job_asks_for_what_its_pods_ask_for_and_checks_it(helm: Helm) -> None:
    pools = {"prefill": {"parallelism": {"tensor": 4}}}
    made = jobs(helm, nodes=RDMA, spec=ON | {"pools": pools})
    assert set(made) == {"prefill", "decode"}
    for name, ranks in (("prefill", 4), ("decode", 1)):
        job = made[name]
        limits = container(job)["resources"]["limits"]
        assert limits == {"nvidia.com/gpu": str(ranks), "rdma/hca": 1, "hugepages-2Mi": "4Gi"}
        options = flags(job)
        assert options.gpus == ranks
        assert options.rdma
        assert options.hugepages
        assert options.ucx_library == "system"


def test_a_pools_job_lands_where_its_pods_do(helm: Helm) -> None:
    job = jobs(helm, nodes=RDMA)["decode"]
    spec = pod(job)["spec"]
    assert spec["nodeSelector"] == {"gpu": "h100"}
    assert [each["key"] for each in spec["tolerations"]] == ["nvidia.com/gpu"]
    assert spec["hostIPC"]
    assert pod(job)["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rdma-net"
    assert container(job)["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert {"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"} in container(job)["env"]
    (shm,) = [each for each in spec["volumes"] if each["name"] == "shm"]
    assert shm["emptyDir"]["sizeLimit"] == "16Gi"


def test_prefills_job_hands_over_to_decodes_on_another_node(helm: Helm) -> None:
    made = jobs(helm)
    service = one(helm.tests(first_cluster()), "Service")
    check_kubernetes(service)
    assert flags(made["decode"]).listen == service["spec"]["ports"][0]["port"]
    assert flags(made["prefill"]).connect == f"{service['metadata']['name']}:7105"
    node = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    for name, job in made.items():
        labels = pod(job)["metadata"]["labels"].items()
        assert (service["spec"]["selector"].items() <= labels) == (name == "decode")
        apart = pod(job)["spec"]["affinity"]["podAntiAffinity"]
        (term,) = apart["preferredDuringSchedulingIgnoredDuringExecution"]
        assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
        assert term["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels
        assert node in container(job)["env"]
        assert flags(job).node == "$(NODE_NAME)"


@pytest.mark.parametrize(
    ("roles", "sender", "receiver"),
    [
        ({"a": "mixed"}, None, None),
        ({"a": "decode", "b": "decode"}, None, None),
        ({"a": "mixed", "b": "mixed"}, "b", "a"),
        ({"a": "prefill", "b": "mixed", "c": "prefill"}, "a", "b"),
    ],
)
def test_two_pools_that_hand_over_are_a_pair(
    helm: Helm, roles: dict[str, str], sender: str | None, receiver: str | None
) -> None:
    pools = {"prefill": None, "decode": None} | {name: {"role": it} for name, it in roles.items()}
    options = {name: flags(job) for name, job in jobs(helm, spec=ON | {"pools": pools}).items()}
    assert [name for name, each in options.items() if each.connect] == [sender] * bool(sender)
    assert [name for name, each in options.items() if each.listen] == [receiver] * bool(receiver)


def test_a_job_ends_runs_once_and_keeps_what_it_said(helm: Helm) -> None:
    sidecar = {
        "podTemplate": {"spec": {"containers": [{"name": "exporter", "image": "exporter:1"}]}}
    }
    job = jobs(helm, nodes={"preset": "cpu"}, spec=ON | {"pools": {"decode": sidecar}})["decode"]
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["activeDeadlineSeconds"] == 600
    assert pod(job)["spec"]["restartPolicy"] == "Never"
    assert container(job)["name"] == "preflight"
    assert "lifecycle" not in container(job)
    assert "limits" not in container(job)["resources"]
    assert flags(job).gpus == 0


@pytest.mark.parametrize("none", [None, 0, "0"])
def test_a_shared_gpu_is_asked_for_as_the_pool_asks_for_it(helm: Helm, none: object) -> None:
    share = {"nvidia.com/gpu": none, "rdma/hca": none, "nvidia.com/gpu.shared": 1}
    worker = {"name": "ray-worker", "resources": {"requests": share, "limits": share}}
    both = {"role": "mixed", "podTemplate": {"spec": {"containers": [worker]}}}
    pools = {"prefill": None, "decode": None, "both": both}
    (job,) = jobs(helm, spec=ON | {"pools": pools}).values()
    assert container(job)["resources"]["limits"] == {"nvidia.com/gpu.shared": 1}
    assert flags(job).gpus == 1
    assert not flags(job).rdma


def of_worker(helm: Helm, model: dict[str, Any] | None = None, **spec: Any) -> Object:
    """The job of a pool whose template says `spec`."""
    both = {"role": "mixed", "podTemplate": {"spec": spec}}
    pools = {"prefill": None, "decode": None, "both": both}
    (job,) = jobs(helm, spec={"model": model or ON["model"], "pools": pools}).values()
    return job


def test_a_job_has_the_image_of_the_workers_and_nothing_that_they_are_started_with(
    helm: Helm,
) -> None:
    spec = ON | {"images": {"worker": "mine:2", "pullSecrets": ["mirror"], "pullPolicy": "Always"}}
    own = {"name": "ray-worker", "image": "mine:3", "imagePullPolicy": "Never", "args": ["-c"]}
    pool = of_worker(helm, containers=[own], imagePullSecrets=[{"name": "mirror"}])
    for job, image, policy in (
        (jobs(helm, spec=spec)["decode"], "mine:2", "Always"),
        (pool, "mine:3", "Never"),
    ):
        assert (container(job)["image"], container(job)["imagePullPolicy"]) == (image, policy)
        assert pod(job)["spec"]["imagePullSecrets"] == [{"name": "mirror"}]
        assert "args" not in container(job)
        assert flags(job).gpus == 1


@pytest.mark.parametrize("model", [{"claim": {"claimName": "m"}}, {"name": "models/demo"}])
def test_volumes_that_only_a_worker_has_are_not_mounted(helm: Helm, model: dict[str, Any]) -> None:
    names = ("weights", "run", "model", "shm", "mine")
    mounts = [{"name": name, "mountPath": f"/{name}"} for name in names]
    job = of_worker(
        helm,
        model,
        containers=[{"name": "ray-worker", "volumeMounts": mounts}],
        volumes=[{"name": "mine", "emptyDir": {}}],
    )
    mounted = [each["name"] for each in container(job)["volumeMounts"]]
    assert mounted == ["tmp", "shm", "shm", "mine"]
    assert set(mounted) <= {each["name"] for each in pod(job)["spec"]["volumes"]}


def test_a_weights_cache_is_mounted_where_a_template_says(helm: Helm) -> None:
    mount = {"name": "weights", "mountPath": "/weights"}
    worker = {"name": "ray-worker", "volumeMounts": [mount]}
    pools = {"decode": {"podTemplate": {"spec": {"containers": [worker]}}}}
    job = jobs(helm, nodes=RDMA, spec=ON | {"pools": pools})["decode"]
    assert mount in container(job)["volumeMounts"]


def test_releases_whose_names_begin_alike_have_jobs_of_their_own(helm: Helm) -> None:
    def names(release: str) -> set[str]:
        found = of_kind(helm.tests(first_cluster() | {"fullnameOverride": release}), "Job")
        return {each["metadata"]["name"] for each in found}

    assert names("of-12-letter") == {f"of-12-letter-preflight-{it}" for it in ("prefill", "decode")}
    assert not names("of-12-letters") & names("of-12-letterz")
    longest = first_cluster(spec={"pools": {"p" * 34: {"role": "mixed"}}})
    found = of_kind(helm.tests(longest | {"fullnameOverride": "f" * 40}), "Job")
    assert max(len(each["metadata"]["name"]) for each in found) <= 63 - len("-pod12")


def test_without_a_cluster_there_is_nothing_to_test(helm: Helm) -> None:
    assert not helm.tests({})
    assert not of_kind(helm.template(first_cluster()), "Job")
