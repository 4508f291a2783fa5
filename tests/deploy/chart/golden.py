"""Main combinations of values, and what they were last seen to render to.

python -m tests.deploy.chart.golden: writes them anew, to be read before they are committed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.chart.chart import Helm, Object, first_cluster, helm_program
from tests.deploy.chart.matrix import ON

FOLDER = Path(__file__).parent / "golden"

COMBINATIONS: dict[str, Any] = {
    "defaults": {},
    "gpu_rdma_cluster": first_cluster(spec=ON, nodes={"preset": "gpu-rdma"}),
    "air_gapped": first_cluster(
        spec={"model": {"name": "Qwen/Qwen3-8B"}},
        nodes={"weightsCache": {"claimName": "weights"}},
    )
    | {
        "images": {"registry": "registry.example.com/mirror", "pullSecrets": ["mirror"]},
        "hub": {"offline": True, "endpoint": "https://hub.example.com"},
    },
    "operator_settings": {
        "images": {
            "registry": "registry.example.com:5000",
            "tag": "1.2.3",
            "pullPolicy": "Always",
            "controller": {"repository": "serving/operator", "digest": "sha256:" + "0" * 64},
            "rayVersion": "2.61.0",
        },
        "operator": {
            "replicas": 3,
            "logLevel": "debug",
            "resources": {"limits": {"memory": "1Gi"}},
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "control", "operator": "Exists"}],
            "priorityClassName": "system-cluster-critical",
            "podAnnotations": {"note": "a"},
            "podLabels": {"team": "serving"},
        },
        "serviceAccount": {"name": "operator", "annotations": {"note": "b"}},
        "podMonitor": {"enabled": True, "interval": "30s", "labels": {"release": "prometheus"}},
    },
    "redis_on_a_volume": first_cluster(
        spec=ON,
        redis={
            "enabled": True,
            "image": {"repository": "library/redis", "digest": "sha256:" + "0" * 64},
            "secretName": "redis",
            "storage": "1Gi",
            "storageClassName": "fast",
        },
    )
    | {"images": {"registry": "registry.example.com/mirror", "pullSecrets": ["mirror"]}},
    "watched_namespaces": {"watchNamespaces": ["blue", "green"], "operator": {"replicas": 2}},
}


def text_of(objects: list[Object]) -> str:
    """Without what is drawn by lot: the data of Secrets."""
    drawn = [
        each | {"data": dict.fromkeys(each["data"], "drawn")} if each["kind"] == "Secret" else each
        for each in objects
    ]
    return yaml.safe_dump_all(drawn, sort_keys=False, width=100)


def main() -> None:
    program = helm_program()
    assert program is not None, "no helm"
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        for name, values in COMBINATIONS.items():
            text = text_of(Helm(program, Path(home)).template(values))
            (FOLDER / f"{name}.yaml").write_text(text)


if __name__ == "__main__":
    main()
