"""Which change of a spec makes another unit, and which does not."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.controller.rollout.units import Unit, difference, unit_of

CLUSTER: dict[str, Any] = {
    "model": {"name": "Qwen/Qwen3-8B"},
    "engine": {"device": "cuda", "maxNumSeqs": 128},
    "images": {"worker": "registry/worker:7", "pullPolicy": "IfNotPresent"},
}
PREFILL = {"role": "prefill", "cluster": "main", "pool": "prefill"}


def decode(**changes: Any) -> dict[str, Any]:
    return {"role": "decode", "cluster": "main", "pool": "decode", **changes}


def unit(cluster: dict[str, Any] | None = None, **changes: Any) -> Unit:
    """`changes`: of the decode pool."""
    pools = {"prefill": PREFILL, "decode": decode(**changes)}
    return unit_of(CLUSTER | (cluster or {}), pools)


def test_a_fixed_spec_has_this_code_for_good() -> None:
    """Were it another one after an upgrade of the operator, every cluster would start anew."""
    template = {"spec": {"nodeSelector": {"gpu": "h100"}}}
    found = unit(engine={"numBlocks": 4096}, podTemplate=template)
    assert found == Unit(
        "ngn24",
        "448ba8dc7abcd654",
        {"decode": "631e8b38cc1f662e", "prefill": "2e81278d1c2575e6"},
        "e85510b4a74e736c",
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"router": {"replicas": 7, "auth": {"tokenSecretName": "t"}}},
        {"advanced": {"planner": {"panicWindowSeconds": 5}}},
        {"rollout": {"strategy": "Recreate"}},
        {"images": CLUSTER["images"] | {"router": "registry/router:8", "pullPolicy": "Always"}},
        {"advanced": {"transfer": {}, "router": {"admission": {"maxQueue": 9}}}},
        {"hub": {"offline": False}},
        {"logLevel": "debug", "logFormat": "json"},
        {"aFieldOfALaterRelease": {"itsDefault": True}},
    ],
)
def test_what_neither_workers_nor_head_read_makes_no_other_unit(
    changed: dict[str, Any],
) -> None:
    assert unit(changed) == unit()


@pytest.mark.parametrize(
    "changed", [{"replicas": 5}, {"minReplicas": 1}, {"maxReplicas": 99}, {"engine": {}}]
)
def test_a_pools_size_makes_no_other_unit(changed: dict[str, Any]) -> None:
    assert unit(None, **changed) == unit()


@pytest.mark.parametrize(
    "changed",
    [
        {"model": {"name": "Qwen/Qwen3-8B-FP8"}},
        {"model": {"name": "Qwen/Qwen3-8B", "revision": "v2"}},
        {"model": {"claim": {"claimName": "weights", "path": "v2"}}},
        {"tokenizer": "Qwen/Qwen3-8B"},
        {"servedModelName": "chat"},
        {"hub": {"offline": True}},
        {"engine": CLUSTER["engine"] | {"dtype": "float16"}},
        {"engine": CLUSTER["engine"] | {"blockSize": 32}},
        {"engine": {"device": "cuda", "maxNumSeqs": 64}},
        {"advanced": {"transfer": {"ucxLibrary": "system"}}},
        {"advanced": {"worker": {"heartbeatSeconds": 0.5}}},
        {"advanced": {"registry": {"goneAfterSeconds": 60}}},
        {"advanced": {"supervisor": {"fenceAfterSeconds": 60}}},
        {"images": {"worker": "registry/worker:8"}},
        {"fabric": {"required": True}},
        {"spotNotices": {"cloud": "aws"}},
        {"ray": {"version": "2.60.0"}},
        {"ray": {"gcsFaultTolerance": {"redisAddress": "redis:6379"}}},
        {"ray": {"headTemplate": {"metadata": {"labels": {"a": "b"}}}}},
    ],
)
def test_what_workers_or_the_head_read_makes_another_unit(changed: dict[str, Any]) -> None:
    found = unit(changed)
    assert found.code != unit().code
    assert difference(unit(), found) == "the spec changes what all workers share"
    assert difference(found, unit({**changed})) == ""


@pytest.mark.parametrize(
    "changed",
    [
        {"engine": {"maxNumSeqs": 32}},
        {"podTemplate": {"metadata": {"labels": {"a": "b"}}}},
        {"env": [{"name": "A", "value": "b"}]},
        {"drainTimeout": "1h"},
        {"parallelism": {"tensor": 2}},
    ],
)
def test_a_pools_own_settings_and_template_make_another_unit(changed: dict[str, Any]) -> None:
    found = unit(None, **changed)
    assert found.code != unit().code
    assert difference(unit(), found) == "the spec changes decode"


def test_pools_come_and_go_within_a_unit() -> None:
    both, one = unit(), unit_of(CLUSTER, {"decode": decode()})
    other = unit_of(CLUSTER, {"prefill": PREFILL})
    assert difference(both, one) == difference(one, both) == difference(one, other) == ""
    again = unit_of(CLUSTER, {"decode": decode(engine={"maxNumSeqs": 32}), "prefill": PREFILL})
    assert difference(one, again) == "the spec changes decode"


@pytest.mark.parametrize(
    ("changed", "is_another"),
    [
        ({"images": {"worker": "registry/worker:8"}}, False),
        ({"engine": {"device": "cuda", "maxNumSeqs": 64}}, False),
        ({"model": {"name": "Qwen/Qwen3-8B-FP8"}}, True),
        ({"tokenizer": "Qwen/Qwen3-8B"}, True),
        ({"engine": CLUSTER["engine"] | {"dtype": "float16"}}, True),
    ],
)
def test_a_models_weights_tokenizer_and_precision_are_what_clients_notice(
    changed: dict[str, Any], is_another: bool
) -> None:
    assert (unit(changed).model != unit().model) == is_another
