"""Each rule says the same as CEL and in Python; each bad spec is refused by the field's name."""

from __future__ import annotations

import contextlib
from typing import Any

import cel
import pytest

from baton.errors import ConfigError
from deploy.api.checked import Checked, Rule, read_spec
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import WorkerPoolSpec
from tests.deploy.api.defaults import dataclasses_in, inner_objects, with_defaults
from tests.deploy.api.specs import (
    BAD_ADVANCED,
    BAD_CLUSTERS,
    BAD_NAMES,
    BAD_POOLS,
    CLUSTER,
    CLUSTER_KIND,
    GOOD_CLUSTERS,
    POOL,
    changed,
    custom_object,
)


@pytest.mark.parametrize(("path", "value", "field"), BAD_CLUSTERS + BAD_ADVANCED)
def test_a_bad_cluster_is_refused_by_the_name_of_its_field(
    path: str, value: object, field: str
) -> None:
    spec = changed(CLUSTER, path, value)
    if "localPrefill" in str(value):
        del spec["pools"]["prefill"]
    with pytest.raises(ConfigError) as caught:
        read_spec(ServingClusterSpec, custom_object(CLUSTER_KIND, spec))
    assert caught.value.field == field
    assert "_" not in str(caught.value).replace(str(value), ""), "spelt as in Kubernetes"


@pytest.mark.parametrize(("path", "value"), GOOD_CLUSTERS)
def test_a_good_cluster_is_taken(path: str, value: object) -> None:
    read_spec(ServingClusterSpec, custom_object(CLUSTER_KIND, changed(CLUSTER, path, value)))


@pytest.mark.parametrize(("path", "value", "field"), BAD_POOLS)
def test_a_bad_pool_is_refused_by_the_name_of_its_field(
    path: str, value: object, field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_spec(WorkerPoolSpec, custom_object("WorkerPool", changed(POOL, path, value)))
    assert caught.value.field == field


def test_a_misspelt_key_is_told_with_the_nearest_one_in_kubernetes_spelling() -> None:
    bad = changed(CLUSTER, "engine.maxNumSeq", 4)
    with pytest.raises(ConfigError, match="did you mean 'maxNumSeqs'"):
        read_spec(ServingClusterSpec, custom_object(CLUSTER_KIND, bad))
    bad = changed(CLUSTER, "advanced.router.admission", {"fleetWaitSecs": 4})
    hint = r"spec\.advanced\.router\.admission\.fleetWaitSecs: .*did you mean 'fleetWaitSeconds'"
    with pytest.raises(ConfigError, match=hint):
        read_spec(ServingClusterSpec, custom_object(CLUSTER_KIND, bad))


@pytest.mark.parametrize("name", ["a", "qwen3-8b", "c" * 47, *BAD_NAMES])
def test_a_name_that_kuberay_or_a_service_cannot_have_is_refused_by_cel_and_in_python(
    name: str,
) -> None:
    (rule,) = ServingClusterSpec.object_rules
    made = custom_object(CLUSTER_KIND, CLUSTER)
    made["metadata"]["name"] = name
    assert cel.evaluate(rule.cel, {"self": made}) == (name not in BAD_NAMES)
    is_refused = pytest.raises(ConfigError, match=r"metadata\.name: must be of 1 to 47")
    with is_refused if name in BAD_NAMES else contextlib.nullcontext() as caught:
        read_spec(ServingClusterSpec, made)
    assert caught is None or caught.value.field == "metadata.name"


# --- CEL and Python -----------------------------------------------------------------------------


def is_of_changes(rule: Rule) -> bool:
    return "oldSelf" in rule.cel


def violated(cls: type[Checked], value: dict[str, Any]) -> list[str]:
    """Messages of the rules on one object that CEL finds broken; those on changes left out."""
    rules = [rule for rule in cls.rules if not is_of_changes(rule)]
    return [rule.message for rule in rules if not cel.evaluate(rule.cel, {"self": value})]


def all_violated(cls: type, value: Any) -> list[str]:
    """The same, of the object and everything in it."""
    found = violated(cls, value) if issubclass(cls, Checked) else []
    for _, inner_cls, inner in inner_objects(cls, value):
        found += all_violated(inner_cls, inner)
    return found


def python_refuses(cls: type[Any], kind: str, spec: dict[str, Any]) -> str | None:
    try:
        read_spec(cls, custom_object(kind, spec))
    except ConfigError as error:
        return error.message
    return None


def rules_in(cls: type) -> list[str]:
    return [
        rule.message
        for each in dataclasses_in(cls)
        if issubclass(each, Checked)
        for rule in each.rules
        if not is_of_changes(rule)
    ]


CASES = [
    *((ServingClusterSpec, CLUSTER_KIND, CLUSTER, path, value) for path, value, _ in BAD_CLUSTERS),
    *((WorkerPoolSpec, "WorkerPool", POOL, path, value) for path, value, _ in BAD_POOLS),
    *((ServingClusterSpec, CLUSTER_KIND, CLUSTER, *case) for case in GOOD_CLUSTERS),
    (WorkerPoolSpec, "WorkerPool", POOL, "replicas", 8),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "kind", "base", "path", "value"), CASES)
