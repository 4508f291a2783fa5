"""Every switch: what comes out is what Kubernetes and the operator take."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from deploy.api.checked import read_spec
from deploy.api.crd import KINDS
from deploy.api.generate import CHART
from deploy.api.serving_cluster import ServingClusterSpec
from tests.deploy.chart.chart import (
    MONITORS,
    NOT_KUBERNETES,
    Helm,
    Object,
    first_cluster,
    of_kind,
    one,
)
from tests.deploy.chart.golden import COMBINATIONS, FOLDER, text_of
from tests.deploy.chart.matrix import ON, Values, each_once, pairwise
from tests.deploy.schemas import check_kubernetes


def check(objects: list[Object]) -> None:
    """Raises where Kubernetes or the operator would refuse one, or two have one name."""
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
             for each in objects]  # fmt: skip
    assert len(set(names)) == len(names)
    for each in objects:
        if each["kind"] not in NOT_KUBERNETES:
            check_kubernetes(each)
    for each in of_kind(objects, "ServingCluster"):
        read_spec(ServingClusterSpec, each)
    for each in of_kind(objects, "Deployment") + of_kind(objects, "Job"):
        check_restricted(each["spec"]["template"]["spec"])


def check_restricted(pod: Object) -> None:
    """As the `restricted` pod security standard asks, and read-only on top; volumes are its own."""
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostIPC", "hostPID", "hostNetwork"} & set(pod)
    for volume in pod.get("volumes", ()):
        assert {"emptyDir", "persistentVolumeClaim"} & set(volume)
    for container in pod["containers"]:
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"]
        assert container["resources"]["limits"]["memory"]


def test_the_chart_lints_strictly(helm: Helm) -> None:
    on = {"enabled": True}
    values = first_cluster(spec=ON) | {"dashboards": on, "alerts": on}
    helm.run("lint", "--strict", CHART)
    helm.run("lint", "--strict", CHART, "--values", "-",
             stdin=yaml.safe_dump(values))  # fmt: skip


@pytest.mark.parametrize("name", COMBINATIONS)
def test_main_combinations_are_as_they_were(helm: Helm, name: str) -> None:
    objects = helm.template(COMBINATIONS[name])
    check(objects)
    assert text_of(objects) == (FOLDER / f"{name}.yaml").read_text()


@pytest.mark.parametrize("values", each_once())
def test_every_setting_gives_valid_objects(helm: Helm, values: Values) -> None:
    check(helm.template(values))
    check(helm.template(values, "--is-upgrade"))


@pytest.mark.full
@pytest.mark.parametrize("values", pairwise())
def test_every_pair_of_settings_gives_valid_objects(helm: Helm, values: Values) -> None:
    check(helm.template(values))
    check(helm.template(values, "--is-upgrade"))


@pytest.mark.parametrize("namespace", ["123", "1e3"])
def test_a_namespace_may_be_called_like_a_number(helm: Helm, namespace: str) -> None:
    values = first_cluster(spec=ON, redis={"enabled": True}) | {
        "dashboards": {"enabled": True}, "alerts": {"enabled": True},
        "podMonitor": {"enabled": True}, "watchNamespaces": [namespace],
    }  # fmt: skip
    arguments = ("--is-upgrade", "--namespace", namespace)
    objects = helm.template(values, *arguments, "--api-versions", MONITORS)
    assert {each["metadata"].get("namespace", namespace) for each in objects} == {namespace}
    check(objects)


@pytest.mark.parametrize("length", [41, 42, 43, 62])
def test_operators_of_long_namespaces_have_names_of_their_own(helm: Helm, length: int) -> None:
    namespaces = ["a" * length + end for end in "bc"]
    values = {"fullnameOverride": "a-name-of-20-letters", "watchNamespaces": namespaces}
    objects = helm.template(values)
    check(objects)
    names = [each["metadata"]["name"] for each in of_kind(objects, "Deployment")]
    whole = [f"a-name-of-20-letters-{namespace}" for namespace in namespaces]
    assert len(set(names)) == 2
    assert (names == whole) is (len(whole[0]) <= 63)


def test_crds_are_installed_before_all_else_and_upgraded_before_an_upgrade(helm: Helm) -> None:
    told = helm.run("show", "crds", CHART)
    installed = {crd["metadata"]["name"]: crd for crd in yaml.safe_load_all(told)}
    assert installed == {kind.crd_name: kind.crd() for kind in KINDS}
    check([*installed.values()])
    assert not of_kind(helm.template(), "Job")
    job = one(helm.template({}, "--is-upgrade"), "Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade"
    assert not of_kind(helm.template({"crds": {"upgrade": False}}, "--is-upgrade"), "Job")


@pytest.mark.parametrize(("version", "known"), [("1.26.15", False), ("1.27.0-eks-1", True)])
def test_an_operator_that_never_gets_ready_holds_up_no_drain_where_a_budget_can_say_so(
    helm: Helm, version: str, known: bool
) -> None:
    objects = helm.template({"operator": {"replicas": 2}}, "--kube-version", version)
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    assert ("unhealthyPodEvictionPolicy" in budget["spec"]) == known


def test_the_replicas_of_an_operator_are_known_by_what_no_upgrade_changes(helm: Helm) -> None:
    objects = helm.template({"operator": {"replicas": 2}, "watchNamespaces": ["blue", "green"]})
    deployments, budgets = of_kind(objects, "Deployment"), of_kind(objects, "PodDisruptionBudget")
    seen = []
    for deployment, budget in zip(deployments, budgets, strict=True):
        selector = deployment["spec"]["selector"]
        pod = deployment["spec"]["template"]
        spread = pod["spec"]["affinity"]["podAntiAffinity"]
        (term,) = spread["preferredDuringSchedulingIgnoredDuringExecution"]
        assert budget["spec"]["selector"] == selector
        assert term["podAffinityTerm"]["labelSelector"] == selector
        assert selector["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(selector["matchLabels"])
        seen.append(selector)
    assert seen[0] != seen[1]


def test_a_kept_cluster_has_bare_pool_names_and_outlives_the_release(helm: Helm) -> None:
    cluster = one(helm.template(first_cluster()), "ServingCluster")
    assert cluster["metadata"]["name"] == "default"
    assert cluster["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_kuberay_comes_with_the_release_once_it_was_fetched(helm: Helm, tmp_path: Path) -> None:
    chart = tmp_path / "baton"
    shutil.copytree(CHART, chart)
    fetched = chart / "charts" / "kuberay" / "charts" / "kuberay-operator"
    (fetched / "templates").mkdir(parents=True)
    (fetched / "Chart.yaml").write_text("{apiVersion: v2, name: kuberay-operator, version: 1.7.3}")
    config = (
        "{apiVersion: v1, kind: ConfigMap, metadata: {name: kuberay}, data: {n: {{ .Values.n }}}}"
    )
    (fetched / "templates" / "it.yaml").write_text(config)
    values = {"kuberay": {"enabled": True, "kuberay-operator": {"n": "some"}}}
    assert one(helm.template(values, chart=chart), "ConfigMap")["data"] == {"n": "some"}
    assert not of_kind(helm.template({}, chart=chart), "ConfigMap")
