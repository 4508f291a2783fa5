"""The chart's own Redis: when it comes, what the ServingCluster is told of it, whom it lets in."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.worker.rank import free_port
from deploy.api.naming import GROUP
from deploy.controller.manifests.common import CLUSTER_LABEL, COMPONENT_LABEL
from tests.deploy.chart.chart import (
    Helm,
    Object,
    RefusedError,
    first_cluster,
    of_kind,
    one,
)

RDMA = {"preset": "gpu-rdma"}
ONE_WORKER = {"prefill": None, "decode": None, "both": {"role": "mixed"}}
NAMED = {"ray": {"gcsFaultTolerance": {"redisAddress": "mine:6379"}}}


def redis_of(objects: list[Object]) -> list[tuple[str, str]]:
    """Kinds and names of all that belongs to it."""
    label = f"{GROUP}/redis"
    return [
        (each["kind"], each["metadata"]["name"])
        for each in objects
        if label in each["metadata"].get("labels", {})
    ]


def fault_tolerance(objects: list[Object]) -> Any:
    return one(objects, "ServingCluster")["spec"].get("ray", {}).get("gcsFaultTolerance")


@pytest.mark.parametrize(
    "pools",
    [
        {},
        {"prefill": None, "decode": None, "both": {"role": "mixed", "initialReplicas": 2}},
        {"prefill": None, "decode": None,
         "both": {"role": "mixed", "initialReplicas": 0, "scaling": {"mode": "planner"}}},
    ],
    ids=["two pools", "two replicas", "scaled by the planner"],
)  # fmt: skip
@pytest.mark.parametrize("preset", ["cpu", "gpu", "gpu-rdma"])
def test_a_cluster_whose_workers_may_be_on_several_nodes_has_one_and_is_told_of_it(
    helm: Helm, preset: str, pools: dict[str, Any]
) -> None:
    values = first_cluster(nodes={"preset": preset}, name="west", spec={"pools": pools})
    objects = helm.template(values)
    kinds = {kind for kind, name in redis_of(objects) if name == "west-redis"}
    assert kinds == {"Deployment", "NetworkPolicy", "PersistentVolumeClaim",
                     "PodDisruptionBudget", "Secret", "Service"}  # fmt: skip
    assert fault_tolerance(objects) == {
        "redisAddress": "west-redis:6379",
        "redisSecretName": "west-redis",
    }


@pytest.mark.parametrize(
    "values",
    [
        {"cluster": {"nodes": RDMA}},
        first_cluster(nodes=RDMA, redis={"enabled": False}),
        first_cluster(spec={"pools": ONE_WORKER}),
        first_cluster(nodes=RDMA, spec={"pools": ONE_WORKER}),
    ],
    ids=["no cluster", "switched off", "one worker", "one worker with RDMA"],
)
def test_else_there_is_none(helm: Helm, values: dict[str, Any]) -> None:
    objects = helm.template(values)
    assert not redis_of(objects)
    assert not [each for each in of_kind(objects, "ServingCluster") if "gcsFault" in str(each)]


def test_one_that_is_named_is_taken_instead_and_never_both(helm: Helm) -> None:
    objects = helm.template(first_cluster(nodes=RDMA, spec=NAMED))
    assert not redis_of(objects)
    assert fault_tolerance(objects) == {"redisAddress": "mine:6379"}
    with pytest.raises(RefusedError, match="which names another Redis, not both"):
        helm.template(first_cluster(redis={"enabled": True}, spec=NAMED))


def test_its_password_is_long_drawn_anew_for_each_release_and_nowhere_else(helm: Helm) -> None:
    drawn = set()
    for _ in range(2):
        objects = helm.template(first_cluster(nodes=RDMA))
        password = base64.b64decode(one(objects, "Secret")["data"]["password"]).decode()
        assert len(password) == 40
        assert password not in str([each for each in objects if each["kind"] != "Secret"])
        drawn.add(password)
    assert len(drawn) == 2


def test_a_secret_that_is_named_opens_it_and_none_is_made(helm: Helm) -> None:
    objects = helm.template(first_cluster(nodes=RDMA, redis={"secretName": "mine"}))
    assert not of_kind(objects, "Secret")
    assert fault_tolerance(objects)["redisSecretName"] == "mine"
    (variable,) = container_of(objects)["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "password"}


@pytest.mark.parametrize(
    ("redis", "size", "num_evicted"),
    [({}, "1Gi", 1), ({"storage": "5Gi"}, "5Gi", 1), ({"storage": ""}, None, 0)],
)
def test_it_stays_with_the_cluster_and_its_state_with_a_volume_or_else_on_its_node(
    helm: Helm, redis: dict[str, str], size: str | None, num_evicted: int
) -> None:
    objects = helm.template(first_cluster(nodes=RDMA, redis=redis))
    of_redis = [each for each in objects if each["metadata"]["name"] == "default-redis"]
    assert len(of_redis) == (6 if size else 5)
    for each in of_redis:
        assert each["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    claims = of_kind(objects, "PersistentVolumeClaim")
    sizes = [claim["spec"]["resources"]["requests"]["storage"] for claim in claims]
    assert sizes == ([size] if size else [])
    pod = redis_deployment(objects)["spec"]["template"]
    (volume,) = pod["spec"]["volumes"]
    claimed = {"persistentVolumeClaim": {"claimName": "default-redis"}}
    assert volume == {"name": "data"} | (claimed if size else {"emptyDir": {}})
    budget = one(objects, "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == num_evicted
    assert budget["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_only_the_clusters_own_head_may_connect(helm: Helm) -> None:
    objects = helm.template(first_cluster(nodes=RDMA))
    policy = one(objects, "NetworkPolicy")["spec"]
    (rule,) = policy["ingress"]
    (peer,) = rule["from"]
    assert peer == {
        "podSelector": {"matchLabels": {CLUSTER_LABEL: "default", COMPONENT_LABEL: "head"}}
    }
    pod = redis_deployment(objects)["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= pod.items()
    assert CLUSTER_LABEL not in pod


def redis_deployment(objects: list[Object]) -> Object:
    named = [each for each in objects if each["metadata"]["name"] == "default-redis"]
    return one(named, "Deployment")


def container_of(objects: list[Object]) -> Object:
    (container,) = redis_deployment(objects)["spec"]["template"]["spec"]["containers"]
    return dict(container)


def script_of(helm: Helm) -> str:
    """What its container runs."""
    container = container_of(helm.template(first_cluster(nodes=RDMA)))
    assert container["command"] == ["/bin/sh", "-c"]
    (script,) = container["args"]
    return str(script)


def shown_by_head(password: str) -> str:
    """What the shell of Ray's head makes of the command that KubeRay writes for it."""
    option = "--redis-password="
    environment = {"REDIS_PASSWORD": password, "START": f"printf %s {option}$REDIS_PASSWORD"}
    command = ["/bin/sh", "-c", 'eval "$START"']
    return subprocess.check_output(command, env=environment, text=True).removeprefix(option)


needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="no redis-server on PATH"
)


@needs_redis
@pytest.mark.parametrize(
    "password",
    ["a-password", "it's", '"', "\\x41\\", "#$HOME`id`", "*", "p\u00e4ss", "ends\n", "ends \t\n\n"],
    ids=ascii,
)
def test_it_takes_the_password_that_rays_head_shows_and_writes_down_what_it_is_told(
    helm: Helm, tmp_path: Path, password: str
) -> None:
    port, shown = free_port("127.0.0.1"), shown_by_head(password)
    script = script_of(helm).replace("/data", str(tmp_path)).replace("6379", str(port))
    environment = os.environ | {"REDIS_PASSWORD": password}
    server = subprocess.Popen(["/bin/sh", "-c", script], env=environment, stdout=subprocess.DEVNULL)
    try:
        assert said(port, ["PING"]) == "-NOAUTH Authentication required.\r\n"
        assert said(port, ["AUTH", shown], ["SET", "a", "b"]) == "+OK\r\n+OK\r\n"
        assert shown not in Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")
    finally:
        server.terminate()
        assert server.wait(10) == 0  # it is the container's main process, and hears of its end
    assert any("SET" in file.read_text() for file in tmp_path.rglob("*.incr.aof"))


@pytest.mark.parametrize("password", ["", "\n", "a b", " a", "a\nb"], ids=ascii)
def test_a_password_that_rays_head_could_not_be_told_is_refused_in_clear_words(
    helm: Helm, password: str
) -> None:
    environment = os.environ | {"REDIS_PASSWORD": password}
    done = subprocess.run(
        ["/bin/sh", "-c", script_of(helm)],
        env=environment, capture_output=True, text=True, timeout=20.0, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "password is empty or has white space" in done.stderr


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ({}, "registry.example.com/baton/redis:7.2-bookworm"),
        ({"registry": "docker.io"}, "docker.io/redis:7.2-bookworm"),
        ({"registry": "registry.example.com/all/"}, "registry.example.com/all/redis:7.2-bookworm"),
        ({"registry": ""}, "redis:7.2-bookworm"),
    ],
    ids=["with all others", "where Redis is published", "a mirror", "the node's own"],
)
def test_its_image_is_looked_for_where_batons_own_were_pushed_unless_another_place_is_named(
    helm: Helm, image: dict[str, str], name: str
) -> None:
    values = first_cluster(redis={"image": image})
    objects = helm.template(values | {"images": {"registry": "registry.example.com/baton"}})
    assert container_of(objects)["image"] == name


def said(port: int, *commands: list[str]) -> str:
    """What it answers, once it listens."""
    asked = b"".join(map(encoded, [*commands, ["QUIT"]]))
    give_up_at = time.monotonic() + 10
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as connection:
                connection.sendall(asked)
                answer = connection.makefile("rb").read().decode()
                return answer.removesuffix("+OK\r\n")
        except ConnectionRefusedError:
            assert time.monotonic() < give_up_at
            time.sleep(0.02)


def encoded(command: list[str]) -> bytes:
    """With lengths, so that an argument may be anything."""
    words = [word.encode() for word in command]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(it), it) for it in words)
