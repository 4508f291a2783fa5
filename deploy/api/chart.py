"""What the Helm chart holds that is written elsewhere: a chart refers to nothing outside itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from deploy.api.schema import schema_of
from deploy.api.serving_cluster import CLUSTER_NAME, RAY_VERSION, ServingClusterSpec

DEPLOY = Path(__file__).parents[1]
CHART = DEPLOY / "charts" / "baton"
FOLDERS = (CHART / "crds", CHART / "dashboards", CHART / "alerts")
"""Where every file is a copy."""

Schema = dict[str, Any]

_FREE = {"podTemplate": "podTemplate", "headTemplate": "podTemplate", "env": "env"}
"""What is Kubernetes' own: by the field's name, what values.schema.yaml defines."""
_KEPT = ("description", "type", "enum", "items", "minimum", "maximum", "pattern")
_SIZES = ("maxLength", "maxItems", "maxProperties")


def chart_files(crds: Mapping[Path, str]) -> dict[Path, str]:
    """Every file of the chart that is not written by hand; `crds`: those of deploy/crds."""
    files = {CHART / "crds" / path.name: text for path, text in crds.items()}
    for pattern in ("dashboards/*.json", "alerts/*.yaml"):
        files |= {
            CHART / path.relative_to(DEPLOY): path.read_text() for path in DEPLOY.glob(pattern)
        }
    files[CHART / "values.schema.json"] = json.dumps(values_schema(), indent=1) + "\n"
    return files


def values_schema() -> Schema:
    """JSON Schema of the chart's values; an unknown key is refused wherever keys are listed."""
    schema: Schema = yaml.safe_load((CHART.parent / "values.schema.yaml").read_text())
    spec = _from_crd(schema_of(ServingClusterSpec))
    del spec["required"]  # values.yaml has none of it, and needs none where no cluster is wanted
    schema["definitions"] |= {
        "servingClusterSpec": spec,
        "clusterName": {"type": "string", "pattern": CLUSTER_NAME},
        "rayVersion": {"type": "string", "pattern": RAY_VERSION},
    }
    _close(schema)
    return schema


def _from_crd(crd: Schema) -> Schema:
    """What a CRD's schema says, in JSON Schema: no defaults, no CEL; null where it is nullable."""
    schema: Schema = {key: crd[key] for key in (*_KEPT, *_SIZES, "required") if key in crd}
    if "items" in crd:
        schema["items"] = _from_crd(crd["items"])
    if "properties" in crd:
        schema["properties"] = {
            name: _defined(_FREE[name], value) if name in _FREE else _from_crd(value)
            for name, value in crd["properties"].items()
        }
    if "additionalProperties" in crd:
        schema["additionalProperties"] = _from_crd(crd["additionalProperties"])
    if crd.get("nullable"):
        schema["type"] = [crd["type"], "null"]
        if "enum" in schema:
            schema["enum"] = [*schema["enum"], None]
    return schema


def _defined(name: str, crd: Schema) -> Schema:
    reference = {"$ref": f"#/definitions/{name}"}
    return {"description": crd["description"], "allOf": [reference]}


def _close(schema: Any) -> None:
    """Refuse keys that are not listed, here and below."""
    if isinstance(schema, list):
        for item in schema:
            _close(item)
    elif isinstance(schema, dict):
        if schema.get("type") in ("object", ["object", "null"]) and isinstance(
            schema.get("properties"), dict
        ):
            schema.setdefault("additionalProperties", False)
        for value in schema.values():
            _close(value)
