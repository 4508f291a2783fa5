"""The roles grant what permissions.py says, word for word; tests/k8s/test_rbac.py tries them."""

from __future__ import annotations

from collections.abc import Iterable

from tests.deploy.chart.chart import NAMESPACE, Helm, Object, of_kind
from tests.deploy.chart.permissions import PERMISSIONS, Where

Granted = set[tuple[str, str, str, str | None]]


def granted(role: Object) -> Granted:
    """(group, resource, verb, name) of each thing that may be done."""
    return {
        (group, resource, verb, name)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [None])
    }


def needed(where: Where) -> Granted:
    return {
        (each.group, each.resource, verb, each.name)
        for each in PERMISSIONS
        if each.where is where
        for verb in each.verbs
    }


def roles(objects: Iterable[Object]) -> dict[tuple[str, str, str], Granted]:
    """By kind, namespace and name; without those that Kubernetes adds to its own."""
    return {
        (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): granted(
            each
        )
        for each in objects
        if each["kind"] in ("Role", "ClusterRole") and "aggregate-to" not in str(each["metadata"])
    }


def test_an_operator_of_all_namespaces_has_a_cluster_role_and_a_role_for_its_lease(
    helm: Helm,
) -> None:
    objects = helm.template()
    assert roles(objects) == {
        ("ClusterRole", "", "baton"): needed(Where.CLUSTERS),
        ("Role", NAMESPACE, "baton-lease"): needed(Where.LEASE),
    }
    assert _accounts(objects) == {f"{NAMESPACE}/baton"}


def test_watched_namespaces_have_a_role_each_and_nothing_reaches_beyond(helm: Helm) -> None:
    objects = helm.template({"watchNamespaces": ["blue", "green"]})
    assert roles(objects) == {
        ("Role", namespace, name): needed(where)
        for namespace in ("blue", "green")
        for name, where in (("baton", Where.CLUSTERS), ("baton-lease", Where.LEASE))
    }
    assert _accounts(objects) == {f"{NAMESPACE}/baton"}


def test_each_binding_binds_a_role_that_is_there(helm: Helm) -> None:
    for values in ({}, {"watchNamespaces": ["blue", "green"]}):
        objects = helm.template(values)
        bound = {
            (
                each["roleRef"]["kind"],
                each["metadata"].get("namespace", ""),
                each["roleRef"]["name"],
            )
            for each in objects
            if each["kind"] in ("RoleBinding", "ClusterRoleBinding")
        }
        assert bound == set(roles(objects))


def test_no_role_has_a_wildcard(helm: Helm) -> None:
    for arguments in ((), ("--is-upgrade",)):
        objects = helm.template({}, *arguments)
        words = {word for role in roles(objects).values() for one in role for word in one if word}
        assert words
        assert not any("*" in word for word in words)


def test_the_upgrade_of_crds_may_patch_ours_and_nothing_else(helm: Helm) -> None:
    found = roles(helm.template({}, "--is-upgrade"))
    assert found["ClusterRole", "", "baton-crds"] == {
        ("apiextensions.k8s.io", "customresourcedefinitions", "patch", f"{plural}.baton.dev")
        for plural in ("servingclusters", "workerpools")
    }


def test_without_rbac_there_is_no_role_and_no_binding(helm: Helm) -> None:
    objects = helm.template({"rbac": {"create": False}})
    assert not [each for each in objects if "Role" in each["kind"]]
    assert of_kind(objects, "Deployment")


def _accounts(objects: Iterable[Object]) -> set[str]:
    return {
        f"{subject['namespace']}/{subject['name']}"
        for each in objects
        if each["kind"] in ("RoleBinding", "ClusterRoleBinding")
        for subject in each["subjects"]
    }
