"""A pod template that cannot be laid over the operator's own harms its own cluster alone, and is
told by the name of its field."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import condition, eventually, operator_of
from tests.k8s.test_crds import BAD_FIELD, BAD_ROUTER, cluster
from tests.k8s.test_operator import Seen

pytestmark = pytest.mark.usefixtures("crds", "ray_clusters")


def test_a_bad_template_is_told_by_its_field_and_served_once_it_is_mended(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    seen = Seen(control_plane, namespace)
    bad = cluster(namespace, router=BAD_ROUTER)
    bad["metadata"]["name"] = "bad"
    control_plane.apply(bad, cluster(namespace))
    with operator_of(control_plane, namespace, tmp_path):
        told = eventually(
            lambda: condition(seen.soon("servingcluster/bad"), "Degraded"), "the bad one is told"
        )
        assert told["reason"] == "InvalidSpec"
        assert f"{BAD_FIELD}: must be a mapping, not 'x'" in told["message"]
        assert seen.soon("deployment/main-router")
        assert seen("deployment/bad-router") is None
        bad["spec"]["router"] = {"podTemplate": {"spec": {"nodeSelector": {"rack": "7"}}}}
        control_plane.apply(bad)
        made = seen.soon("deployment/bad-router")
    assert made["spec"]["template"]["spec"]["nodeSelector"] == {"rack": "7"}
