"""What pods wait for, read from statuses as schedulers, kubelets and owners of pods write them."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.controller.observed.pod import pods_refused, together, waits_for
from tests.deploy.controller.things import REFUSED, UNSCHEDULABLE

MAKING = {"waiting": {"reason": "PodInitializing"}}
RUNNING = {"running": {"startedAt": "2026-01-01T10:00:00Z"}}


def pod(main: dict[str, Any], *init: dict[str, Any], **main_before: Any) -> dict[str, Any]:
    """With one container in the given state, behind init containers in theirs."""
    started = [{"name": f"init-{n}", "state": state} for n, state in enumerate(init)]
    container = {"name": "ray-worker", "state": main, **main_before}
    return {"status": {"initContainerStatuses": started, "containerStatuses": [container]}}


def ended(exit_code: int, message: str = "") -> dict[str, Any]:
    reason = "Error" if exit_code else "Completed"
    return {"terminated": {"exitCode": exit_code, "reason": reason, "message": message}}


BACK_OFF = {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"}
NO_IMAGE = {"reason": "ErrImagePull", "message": 'rpc error: "baton:nowhere": not found'}
LOST = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({}, ""),
        (pod(RUNNING, ended(0)), ""),
        ({"status": UNSCHEDULABLE},
         "Unschedulable: 0/8 nodes are available: 8 Insufficient nvidia.com/gpu."),
        ({"status": LOST}, "Evicted: The node was low on resource: memory."),
        (pod({"waiting": {"reason": "ContainerCreating"}}), "ContainerCreating"),
        (pod({"waiting": NO_IMAGE}),
         'ray-worker: ErrImagePull: rpc error: "baton:nowhere": not found'),
        (pod(MAKING, ended(0), RUNNING), "init-1 runs first"),
        (pod(MAKING, {"waiting": NO_IMAGE}),
         'init-0: ErrImagePull: rpc error: "baton:nowhere": not found'),
        (pod(MAKING, ended(1, "fetching\nspec.model.uri: nothing is there\n")),
         "init-0: Error, exit code 1: spec.model.uri: nothing is there"),
        (pod({"waiting": BACK_OFF}, lastState=ended(137)),
         "ray-worker: CrashLoopBackOff: Error, exit code 137"),
        (pod({"waiting": BACK_OFF}),
         "ray-worker: CrashLoopBackOff: back-off 5m0s restarting failed container"),
    ],
)  # fmt: skip
def test_a_pod_that_does_not_run_says_why(seen: dict[str, Any], said: str) -> None:
    assert waits_for(seen) == said


def test_nobody_waits_for_a_sidecar_to_end() -> None:
    beside = pod({"waiting": {"reason": "ContainerCreating"}}, RUNNING)
    beside["spec"] = {"initContainers": [{"name": "init-0", "restartPolicy": "Always"}]}
    assert waits_for(beside) == "ContainerCreating"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({}, ""),
        ({"conditions": [{"type": "ReplicaFailure", "status": "False", "message": "old"}]}, ""),
        (REFUSED["status"], "FailedCreate: pods is forbidden: exceeded quota: gpus"),
    ],
)  # fmt: skip
def test_an_owner_that_could_make_no_pod_says_why(status: dict[str, Any], said: str) -> None:
    assert pods_refused({"status": status}) == said
    assert pods_refused(None) == ""


def test_many_pods_say_what_most_of_them_wait_for_and_three_things_at_most() -> None:
    waits = {"a": "x", "b": "Unschedulable", "c": "", "d": "Unschedulable", "e": "y", "f": "z"}
    assert together(waits) == "2 pods: Unschedulable; pod a: x; pod e: y"
    assert together({"a": ""}) == ""
