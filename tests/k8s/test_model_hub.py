"""A model on a hub is fetched before its workers' pods start, once for all that share a cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.client import Client
from baton.client.events import Tokens
from tests.baton.small_hub import SmallHub
from tests.k8s.addresses import router_address
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.test_serving import MODEL, Installed

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("crds", "kubelet", "kuberay"),
]


def test_a_hubs_model_is_fetched_by_init_containers_and_answers(
    control_plane: ControlPlane, namespace: str, kubelet: Kubelet, tmp_path: Path
) -> None:
    (host,) = (
        each["address"]
        for each in control_plane.read("node/node-a")["status"]["addresses"]
        if each["type"] == "InternalIP"
    )
    files = {path.name: path.read_bytes() for path in MODEL.iterdir()}
    with SmallHub("baton-test/demo", files, revision="v2", host=host) as hub:
        cache = {"claimName": "weights"}
        installed = Installed(control_plane, namespace, tmp_path, weightsCache=cache)
        installed.install(
            model={"name": "baton-test/demo", "revision": "v2"},
            hub={"endpoint": hub.address},
            router={"replicas": 1},
        )
        installed.wait_available()
        assert hub.asked.count("model.safetensors") == 1
    for pod in kubelet.pods("app.kubernetes.io/component=worker"):
        ended = {each["name"]: each["state"] for each in pod["status"]["initContainerStatuses"]}
        assert ended["fetch-model"]["terminated"]["exitCode"] == 0
    with Client(router_address(kubelet)) as client:
        events = list(client.generate(chat=[{"role": "user", "content": "Who is Hugo?"}]))
    text = "".join(event.text for event in events if isinstance(event, Tokens))
    assert text == "Hugo is the postman of Willowmere. He brings letters to every house."
