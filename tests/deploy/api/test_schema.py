"""The custom resources' schema says what the dataclasses say."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from baton.config.cluster import ClusterConfig
from baton.config.engine import EngineSettings
from baton.config.ranges import Bounds, annotations_of
from deploy.api import generate
from deploy.api.checked import Checked
from deploy.api.crd import KINDS, SERVING_CLUSTER, WORKER_POOL
from deploy.api.naming import as_written, camel, snake
from deploy.api.schema import schema_of
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import WorkerPoolSpec
from tests.deploy.api.defaults import dataclasses_in


def nested(schema: dict[str, Any], path: str = "spec") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema, with the way to it."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nested(inner, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nested(schema[key], f"{path}[]")


def test_the_committed_definitions_are_what_the_dataclasses_make() -> None:
    assert generate.stale() == []


@pytest.mark.parametrize("cls", [ServingClusterSpec, WorkerPoolSpec, ClusterConfig])
def test_every_field_name_comes_back_from_its_spelling_in_kubernetes(cls: type) -> None:
    for each in dataclasses_in(cls):
        for field in dataclasses.fields(each):
            assert snake(camel(field.name)) == field.name


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("lower engine.max_num_seqs.", "lower spec.engine.maxNumSeqs."),
        (
            "router.admission.fleet_wait_s (10)",
            "spec.advanced.router.admission.fleetWaitSeconds (10)",
        ),
        ("engine.models.errors, router.py", "engine.models.errors, router.py"),
        ("pools.decode.engine.dtype", "pools.decode.engine.dtype"),
    ],
)
def test_what_a_process_says_of_a_setting_is_told_as_people_write_it(
    said: str, written: str
) -> None:
    assert as_written(said) == written


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_every_schema_is_structural_and_bounded(kind: Any) -> None:
    """As the API server asks: a type everywhere, and a size wherever a rule may look."""
    for path, schema in nested(schema_of(kind.spec)):
        assert "type" in schema, path
        if schema["type"] == "string" and "enum" not in schema:
            assert "maxLength" in schema, path
        if "additionalProperties" in schema:
            assert "maxProperties" in schema, path
            assert "properties" not in schema, path
        if schema["type"] == "array":
            assert "maxItems" in schema, path


@pytest.mark.parametrize("cls", [ServingClusterSpec, WorkerPoolSpec])
def test_the_bounds_of_every_field_are_the_api_servers_too(cls: type) -> None:
    words = ("minimum", "maximum", "pattern", "maxLength", "maxItems", "maxProperties")
    for each in dataclasses_in(cls):
        properties = schema_of(each)["properties"]
        for name, beside in annotations_of(each).items():
            if any(isinstance(bounds, Bounds) for bounds in beside):
                assert set(words) & set(properties[camel(name)]), f"{each.__name__}.{name}"
    share = schema_of(EngineSettings)["properties"]["gpuMemoryUtilization"]
    assert (share["minimum"], share["exclusiveMinimum"], share["maximum"]) == (0, True, 1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_every_field_of_a_spec_is_described(kind: Any) -> None:
    own = [
        path
        for path, schema in nested(schema_of(kind.spec))
        if "description" not in schema and path.count(".") == 1 and not path.endswith("[]")
    ]
    assert own == []


def test_a_pools_size_can_be_scaled_and_is_defaulted() -> None:
    (version,) = WORKER_POOL.crd()["spec"]["versions"]
    replicas = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["replicas"]
    assert replicas["default"] == 1
    assert version["subresources"]["scale"]["specReplicasPath"] == ".spec.replicas"


def test_a_section_that_cluster_yaml_shares_keeps_its_defaults_out_of_stored_objects() -> None:
    (version,) = SERVING_CLUSTER.crd()["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert "default" not in spec["engine"]
    assert "default" not in spec["engine"]["properties"]["blockSize"]
    assert "Default: 16." in spec["engine"]["properties"]["blockSize"]["description"]


def test_every_rule_names_a_field_of_its_object() -> None:
    for kind in KINDS:
        for cls in dataclasses_in(kind.spec):
            if issubclass(cls, Checked):
                names = {camel(field.name) for field in dataclasses.fields(cls)}
                for rule in cls.rules:
                    first = rule.message.replace(",", " ").replace(":", " ").split()[0]
                    assert first.partition(".")[0] in names, rule.message
