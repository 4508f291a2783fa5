"""What the operator writes: read back by those who will read it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from baton.config.cluster import parse_config
from baton.errors import ConfigError
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.status import ServingClusterStatus
from deploy.api.worker_pool import seconds
from deploy.controller.manifests.cluster_yaml import (
    cluster_config,
    model_name,
    router_config_map,
    unit_config_map,
    with_name,
)
from deploy.controller.manifests.common import Owner, Release
from deploy.controller.manifests.merge import merged
from deploy.controller.manifests.ray_cluster import (
    GroupSize,
    ray_cluster,
    settings_in,
    unit_in,
    worker_group,
)
from deploy.controller.manifests.routers import (
    control_service,
    first_routers,
    router_service,
)
from deploy.controller.manifests.worker_pool import worker_pool
from deploy.controller.rollout.rollout import Record
from deploy.controller.rollout.units import Unit
from tests.deploy.controller.clusters import (
    OWNER,
    context_of,
    group_of,
    pools_of,
    ray_of,
    routers_of,
    spec_of,
)
from tests.deploy.schemas import REAL_CRD, check_ray_cluster

# --- RayCluster -----------------------------------------------------------------------------------


def test_the_size_and_the_pods_that_go_stand_in_one_object() -> None:
    group = group_of(ray_of(spec_of(), decode=GroupSize(90, ("pod-b",))), "decode")
    assert (group["replicas"], group["maxReplicas"]) == (90, 90)
    assert group["scaleStrategy"] == {"workersToDelete": ["pod-b"]}


def test_kubernetes_waits_for_a_drain_for_longer_than_the_drain_may_take() -> None:
    pod = group_of(ray_of(spec_of()), "decode")["template"]["spec"]
    (container,) = pod["containers"]
    assert container["lifecycle"]["preStop"]["exec"]["command"][-1].endswith(
        "pod_drain --timeout 90"
    )
    assert pod["terminationGracePeriodSeconds"] > 90


def test_a_pod_is_ready_while_its_worker_serves_whatever_ray_and_its_head_do() -> None:
    group = group_of(ray_of(spec_of()), "decode")
    (container,) = group["template"]["spec"]["containers"]
    (port,) = (each for each in container["ports"] if each["name"] == "health")
    asked = container["readinessProbe"]["httpGet"]
    assert asked == {"path": "/live", "port": port["containerPort"]}
    told = yaml.safe_load(settings_in(group))
    assert told["worker"]["health_port"] == port["containerPort"]


def test_a_pod_on_spot_capacity_asks_its_cloud_beside_ray_and_no_other_does() -> None:
    notices = {"cloud": "gcp", "address": "http://metadata.google.internal", "notice": "2m"}
    (container,) = group_of(ray_of(spec_of(spotNotices=notices)), "decode")["template"]["spec"][
        "containers"
    ]
    ((before, _, after),) = [each.partition(" & ") for each in container["args"]]
    *_, module, cloud, address, notice, timeout, again = re.split(r" (?=--|cluster)", before)
    assert module == "cluster.node.spot_watch"
    assert (cloud, address) == ("--cloud gcp", "--address http://metadata.google.internal")
    assert (notice, timeout, again) == ("--notice 120", "--timeout 90", "--restart-after 120")
    assert after.startswith('eval "exec $KUBERAY_GEN_RAY_START_CMD')
    (other,) = group_of(ray_of(spec_of()), "decode")["template"]["spec"]["containers"]
    assert "spot_watch" not in str(other)


@pytest.mark.parametrize("address", ["http://a b", "http://a;reboot", "https://a", "http://$(id)"])
def test_an_address_that_a_shell_would_read_otherwise_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"spotNotices\.address"):
        spec_of(spotNotices={"cloud": "aws", "address": address})


def test_a_device_left_open_is_a_gpu_where_the_pools_pods_ask_for_one() -> None:
    gpus = {"nvidia.com/gpu.shared": "1"}
    pools = {
        "prefill": {"role": "prefill"},
        "decode": {"role": "decode", "resources": {"limits": gpus}},
    }
    spec = spec_of(pools=pools)
    settings = cluster_config(OWNER, spec, pools_of(spec))
    assert settings.pool_engine("prefill").device == "cpu"
    assert settings.pool_engine("decode").device == "cuda"
    assert "nvidia.com/gpu" not in str(group_of(ray_of(spec), "prefill"))


@pytest.mark.parametrize(
    ("model", "ranks", "cpu", "memory", "on_cpu"),
    [
        ({"name": "Qwen/Qwen3-8B"}, 1, "4", "31Gi", "17Gi"),
        ({"uri": "s3://models/llama-3.3-70b/"}, 8, "18", "203Gi", "147Gi"),
        ({"name": "Mixtral-8x7B-v0.1"}, 2, "6", "129Gi", "109Gi"),
        ({"name": "org/v2"}, 1, "4", "32Gi", "2Gi"),
    ],
)
def test_a_worker_asks_for_cores_by_its_ranks_and_memory_by_its_models_size(
    model: dict[str, Any], ranks: int, cpu: str, memory: str, on_cpu: str
) -> None:
    pools = {"decode": {"role": "decode", "parallelism": {"tensor": ranks}}}
    asked = []
    for device in ("cuda", "cpu"):
        (worker, _) = pods_of(spec_of(model=model, pools=pools, engine={"device": device}))
        asked.append(worker["containers"][0]["resources"]["requests"])
    on_gpus = {"cpu": cpu, "memory": memory, "nvidia.com/gpu": str(ranks)}
    assert asked == [on_gpus, {"cpu": str(ranks), "memory": on_cpu}]


def pods_of(spec: ServingClusterSpec) -> list[dict[str, Any]]:
    made = (group_of(ray_of(spec), "decode"), routers_of(spec)["spec"])
    return [each["template"]["spec"] for each in made]


def test_pods_are_guaranteed_where_they_are_to_be_and_spread_over_nodes() -> None:
    asked = {"guaranteed": True, "resources": {"requests": {"memory": "8Gi"}}}
    pools = {"decode": {"role": "decode"} | asked}
    for pod in pods_of(spec_of(model={"uri": "s3://m/8B"}, pools=pools, router=asked)):
        for each in (*pod["containers"], *pod.get("initContainers", ())):
            assert each["resources"]["limits"] == each["resources"]["requests"]
            assert each["resources"]["limits"].keys() == {"cpu", "memory"}
        (spread,) = pod["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"
        assert spread["whenUnsatisfiable"] == "ScheduleAnyway", "one node is enough"
        assert "baton.dev/cluster" in spread["labelSelector"]["matchLabels"]


def test_the_head_keeps_its_state_in_redis_as_kuberays_own_schema_takes_it() -> None:
    ray = {"gcsFaultTolerance": {"redisAddress": "redis:6379", "redisSecretName": "redis"}}
    made = ray_of(spec_of(ray=ray, engine={"device": "cuda"}))
    options = made["spec"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis:6379"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] == "redis"
    if REAL_CRD.exists():
        check_ray_cluster(made)


def test_a_ray_cluster_says_which_unit_it_is_and_a_group_what_its_workers_are_made_from() -> None:
    ray = ray_of(spec_of(engine={"maxNumSeqs": 8}))
    assert unit_in(ray) == Unit("2x4bz", "shared", {"prefill": "of-prefill", "decode": "of-decode"})
    assert ray["metadata"]["name"] == "main-2x4bz"
    group, head = group_of(ray, "decode"), ray["spec"]["headGroupSpec"]
    assert group["template"]["metadata"]["labels"]["baton.dev/pool"] == "decode"
    for part in (group["template"], head["template"], ray):
        assert part["metadata"]["labels"]["baton.dev/unit"] == "2x4bz"
    config = parse_config(yaml.safe_load(settings_in(group)))
    assert set(config.pools) == {"decode"}
    assert config.pool_engine("decode").max_num_seqs == 8
    assert config.pools["decode"].drain_timeout_s == 90.0
    assert config.supervisor.drain_timeout_s > 90.0
    assert config.control.announced_host == "main-2x4bz-head-svc.models.svc"


def test_a_units_configuration_goes_with_its_ray_cluster_and_is_what_its_head_reads() -> None:
    spec = spec_of()
    ray = ray_of(spec)
    ray["metadata"]["uid"] = "uid-of-ray"
    made = unit_config_map(OWNER, "2x4bz", cluster_config(OWNER, spec, {}, "2x4bz"), ray)
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == (
        "RayCluster",
        "main-2x4bz",
        "uid-of-ray",
    )
    assert made["metadata"]["labels"]["baton.dev/unit"] == "2x4bz"
    volumes = ray["spec"]["headGroupSpec"]["template"]["spec"]["volumes"]
    mounted = [each["configMap"]["name"] for each in volumes if "configMap" in each]
    assert mounted[0] == made["metadata"]["name"]
    read = parse_config(yaml.safe_load(made["data"]["cluster.yaml"]))
    assert read.control.announced_host == "main-2x4bz-head-svc.models.svc"


def test_the_control_service_leads_to_the_head_of_one_unit_and_routers_ask_it() -> None:
    spec = spec_of()
    service, ray = control_service(OWNER, "2x4bz"), ray_of(spec)
    selector = service["spec"]["selector"]
    labels = ray["spec"]["headGroupSpec"]["template"]["metadata"]["labels"]
    assert selector.items() <= labels.items()
    assert not control_service(OWNER, "other")["spec"]["selector"].items() <= labels.items()
    (container,) = routers_of(spec)["spec"]["template"]["spec"]["containers"]
    address = container["args"][container["args"].index("--control") + 1]
    (port,) = service["spec"]["ports"]
    assert address == f"{service['metadata']['name']}.models.svc:{port['port']}"


def test_another_release_of_the_operator_leaves_head_and_groups_as_they_are() -> None:
    spec = spec_of()
    before = ray_of(spec)
    later = context_of(spec, Release("baton-worker:2", "r:2", "2.99.0"))
    groups = before["spec"]["workerGroupSpecs"]
    assert ray_cluster(later, Record(), groups, before) == before


def test_every_container_that_fails_leaves_the_end_of_its_log_in_its_pods_status() -> None:
    spec = spec_of(model={"uri": "s3://bucket/model"})
    ray = ray_of(spec)["spec"]
    templates = [each["template"] for each in (ray["headGroupSpec"], *ray["workerGroupSpecs"])]
    pods = [each["spec"] for each in (*templates, routers_of(spec)["spec"]["template"])]
    found = [each for pod in pods for each in (*pod.get("initContainers", ()), *pod["containers"])]
    assert len(found) == 7
    assert {each.get("terminationMessagePolicy") for each in found} == {"FallbackToLogsOnError"}


def test_no_pod_of_ray_is_made_anew_for_the_settings_of_its_log() -> None:
    assert ray_of(spec_of(logLevel="debug", logFormat="json")) == ray_of(spec_of())


# --- configuration --------------------------------------------------------------------------------


def test_the_processes_read_the_configuration_that_the_spec_means() -> None:
    spec = spec_of(
        engine={"maxNumSeqs": 8},
        advanced={"engine": {"backend": "fake"}, "router": {"admission": {"maxQueue": 9}}},
    )
    config = cluster_config(OWNER, spec, pools_of(spec))
    assert parse_config(yaml.safe_load(config.to_yaml())) == config
    without = cluster_config(OWNER, spec, {})
    read = parse_config(yaml.safe_load(router_config_map(OWNER, without)["data"]["cluster.yaml"]))
    assert read == without
    assert not read.pools, "they come and go, the file is read once"
    read = config
    assert read.engine.max_num_seqs == 8
    assert read.router.admission.max_queue == 9
    assert read.pools["decode"].tensor_parallel == 2
    assert read.control.announced_host == "main-control.models.svc"
    assert read.pools["prefill"].drain_timeout_s == 600.0
    assert read.pools["decode"].drain_timeout_s == 90.0
    assert read.supervisor.drain_timeout_s > 600.0


def test_a_pools_own_engine_settings_reach_its_workers() -> None:
    pools = {"decode": {"role": "decode", "engine": {"maxNumSeqs": 4}}}
    spec = spec_of(pools=pools)
    assert cluster_config(OWNER, spec, pools_of(spec)).pool_engine("decode").max_num_seqs == 4


def test_settings_that_do_not_suit_each_other_are_told_as_people_write_them() -> None:
    spec = spec_of(advanced={"registry": {"goneAfterSeconds": 4}})
    said = (
        r"^spec\.advanced\.registry\.goneAfterSeconds must be above "
        r"spec\.advanced\.registry\.silentAfterSeconds \+ "
        r"spec\.advanced\.supervisor\.fenceAfterSeconds"
    )
    with pytest.raises(ValueError, match=said):
        cluster_config(OWNER, spec, pools_of(spec))


def test_first_class_settings_of_pods_lie_under_the_template() -> None:
    own = {
        "resources": {"limits": {"rdma/hca": 1}},
        "nodeSelector": {"gpu": "h100", "rack": "1"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "priorityClassName": "serving",
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
        "podTemplate": {
            "spec": {
                "nodeSelector": {"rack": "2"},
                "containers": [{"name": "ray-worker", "env": [{"name": "B", "value": "3"}]}],
            }
        },
    }
    router = own | {"podTemplate": {"spec": {"nodeSelector": {"rack": "2"}}}}
    spec = spec_of(pools={"decode": {"role": "decode", **own}}, router=router)
    made = worker_group(context_of(spec), pools_of(spec)["decode"])
    for pod, b in (
        (made["template"]["spec"], "3"),
        (routers_of(spec)["spec"]["template"]["spec"], "2"),
    ):
        assert pod["nodeSelector"] == {"gpu": "h100", "rack": "2"}
        for field in ("tolerations", "topologySpreadConstraints", "priorityClassName"):
            assert pod[field] == own[field]
        assert "nodeAffinity" in pod["affinity"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"rdma/hca": 1}
        env = {each["name"]: each.get("value") for each in container["env"]}
        assert (env["A"], env["B"]) == ("1", b)
        assert "POD_NAME" in env


def test_routers_that_somebody_else_scales_have_a_size_only_when_they_are_made() -> None:
    deployment = routers_of(spec_of())
    assert "replicas" not in deployment["spec"]
    assert first_routers(deployment)["spec"]["replicas"] == 2
    deployment = routers_of(spec_of(router={"replicas": 3}))
    assert deployment["spec"]["replicas"] == 3
    assert first_routers(deployment) == deployment


@pytest.mark.parametrize(("text", "wanted_s"), [("90s", 90), ("1h30m", 5400), ("500ms", 0.5)])
def test_durations_are_those_of_go(text: str, wanted_s: float) -> None:
    assert seconds(text) == wanted_s


# --- pools and routers ----------------------------------------------------------------------------


def test_an_applied_pool_never_names_its_size() -> None:
    made = worker_pool(OWNER, "decode", {"role": "decode", "initialReplicas": 3}, "drain")
    assert "replicas" not in made["spec"]
    assert "initialReplicas" not in made["spec"]
    assert made["metadata"]["name"] == "main-decode"


def test_the_pools_of_the_default_cluster_have_bare_names() -> None:
    assert Owner("default", "models", "uid").pool_name("decode") == "decode"


def test_the_service_leads_to_the_routers() -> None:
    spec = spec_of()
    deployment = routers_of(spec)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert router_service(OWNER, spec.router)["spec"]["selector"].items() <= labels.items()


def test_another_model_is_called_as_the_first_was_unless_the_spec_says_otherwise() -> None:
    """Routers use no worker of another name: of two the old one's would serve nobody."""

    def called(served: dict[str, str], **spec: Any) -> str | tuple[str, ...] | None:
        named = with_name(spec_of(model={"uri": "s3://models/qwen-v2"}, **spec), {"status": served})
        of_unit = cluster_config(OWNER, named, pools_of(named), "u1").served_model_name
        of_routers = cluster_config(OWNER, named, {})
        assert of_unit == of_routers.model_name, "its aliases are the routers'"
        return of_routers.served_model_name

    assert called({}) == "qwen-v2"
    assert called({"model": "qwen-v1"}) == "qwen-v1"
    assert called({"model": "qwen-v1"}, servedModelName="mine") == "mine"
    assert called({}, servedModelAliases=["a", "b"]) == ("qwen-v2", "a", "b")


