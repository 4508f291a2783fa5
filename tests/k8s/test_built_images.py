"""The images, built from their recipes, serve as a cluster: each role as its user, from its own
files, with what was compiled when it was built."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from baton.client import Client
from baton.client.events import Finished, HandedOff, Tokens
from deploy.api.generate import CHART
from deploy.controller.manifests.common import POOL_LABEL
from tests.k8s.built_images import build_images
from tests.k8s.installed import HEAD, MODEL, OPERATOR, Installed, on_pods, router_address
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.machine import Image
from tests.k8s.kubelet.objects import name_of

pytestmark = [*on_pods(1800), pytest.mark.images]

VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
PODS = {
    OPERATOR: "controller",
    HEAD: "worker",
    f"{POOL_LABEL}=prefill": "worker",
    f"{POOL_LABEL}=decode": "worker",
    "app.kubernetes.io/component=router": "router",
}
LOOK = """
import json, os, shutil, sys
print(json.dumps({
    "user": os.getuid(),
    "python": sys.prefix,
    "compilers": [each for each in ("cc", "c++", "gcc", "g++", "clang") if shutil.which(each)],
    "is_read_only": bool(os.statvfs("/").f_flag & os.ST_RDONLY),
}))
"""
FIND = """
import pkgutil, sys
from pathlib import Path
from baton.native_build import build
print(*{build(pkgutil.resolve_name(name)).parent for name in sys.argv[1:]})
"""
AHEAD = "/opt/baton/lib/python3.11/site-packages/baton/prebuilt\n"
RAYLETS_HEALTH = "http://localhost:52365/api/local_raylet_healthz"


@pytest.fixture(scope="module")
def images() -> Iterator[dict[str, Image]]:
    with tempfile.TemporaryDirectory(prefix="baton-images-") as folder:
        yield build_images(Path(folder), VERSION)


def test_a_cluster_of_the_built_images_answers_with_what_was_compiled_ahead(
    installed: Installed, kubelet: Kubelet, tmp_path: Path
) -> None:
    shutil.copytree(MODEL, kubelet.claim("models") / "demo")
    installed.install(
        model={"claim": {"claimName": "models", "path": "demo"}},
        router={"replicas": 1},
        advanced={"router": {"localPrefill": "never", "handoffReportWaitSeconds": 10.0}},
    )
    installed.wait_available()
    with Client(router_address(kubelet)) as client:
        events = list(client.generate(chat=[{"role": "user", "content": "Who is Hugo?"}]))
    text = "".join(event.text for event in events if isinstance(event, Tokens))
    assert text == "Hugo is the postman of Willowmere. He brings letters to every house."
    assert [event.kv_bytes > 0 for event in events if isinstance(event, HandedOff)] == [True]
    assert isinstance(events[-1], Finished)

    runs = {label: kubelet.container(name_of(kubelet.pods(label)[0])) for label in PODS}
    for label, run in runs.items():
        expected = {"user": 1000, "python": "/opt/baton", "compilers": []}
        found = json.loads(run.output_of("python", "-c", LOOK))
        assert found == expected | {"is_read_only": label == OPERATOR}, label
    router, worker = runs["app.kubernetes.io/component=router"], runs[f"{POOL_LABEL}=decode"]
    indices = ("router.placement.choice:CHOICE", "router.placement.native_index:INDEX")
    kernels = ("kv_transfer.ucx.native:POST_LOOP", "engine.attention.recipe:KERNELS")
    for run, recipes in ((router, indices), (worker, kernels)):
        assert (
            run.output_of("python", "-c", FIND, "kv_transfer.block_hash:CHAIN", *recipes) == AHEAD
        )
    for log in (tmp_path / "container-logs").glob("*/*.log"):
        assert not re.search("compiling|no native|Python posts", log.read_text(errors="replace"))
    assert "success" in worker.output_of("wget", "-T2", "-qO-", RAYLETS_HEALTH), "KubeRay asks so"