def test_cel_and_python_judge_a_spec_alike(
    cls: type[Checked], kind: str, base: dict[str, Any], path: str, value: object
) -> None:
    spec = changed(base, path, value)
    refused = python_refuses(cls, kind, spec)
    broken = all_violated(cls, with_defaults(cls, spec))
    if refused is None:
        assert broken == []
    elif any(message.partition(" ")[2] in refused for message in rules_in(cls)):
        assert any(message.partition(" ")[2] in refused for message in broken), (refused, broken)


@pytest.mark.parametrize("cls", [ServingClusterSpec, WorkerPoolSpec])
def test_every_rule_is_broken_by_some_case(cls: type[Checked]) -> None:
    broken = {
        message
        for of, _, base, path, value in CASES
        if of is cls
        for message in all_violated(cls, with_defaults(cls, changed(base, path, value)))
    }
    assert set(rules_in(cls)) - broken == set()


# --- changes --------------------------------------------------------------------------------------

CHANGES = [
    (WorkerPoolSpec, POOL, "role", "prefill", "role"),
    (WorkerPoolSpec, POOL, "cluster", "other", "cluster"),
    (WorkerPoolSpec, POOL, "pool", "other", "pool"),
    (WorkerPoolSpec, POOL, "replicas", 3, None),
    (WorkerPoolSpec, POOL, "scaling.mode", "planner", None),
    (ServingClusterSpec, CLUSTER, "pools.decode.role", "mixed", "role"),
    (ServingClusterSpec, CLUSTER, "internalTLS", {}, "internalTLS"),
    (ServingClusterSpec, CLUSTER, "pools.decode.initialReplicas", 3, None),
    (ServingClusterSpec, CLUSTER, "pools.other", {"role": "mixed"}, None),
    (ServingClusterSpec, CLUSTER, "pools.prefill", None, None),
    (ServingClusterSpec, CLUSTER, "pools", {"both": {"role": "mixed"}}, None),
]
"""With the field that is refused."""


def refused_changes(cls: type, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The object's and those in it; of what an API server finds in the old one, too."""
    rules = [rule for rule in getattr(cls, "rules", ()) if is_of_changes(rule)]
    values = {"oldSelf": before, "self": after}
    messages = [rule.message for rule in rules if not cel.evaluate(rule.cel, values)]
    olds = {where: inner for where, _, inner in inner_objects(cls, before)}
    for where, inner_cls, inner in inner_objects(cls, after):
        if where in olds:
            messages += refused_changes(inner_cls, olds[where], inner)
    return messages


@pytest.mark.parametrize(("cls", "base", "path", "value", "field"), CHANGES)
def test_a_change_is_refused_by_the_name_of_its_field(
    cls: type[Checked], base: dict[str, Any], path: str, value: object, field: str | None
) -> None:
    before, after = with_defaults(cls, base), with_defaults(cls, changed(base, path, value))
    refused = refused_changes(cls, before, after)
    assert [message.split()[0] for message in refused] == ([] if field is None else [field])


def test_every_rule_on_changes_is_broken_by_some_case() -> None:
    broken = {(cls, field) for cls, *_, field in CHANGES if field is not None}
    for cls in (ServingClusterSpec, WorkerPoolSpec):
        for each in dataclasses_in(cls):
            for rule in each.rules if issubclass(each, Checked) else ():
                assert is_of_changes(rule) == (rule.holds is None)
                assert not is_of_changes(rule) or (cls, rule.message.split()[0]) in broken