def test_the_longest_name_that_a_model_can_have_stays_its_own() -> None:
    """A status that its schema does not take would never be written."""
    spec = spec_of(model={"uri": "s3://b/".ljust(2048, "m")})
    name = model_name(spec)
    assert len(name) > 1024
    status = ServingClusterStatus(model=name)
    assert with_name(spec, {"status": {"model": name}}).served_model_name == name
    assert status.model == name


def variables(*given: tuple[str, str]) -> dict[str, Any]:
    return {"env": [{"name": name, "value": value} for name, value in given]}


ADDED = {"name": "A", "resources": {"limits": {"a.b/c": 0, "d.e/f": None, "cpu": "1"}}}
DEVICES = {"requests": {"a.b/c": "1", "cpu": "1"}, "ports": {"a.b/c": 1}}


@pytest.mark.parametrize(
    ("own", "over", "result"),
    [
        # lists of named things merge by name, null takes a key away
        (variables(("A", "1"), ("B", "2")) | {"x": {"y": 1}},
         variables(("B", "3"), ("C", "4")) | {"x": None},
         variables(("A", "1"), ("B", "3"), ("C", "4"))),
        # the last of two variables holds
        (variables(("A", "1")), variables(("A", "2"), ("A", "3"), ("B", "2"), ("B", "3")),
         variables(("A", "3"), ("B", "3"))),
        # none of a device's resource takes it away, none of another key is a value
        (DEVICES, {"requests": {"a.b/c": 0, "d.e/f": 0, "cpu": 0}},
         {"requests": {"cpu": 0}, "ports": {"a.b/c": 1}}),
        (DEVICES, {"ports": {"a.b/c": 0}}, DEVICES | {"ports": {"a.b/c": 0}}),
        # also where there was nothing to take
        *((own, {"containers": [ADDED], "labels": {"env": "mine", "team": None}},
           {"containers": [{"name": "A", "resources": {"limits": {"cpu": "1"}}}],
            "labels": {"env": "mine"}}) for own in ({}, {"containers": []})),
    ],
)  # fmt: skip
def test_a_template_is_merged_as_kubectl_does(own: object, over: object, result: object) -> None:
    assert merged(own, over) == result


