"""A head that cannot start is made anew when its spec is corrected; one that runs stays."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.controller.heads import unfit_heads
from deploy.controller.manifests.common import COMPONENT_LABEL
from deploy.controller.manifests.pods import CONFIG_HASH, HEAD_CONTAINER

PULLING = {"waiting": {"reason": "ImagePullBackOff"}}
CRASHING = {"waiting": {"reason": "CrashLoopBackOff"}}
ENDED = {"terminated": {"exitCode": 1}}
RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


def head(
    state: dict[str, Any] | None, made_of: str = "old", restarts: int = 0, **metadata: Any
) -> dict[str, Any]:
    status = {"name": HEAD_CONTAINER, "state": state, "restartCount": restarts}
    statuses = [] if state is None else [status]
    return {
        "metadata": {
            "name": "main-head-x",
            "namespace": "models",
            "labels": {COMPONENT_LABEL: "head"},
            "annotations": {CONFIG_HASH: made_of},
            **metadata,
        },
        "status": {"containerStatuses": [{"name": "mine", "state": RUNNING}, *statuses]},
    }


@pytest.mark.parametrize(
    ("state", "restarts"), [(None, 0), (PULLING, 0), (CRASHING, 3), (ENDED, 4)]
)
def test_a_head_that_cannot_start_goes_once_the_spec_says_something_else(
    state: dict[str, Any] | None, restarts: int
) -> None:
    pod = head(state, restarts=restarts)
    assert unfit_heads([pod], "new") == [pod]
    assert unfit_heads([pod], "old") == [], "it would be made the same again"


def test_a_head_that_nobody_has_placed_yet_has_no_status() -> None:
    pod = {name: value for name, value in head(None).items() if name != "status"}
    assert unfit_heads([pod], "new") == [pod]


def test_a_head_that_runs_stays_and_so_do_others_pods() -> None:
    worker = head(PULLING, labels={COMPONENT_LABEL: "worker"})
    going = head(PULLING, deletionTimestamp="2026-01-01T00:00:00Z")
    unlabelled = head(PULLING, labels={})
    unmarked = head(PULLING, annotations={})
    assert unfit_heads([head(RUNNING), worker, going, unlabelled, unmarked], "new") == []


@pytest.mark.parametrize(("state", "restarts"), [(ENDED, 0), (CRASHING, 1), (PULLING, 2)])
def test_a_head_that_ran_and_is_started_again_where_it_is_stays(
    state: dict[str, Any], restarts: int
) -> None:
    assert unfit_heads([head(state, restarts=restarts)], "new") == []
