"""helm on the chart, as `helm template` and `helm lint` run without a cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.api.generate import CHART
from tests.k8s.control_plane.assets import find
from tests.k8s.control_plane.errors import NotAtHandError

NAMESPACE = "serving"
MONITORS = "monitoring.coreos.com/v1/PodMonitor"
NOT_KUBERNETES = ("PodMonitor", "PrometheusRule", "ServingCluster")
"""Kinds of others."""
NO_HELM = "NO HELM: `make control-plane` brings one, or put helm on PATH"
_TIMEOUT_S = 60.0

Object = dict[str, Any]
Values = Mapping[str, Any]


class RefusedError(Exception):
    """helm's own words."""


def helm_program() -> Path | None:
    """Beside a control plane's programs, or on PATH; None: nowhere."""
    try:
        beside = find().clients.helm
    except NotAtHandError:
        beside = None
    on_path = shutil.which("helm")
    return beside or (Path(on_path) if on_path else None)


@dataclass(frozen=True)
class Helm:
    """helm with nothing of the user's: `home` is where it may write."""

    program: Path
    home: Path

    def run(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """Its stdout. Raises RefusedError."""
        done = subprocess.run(
            [str(self.program), *map(str, arguments)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={**os.environ, "HOME": str(self.home), "KUBECONFIG": str(self.home / "none")},
            check=False,
        )
        if done.returncode:
            raise RefusedError(done.stderr.strip())
        return done.stdout

    def template(
        self, values: Values | None = None, *arguments: str, chart: Path = CHART
    ) -> list[Object]:
        """The objects of a release called `baton` in NAMESPACE, without those of `helm test`.
        Raises RefusedError."""
        return self._rendered(values, chart, "--skip-tests", *arguments)

    def tests(self, values: Values) -> list[Object]:
        """What `helm test` of that release makes, at one time."""
        lists = [each for each in self._rendered(values, CHART) if _hook(each) == "test"]
        return [item for each in lists for item in each["items"]]

    def _rendered(self, values: Values | None, chart: Path, *arguments: str) -> list[Object]:
        command = ("template", "baton", chart, "--namespace", NAMESPACE, "--values", "-")
        text = self.run(*command, *arguments, stdin=json.dumps(values or {}))
        return [each for each in yaml.safe_load_all(text) if each]


def _hook(obj: Object) -> str | None:
    annotations: dict[str, str] = obj["metadata"].get("annotations") or {}
    return annotations.get("helm.sh/hook")


def of_kind(objects: Sequence[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def one(objects: Sequence[Object], kind: str) -> Object:
    (found,) = of_kind(objects, kind)
    return found


def first_cluster(**cluster: Any) -> Object:
    """Values that ask for a ServingCluster; `spec` is merged over the least that one needs."""
    spec = {"model": {"name": "models/demo"}} | cluster.pop("spec", {})
    return {"cluster": {"enabled": True, "spec": spec} | cluster}
