"""The blocks of docs/recipes.md are taken by whom they are for, as far as those are at hand."""

from __future__ import annotations

import re

import pytest
import yaml

from deploy.controller.manifests.common import HTTP_PORT, Owner
from tests.deploy.chart.chart import Helm, first_cluster
from tests.deploy.chart.test_documented import DOCS
from tests.deploy.chart.test_nodes import container_of, pods_of
from tests.deploy.chart.told import labels, labels_in, names, names_in
from tests.deploy.schemas import check_kubernetes

RECIPES = re.findall(r"```yaml\n(.*?)```", (DOCS / "recipes.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("recipe", RECIPES, ids=["KEDA", "Gateway", "RDMA", "MIG", "air-gapped"])
def test_a_recipe_is_taken(helm: Helm, recipe: str) -> None:
    for obj in yaml.safe_load_all(recipe):
        kind, spec = obj.get("kind"), obj.get("spec")
        if kind in (None, "ServingCluster"):  # the chart's values, or a spec, which is among them
            pods = pods_of(helm, first_cluster(spec=spec) if kind else obj)
            for pool in ("prefill", "decode"):
                resources = container_of(pods[pool])["resources"]
                gpus = [name for name in resources["limits"] if name.startswith("nvidia.com/")]
                assert len(gpus + resources.get("claims", [])) == 1, "GPUs come in one way"
        elif kind == "ScaledObject":
            query = spec["triggers"][0]["metadata"]["query"]
            assert names_in(query) | labels_in(query) <= names() | labels()
        elif kind == "InferencePool":
            routers = Owner("default", "baton", "an id").labels("router")
            assert spec["selector"]["matchLabels"].items() <= routers.items()
            assert spec["targetPorts"] == [{"number": HTTP_PORT}]
        elif kind != "HTTPRoute":  # whose schema is not at hand
            check_kubernetes(obj)
