"""What helm tells whoever has installed the chart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from deploy.api.generate import CHART
from tests.deploy.chart.chart import NAMESPACE, Helm, Object, first_cluster

_DEPLOYMENT_OF_REDIS = (
    'lookup "apps/v1" "Deployment" .Release.Namespace (include "baton.redisName" .)'
)
_RENDERED = 'notes: {{ tpl (.Files.Get "NOTES.txt") . | toJson }}'
SCALED_BY_PLANNER = {"scaling": {"mode": "planner"}}


def notes(helm: Helm, folder: Path, values: dict[str, Any], redis: Object | None = None) -> str:
    """As `helm install` prints them, which asks a cluster first; `redis`: the Deployment there."""
    chart = folder / "baton"
    shutil.copytree(CHART, chart)
    text = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "NOTES.txt").unlink()
    assert _DEPLOYMENT_OF_REDIS in text
    looked_up = f"{json.dumps(json.dumps(redis or {}))} | fromJson"
    (chart / "NOTES.txt").write_text(text.replace(_DEPLOYMENT_OF_REDIS, looked_up))
    (chart / "templates" / "notes.yaml").write_text(_RENDERED)
    command = ("template", "baton", chart, "--namespace", NAMESPACE, "--values", "-")
    text = helm.run(*command, "--show-only", "templates/notes.yaml", stdin=json.dumps(values))
    told: str = json.loads(text.rpartition("notes: ")[2])
    return told


@pytest.mark.parametrize(
    ("cluster", "pool"),
    [
        ({}, "decode"),
        ({"name": "west"}, "west-decode"),
        ({"spec": {"pools": {"both": {"role": "mixed"}}}}, "decode"),
        ({"spec": {"pools": {"both": {"role": "mixed"}, "decode": SCALED_BY_PLANNER}}}, "both"),
    ],
    ids=["usual", "of another name", "decode before mixed", "decode is the planner's"],
)
def test_the_pool_to_try_scaling_with_is_one_that_decodes_and_stays_scaled(
    helm: Helm, tmp_path: Path, cluster: dict[str, Any], pool: str
) -> None:
    assert f" scale wp/{pool} --replicas=2\n" in notes(helm, tmp_path, first_cluster(**cluster))


def test_pools_of_the_planner_are_named(helm: Helm, tmp_path: Path) -> None:
    pools = {"prefill": SCALED_BY_PLANNER, "decode": SCALED_BY_PLANNER}
    told = notes(helm, tmp_path, first_cluster(spec={"pools": pools}))
    assert "The planner scales decode, prefill:" in told
    assert "scale wp/" not in told


REDIS: Object = {"metadata": {"labels": {"baton.dev/redis": "default"}}}
MINE: Object = {"metadata": {"labels": {"app": "redis"}}}
SWITCHED_OFF = first_cluster(redis={"enabled": False})
NAMED = first_cluster(spec={"ray": {"gcsFaultTolerance": {"redisAddress": "mine:6379"}}})


@pytest.mark.parametrize(
    ("values", "redis", "told"),
    [
        (SWITCHED_OFF, REDIS, True),
        (NAMED, REDIS, True),
        (first_cluster(), REDIS, False),
        (SWITCHED_OFF, None, False),
        (SWITCHED_OFF, MINE, False),
        ({}, REDIS, False),
    ],
    ids=["off", "another is named", "on", "it is gone", "not the chart's", "no cluster"],
)
def test_who_switches_redis_off_hears_that_it_is_kept_and_how_it_goes(
    helm: Helm, tmp_path: Path, values: dict[str, Any], redis: Object | None, told: bool
) -> None:
    text = notes(helm, tmp_path, values, redis)
    assert ("networkpolicy,pdb,secret,pvc --selector baton.dev/redis=default" in text) is told


IMAGES = "WARNING: images.registry is empty"
NO_REDIS = "WARNING: no Redis keeps"
NO_VOLUME = "WARNING: the Redis of Ray's head has no volume"
ON_VOLUME = "get pvc default-redis"
NO_ALERT = "WARNING: no alert can fire"
TLS = first_cluster(spec={"router": {"tls": {"secretName": "tls"}}})
ALERTS = {"alerts": {"enabled": True}}


@pytest.mark.parametrize(
    ("values", "told", "not_told"),
    [
        ({"images": {"registry": ""}}, IMAGES, NO_REDIS),
        ({"images": {"registry": "registry.example.com"}}, "", IMAGES),
        (first_cluster(), ON_VOLUME, NO_REDIS),
        (first_cluster(), "\n  curl http://localhost:8000/v1/", "--cacert"),
        (TLS, "\n  curl --cacert CA.crt --connect-to ::localhost: https://default-", "curl http:"),
        (SWITCHED_OFF, NO_REDIS, ON_VOLUME),
        (NAMED, "", NO_REDIS),
        (first_cluster(redis={"storage": ""}), NO_VOLUME, ON_VOLUME),
        (first_cluster(redis={"storage": "5Gi"}), ON_VOLUME, NO_VOLUME),
        (ALERTS | {"podMonitor": {"enabled": True}}, "", NO_ALERT),
        (ALERTS | {"podMonitor": {"enabled": False}}, NO_ALERT, ON_VOLUME),
    ],
)
def test_what_is_missing_is_warned_of_and_nothing_else(
    helm: Helm, tmp_path: Path, values: dict[str, Any], told: str, not_told: str
) -> None:
    text = notes(helm, tmp_path, values)
    assert told in text
    assert not_told not in text
