"""Which change of a spec starts workers anew, and which starts prefill and decode together."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.api.worker_pool import WorkerPoolSpec
from deploy.controller.revisions import Revision, cohort_of, head_code, revision_of

CLUSTER: dict[str, Any] = {
    "model": {"name": "Qwen/Qwen3-8B"},
    "pools": {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}},
    "engine": {"device": "cuda", "maxNumSeqs": 128},
    "images": {"worker": "registry/worker:7", "pullPolicy": "IfNotPresent"},
}


def decode(**changes: Any) -> WorkerPoolSpec:
    return WorkerPoolSpec(role="decode", cluster="main", pool="decode", **changes)


def revision(cluster: dict[str, Any] | None = None, **changes: Any) -> Revision:
    return revision_of(CLUSTER | (cluster or {}), "decode", decode(**changes))


def test_a_fixed_spec_has_this_code_for_good() -> None:
    """Were it another one after an upgrade of the operator, every pool of every cluster would be
    rolled."""
    template = {"spec": {"nodeSelector": {"gpu": "h100"}}}
    found = revision(engine={"numBlocks": 4096}, template=template)
    assert found == Revision("decode-vpcjx", "decode", "tqsk7")


@pytest.mark.parametrize(
    "changed",
    [
        {"router": {"replicas": 7}},
        {"planner": {"enabled": True}},
        {"rollout": {"step": "1m"}},
        {"images": CLUSTER["images"] | {"router": "registry/router:8"}},
        {"ray": {"gcsFaultTolerance": {"redisAddress": "redis:6379"}}},
        {"pools": CLUSTER["pools"] | {"more": {"role": "decode"}}},
        {"transfer": {}},
        {"aFieldOfALaterRelease": {"itsDefault": True}},
    ],
)
def test_what_workers_are_not_told_starts_none_anew(changed: dict[str, Any]) -> None:
    assert revision(changed) == revision()


def test_who_tells_of_spot_capacity_is_told_to_pods_and_makes_no_other_cohort() -> None:
    told = {"spotNotices": {"cloud": "aws"}}
    assert revision(told) != revision()
    assert cohort_of(CLUSTER | told) == cohort_of(CLUSTER)
    assert head_code(CLUSTER | told) == head_code(CLUSTER)


@pytest.mark.parametrize("sizes", [{"replicas": 5}, {"min_replicas": 1}, {"max_replicas": 99}])
def test_a_pools_size_starts_none_anew(sizes: dict[str, int]) -> None:
    assert revision(None, **sizes) == revision()


@pytest.mark.parametrize(
    "changed",
    [
        {"engine": {"device": "cuda", "maxNumSeqs": 64}},
        {"logLevel": "debug"},
        {"images": {"worker": "registry/worker:8"}},
        {"worker": {"heartbeatS": 0.5}},
    ],
)
def test_what_workers_are_told_makes_another_revision_of_the_same_cohort(
    changed: dict[str, Any],
) -> None:
    found = revision(changed)
    assert found.name != revision().name
    assert found.cohort == revision().cohort


def test_a_pools_own_settings_and_template_make_another_revision_of_it() -> None:
    names = {
        revision().name,
        revision(engine={"maxNumSeqs": 32}).name,
        revision(template={"metadata": {"labels": {"a": "b"}}}).name,
        revision(drain_timeout="1h").name,
    }
    assert len(names) == 4


@pytest.mark.parametrize(
    "changed",
    [
        {"model": {"name": "Qwen/Qwen3-8B-FP8"}},
        {"model": {"claim": {"claimName": "weights", "path": "v2"}}},
        {"engine": CLUSTER["engine"] | {"dtype": "float16"}},
        {"engine": CLUSTER["engine"] | {"blockSize": 32}},
        {"pools": CLUSTER["pools"] | {"prefill": {"role": "prefill", "engine": {"blockSize": 32}}}},
    ],
)
def test_weights_numbers_and_block_size_make_another_cohort_and_so_another_revision_of_every_pool(
    changed: dict[str, Any],
) -> None:
    assert cohort_of(CLUSTER | changed) != cohort_of(CLUSTER)
    assert revision(changed).name != revision().name


def test_the_old_spec_is_the_old_revision_again() -> None:
    away = revision({"logLevel": "debug"})
    assert away != revision()
    assert revision({}) == revision()
