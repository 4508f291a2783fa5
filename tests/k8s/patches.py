"""What the operator has patched a RayCluster to, one spec after the other."""

from __future__ import annotations

import itertools

from deploy.controller.kit.objects import Object
from tests.deploy.schemas import REAL_CRD, check_ray_cluster
from tests.k8s.kubelet.kuberay import GroupChange, KubeRay
from tests.k8s.operating import eventually

_NO_GROUP = GroupChange(0, ())


def check_patches(kuberay: KubeRay, cluster: str = "default") -> set[str]:
    """No group of any unit has shrunk but by the pods that the same patch named, none went
    before it was empty, all that was named is cleared, and KubeRay's own schema takes each spec
    where it is at hand. The pods that were named."""
    named = set[str]()
    *_, last = kuberay.specs(cluster)  # others were deleted with what their last patches named
    eventually(lambda: not _named(kuberay.specs(cluster)[last][-1]), "the last patch is cleared")
    for specs in kuberay.specs(cluster).values():
        for before, after in itertools.pairwise(specs):
            now = _groups(after)
            for name, was in _groups(before).items():
                new = set(now.get(name, _NO_GROUP).to_delete) - set(was.to_delete)
                assert len(new) == max(0, was.replicas - now.get(name, _NO_GROUP).replicas), name
                named |= new
        for spec in specs if REAL_CRD.exists() else ():
            check_ray_cluster({"apiVersion": "ray.io/v1", "kind": "RayCluster", "spec": spec})
    return named


def _groups(spec: Object) -> dict[str, GroupChange]:
    found = spec.get("workerGroupSpecs") or ()
    return {each["groupName"]: GroupChange.of(each) for each in found}


def _named(spec: Object) -> set[str]:
    return {name for group in _groups(spec).values() for name in group.to_delete}
