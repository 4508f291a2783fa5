"""What the chart's documents say of it is so."""

from __future__ import annotations

import re

from deploy.api.generate import CHART
from tests.deploy.chart.permissions import PERMISSIONS
from tests.deploy.chart.told import names

README = (CHART / "README.md").read_text()
DOCS = CHART.parents[2] / "docs"
OPERATIONS = (DOCS / "operations.md").read_text()
REDIS = (CHART / "templates" / "redis.yaml").read_text()
NOTES = (CHART / "templates" / "NOTES.txt").read_text()


def rows(text: str, heading: str) -> list[list[str]]:
    """Of the table under that line, cell by cell."""
    table = text.partition(heading)[2].partition("\n\n")[0]
    lines = table.strip().splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_who_grants_by_hand_is_told_every_permission_and_no_more() -> None:
    told = set()
    for group, resources, verbs, _ in rows(README, "| group | resources | verbs | |"):
        for resource in resources.split(", "):
            name, _, only = resource.replace("`", "").partition(" ")
            of = "" if group == "core" else group.strip("`")
            told |= {(of, name, verb, only or None) for verb in verbs.split(", ")}
    assert told == {
        (each.group, each.resource, verb, each.name) for each in PERMISSIONS for verb in each.verbs
    }


def test_all_that_changes_the_pod_of_redis_is_told() -> None:
    pod = REDIS.rpartition("\nkind: Deployment")[2].partition("  template:")[2]
    used = set(re.findall(r"\$redis\.(\w+)", pod)) - {"storage"}  # which is told of by itself
    assert {"nodeSelector", "resources", "secretName", "tolerations"} <= used
    (row,) = [line for line in OPERATIONS.splitlines() if "an upgrade that changes its pod" in line]
    assert used <= set(re.findall(r"`(\w+)`", row))


def test_who_switches_redis_off_is_told_to_delete_all_that_is_kept_of_it() -> None:
    short = {"PersistentVolumeClaim": "pvc", "PodDisruptionBudget": "pdb"}
    kinds = re.findall(r"^kind: (\w+)", REDIS, flags=re.MULTILINE)
    section = README.partition("\n## Redis for Ray's head")[2].partition("\n## ")[0]
    for text in (section, NOTES):
        (told,) = re.findall(r"delete (\S+) --selector baton.dev/redis=", text)
        assert set(told.split(",")) == {short.get(kind, kind.lower()) for kind in kinds}


def test_every_metric_is_told_of_and_no_other() -> None:
    page = (DOCS / "metrics.md").read_text()
    first_cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    assert {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)} == names()
