"""From `helm install` to tokens: the chart, the operator, Ray in pods, routers, a prompt."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient, Client
from baton.events import Finished, HandedOff, Tokens
from deploy.api.chart import CHART
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import GroupChange, KubeRay
from tests.k8s.operating import condition, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds", "kubelet", "kuberay")]

MODEL = Path(__file__).parents[2] / "models" / "demo"
AVAILABLE_WITHIN_S = 150.0


class Installed:
    """A release of the chart with one ServingCluster called `default`."""

    def __init__(
        self, control_plane: ControlPlane, namespace: str, folder: Path, **nodes: Any
    ) -> None:
        """`nodes`: more of the chart's cluster.nodes."""
        self._control_plane, self.namespace, self._folder = control_plane, namespace, folder
        self._nodes = {"preset": "cpu", **nodes}

    def install(self, **spec: Any) -> None:
        values = {
            "watchNamespaces": [self.namespace],
            "crds": {"upgrade": False},
            "cluster": {"enabled": True, "nodes": self._nodes, "spec": spec},
        }
        path = self._folder / "values.json"
        path.write_text(json.dumps(values))
        self._control_plane.helm(
            "install", "baton", CHART, "-n", self.namespace, "--skip-crds", "-f", path
        )

    def read(self, what: str) -> dict[str, Any]:
        found: dict[str, Any] = self._control_plane.read(what, "-n", self.namespace)
        return found

    def scale(self, pool: str, replicas: int) -> None:
        self._control_plane.kubectl(
            "-n", self.namespace, "scale", f"wp/{pool}", f"--replicas={replicas}"
        )

    def wait_available(self) -> None:
        def told() -> dict[str, Any] | None:
            found = condition(self.read("servingcluster/default"), "Available")
            return found if found.get("status") == "True" else None

        eventually(told, "the ServingCluster is available", AVAILABLE_WITHIN_S)


@pytest.fixture
def installed(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Installed:
    return Installed(control_plane, namespace, tmp_path)


def router_address(kubelet: Kubelet) -> str:
    """Of a router pod that is ready and stays: this machine reaches pods by their addresses."""
    for pod in kubelet.pods("app.kubernetes.io/component=router"):
        is_ready = condition(pod, "Ready").get("status") == "True"
        if is_ready and "deletionTimestamp" not in pod["metadata"]:
            return f"{pod['status']['podIP']}:7100"
    raise AssertionError("no router is ready")


@pytest.mark.full
def test_helm_install_ends_with_an_answer_whose_kv_crossed_from_pod_to_pod(
    installed: Installed, kubelet: Kubelet, kuberay: KubeRay
) -> None:
    installed.install(
        model={"name": str(MODEL)},
        router={"replicas": 1, "settings": {"localPrefill": "never"}},
    )
    installed.wait_available()
    with Client(router_address(kubelet)) as client:
        events = list(client.generate(chat=[{"role": "user", "content": "Who is Hugo?"}]))
    text = "".join(event.text for event in events if isinstance(event, Tokens))
    assert text == "Hugo is the postman of Willowmere. He brings letters to every house."
    (handed_off,) = [event for event in events if isinstance(event, HandedOff)]
    assert handed_off.kv_bytes > 0
    assert isinstance(events[-1], Finished)
    pools = installed.read("servingcluster/default")["status"]["pools"]
    assert pools == {"prefill": "1/1", "decode": "1/1"}


# --- scaling while streams run --------------------------------------------------------------------

NUM_STREAMS = 50
NUM_TOKENS = 150
FAKE = {"backend": "fake", "fake": {"decodeStepS": 0.03}, "maxNumSeqs": 64}


async def stream(client: AsyncClient, number: int) -> list[int]:
    ids: list[int] = []
    prompt = f"stream number {number}"
    running = client.generate(prompt, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, temperature=0.0)
    async for event in running:
        if isinstance(event, Tokens):
            assert event.index == len(ids), "no token twice, none missing"
            ids += event.ids
    return ids


async def streams(address: str, until: Callable[[], bool]) -> list[list[int]]:
    """Rounds of streams at once, one after another until the change is over; the first round's
    tokens, which all others repeated."""
    async with AsyncClient(address) as client:
        oracle: list[list[int]] = []
        while not oracle or not until():
            found = await asyncio.gather(*(stream(client, n) for n in range(NUM_STREAMS)))
            oracle = oracle or found
            assert found == oracle
    return oracle


@pytest.mark.full
def test_a_pool_is_scaled_out_and_in_under_streams_and_none_changes_a_token(
    installed: Installed, kubelet: Kubelet, kuberay: KubeRay
) -> None:
    installed.install(
        model={"name": str(MODEL)},
        engine=FAKE,
        router={"replicas": 1, "settings": {"localPrefill": "never"}},
    )
    installed.wait_available()
    address = router_address(kubelet)
    asyncio.run(streams(address, lambda: True))  # the oracle of a cluster that stands still

    def has(replicas: int) -> Callable[[], bool]:
        def told() -> bool:
            status = installed.read("wp/decode").get("status", {})
            return status.get("readyReplicas", 0) == replicas == status.get(
                "replicas", 0
            ) and not status.get("draining")

        return told

    for replicas in (3, 1):
        installed.scale("decode", replicas)
        oracle = asyncio.run(asyncio.wait_for(streams(address, has(replicas)), 150))
        assert all(len(ids) == NUM_TOKENS for ids in oracle)
    cleared = GroupChange(1, ())
    eventually(lambda: kuberay.changes("default", "decode")[-1] == cleared, "the patch is cleared")
    shrinking = [
        (before, after)
        for before, after in itertools.pairwise(kuberay.changes("default", "decode"))
        if after.replicas < before.replicas
    ]
    assert shrinking
    for before, after in shrinking:
        assert len(set(after.to_delete) - set(before.to_delete)) == before.replicas - after.replicas
