"""A ServingCluster is deleted: streams that run end as ever, and nothing of it is left."""

from __future__ import annotations

from pathlib import Path

from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.installed import OPERATOR, PREFILL_AND_DECODE, Installed, on_pods
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.operating import eventually, operator_of
from tests.k8s.streaming import NUM_STREAMS, streaming

pytestmark = on_pods(600, "crds", "kuberay")

NUM_TOKENS = 600
ROUTER = {"placement": {"localPrefill": "never"}, "drainTimeoutSeconds": 1.0}
"""A router that goes before the streams have ended loses them."""
KINDS = (
    "servingclusters,workerpools,rayclusters.ray.io,deployments,replicasets,pods,services,"
    "configmaps,secrets,serviceaccounts,poddisruptionbudgets,networkpolicies"
)


def begin(installed: Installed) -> None:
    installed.kubectl("delete", "servingcluster/default", "--wait=false")


def left(installed: Installed) -> list[str]:
    """What the operator made, and what was made of that. The release's own is none of it."""
    return [
        f"{item['kind']}/{item['metadata']['name']}"
        for item in installed.read(KINDS)["items"]
        if item["kind"] in ("ServingCluster", "WorkerPool", "RayCluster")
        or item["metadata"].get("labels", {}).get("app.kubernetes.io/instance") == "default"
        or "ray.io/cluster" in item["metadata"].get("labels", {})
    ]


def wait_over(installed: Installed) -> None:
    eventually(lambda: not left(installed), "nothing is left", 120)


def test_streams_that_run_end_with_all_their_tokens_and_then_nothing_is_left(
    installed: Installed, kubelet: Kubelet
) -> None:
    installed.serve(advanced={"router": ROUTER})
    assert any(name.startswith("RayCluster/") for name in left(installed))
    with streaming(kubelet, NUM_TOKENS) as streams:
        streams.wait_all_run()
        streams.enough()
        begin(installed)
        eventually(installed.draining, "the decode pool drains")
        assert streams.num_running == NUM_STREAMS, "it drains in time"
    assert streams.num_rounds == 2
    wait_over(installed)


def test_a_cluster_that_is_deleted_while_no_operator_runs_goes_on_until_one_is_back(
    installed: Installed, kubelet: Kubelet
) -> None:
    installed.serve(advanced={"router": ROUTER})
    with streaming(kubelet, NUM_TOKENS) as streams:
        installed.scale_operator(0)
        eventually(lambda: not kubelet.pods(OPERATOR), "the operator is down")
        begin(installed)
        streams.wait_rounds(2)
        streams.wait_all_run()
        streams.enough()
        installed.scale_operator(1)
    wait_over(installed)


def test_the_account_that_empties_the_redis_of_rays_head_goes_after_it(
    control_plane: ControlPlane, installed: Installed, kuberay: KubeRay, tmp_path: Path
) -> None:
    """Nothing runs the pods here."""
    pools = {"decode": PREFILL_AND_DECODE["decode"] | {"initialReplicas": 0}}
    ray = {"gcsFaultTolerance": {"redisAddress": "redis:6379"}}

    def heads() -> list[str]:
        return [name for name in left(installed) if "Pod/default-" in name and "-head-" in name]

    with operator_of(control_plane, installed.namespace, tmp_path):
        installed.make(pools=pools, ray=ray)
        eventually(heads, "the head has a pod")
        begin(installed)
        wait_over(installed)
