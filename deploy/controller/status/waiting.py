"""Why parts of a ServingCluster do not run, for the messages of conditions. Pods and their owners
say it; an empty answer: none does. Pure.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from typing import NamedTuple

from deploy.controller.kit.objects import Object
from deploy.controller.manifests.pods import FETCH
from deploy.controller.observed.pod import Pod, pods_refused, together
from deploy.controller.observed.view import ClusterView, PoolView

_NO_MODEL = re.compile(rf"{FETCH}: .*?exit code \d+(: )?(?P<why>.*)")
START_WITHIN = datetime.timedelta(minutes=10)
"""A head that has not answered by then is silent, and no longer starting."""
_BEFORE_THE_HEAD_ANSWERS = ("Starting", "InvalidSpec", "KubeRayMissing")


class Silence(NamedTuple):
    """Why nobody reports what runs."""

    reason: str
    message: str


SILENT = Silence("SupervisorSilent", "Ray's head does not answer")
STARTING = Silence("Starting", "Ray's head is starting")


def silence(view: ClusterView, now: str) -> Silence:
    """Say why Ray's head does not answer. It starts until its first answer, or for START_WITHIN."""
    kind = STARTING if _may_start(view, datetime.datetime.fromisoformat(now)) else SILENT
    return Silence(kind.reason, with_waits(kind.message, head_waits(view)))


def _may_start(view: ClusterView, now: datetime.datetime) -> bool:
    conditions = view.obj.get("status", {}).get("conditions", ())
    reason = next((each["reason"] for each in conditions if each["type"] == "Progressing"), "")
    if reason and reason not in _BEFORE_THE_HEAD_ANSWERS and not reason.startswith("Unit"):
        return False
    made = [ray["metadata"].get("creationTimestamp") for ray in view.ray_clusters]
    return not made or now < datetime.datetime.fromisoformat(max(made)) + START_WITHIN


def pool_waits(view: ClusterView, pool: PoolView) -> str:
    staying = [pod for pod in pool.pods if not pod.is_going]
    is_short = len(staying) < pool.replicas
    refused = [pods_refused(each) for each in view.ray_clusters] if is_short else []
    return _joined(_of(pool.pods), *refused)


def head_waits(view: ClusterView) -> str:
    heads = [pod for pod in view.poolless_pods if pod.component == "head"]
    if not heads:
        refused = _joined(*(pods_refused(each) for each in view.ray_clusters))
        return refused or "Ray's head has no pod"
    return _of(heads)


def router_waits(view: ClusterView, routers: Object | None) -> str:
    """Say what the routers' pods wait for. `routers`: their Deployment."""
    pods = [pod for pod in view.poolless_pods if pod.component == "router"]
    return _joined(_of(pods), pods_refused(routers))


def model_problem(pods: Sequence[Pod]) -> str:
    """Say why a worker's pod does not get the model's files; empty: none says so."""
    found = (_NO_MODEL.match(pod.waits_for) for pod in pods if not pod.is_going)
    return next((match["why"] for match in found if match), "")


def with_waits(message: str, waits: str) -> str:
    return f"{message}; {waits}" if waits else message


def _of(pods: Sequence[Pod]) -> str:
    counted = (pod for pod in pods if pod.is_lost or not pod.is_going)
    return together({pod.name: pod.waits_for for pod in counted})


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