@pytest.mark.parametrize("said", ["llm", None])
def test_what_finds_a_pod_finds_it_whatever_its_template_says_of_those_labels(
    said: str | None,
) -> None:
    labels = {"app.kubernetes.io/name": said, "app.kubernetes.io/instance": said, "team": "red"}
    template = {"metadata": {"labels": labels}}
    pools = {"decode": {"role": "decode", "podTemplate": template}}
    spec = spec_of(pools=pools, router={"podTemplate": template}, ray={"headTemplate": template})
    ray, router = ray_of(spec), routers_of(spec)
    for component, made in (
        ("head", ray["spec"]["headGroupSpec"]),
        ("worker", group_of(ray, "decode")),
        ("router", router["spec"]),
    ):
        found = made["template"]["metadata"]["labels"]
        assert found | OWNER.labels(component) | {"team": "red"} == found
        assert found.get("baton.dev/unit") == (None if component == "router" else "2x4bz")


def test_a_variable_has_one_source_that_of_who_names_it_last() -> None:
    value = {"name": "A", "value": "1"}
    field, key = ({"name": "A", "valueFrom": {kind: {}}} for kind in ("fieldRef", "secretKeyRef"))
    for own in (value, field, key):
        for over in (value, field, key):
            assert merged({"env": [own]}, {"env": [over]}) == {"env": [over]}
