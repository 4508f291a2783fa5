"""Where routers and supervisors are: this machine reaches pods by their addresses."""

from __future__ import annotations

from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import condition

HEAD = "app.kubernetes.io/component=head"


def router_addresses(kubelet: Kubelet) -> list[str]:
    """Of router pods that are ready and stay."""
    return [
        f"{pod['status']['podIP']}:7100"
        for pod in kubelet.pods("app.kubernetes.io/component=router")
        if condition(pod, "Ready").get("status") == "True"
        and "deletionTimestamp" not in pod["metadata"]
    ]


def router_address(kubelet: Kubelet) -> str:
    addresses = router_addresses(kubelet)
    assert addresses, "no router is ready"
    return addresses[0]


def control_address(kubelet: Kubelet) -> str:
    (head,) = kubelet.pods(HEAD)
    return f"{head['status']['podIP']}:7101"
