"""The alerts ask for what routers and workers tell, and fire when somebody must act."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton import errors
from deploy.api.generate import CHART, DEPLOY
from tests.deploy.chart.chart import Helm, of_kind, one
from tests.deploy.chart.told import labels, labels_in, names, names_in

RULES = sorted((CHART / "alerts").glob("*.yaml"))
GROUPS = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
ALERTS: Mapping[str, Any] = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
CASES = Path(__file__).with_name("alerts_test.yaml")
REPOSITORY = DEPLOY.parent
NO_PROMTOOL = "NO PROMTOOL: Debian's package prometheus brings one, or put promtool on PATH"
each_alert = pytest.mark.parametrize("name", ALERTS)

NOT_OF_CLIENT = (
    errors.BatonError,
    errors.KvTransferError,
    errors.NotResumableError,
    errors.PoisonError,
    errors.UnavailableError,
    errors.WorkerLostError,
)
TURNED_AWAY = (errors.OverloadedError, errors.DeadlineError)


def promtool(*arguments: str | Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip(NO_PROMTOOL)
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=60.0, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def ends_in(name: str) -> set[str]:
    (ends,) = re.findall(r'end=~"([\w|]+)"', ALERTS[name]["expr"])
    return set(ends.split("|"))


@each_alert
def test_no_alert_asks_for_a_metric_or_label_that_nobody_tells(name: str) -> None:
    text = ALERTS[name]["expr"]
    assert names_in(text)
    assert names_in(text) <= names()
    assert labels_in(text) <= labels()


@each_alert
def test_each_says_how_bad_it_is_and_what_it_means(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert all(rule["annotations"].values())
    said = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["description"]))
    assert said <= labels()


@each_alert
def test_the_runbook_has_the_alert_below_the_heading_that_it_names(name: str) -> None:
    file, anchor = ALERTS[name]["annotations"]["runbook"].split("#")
    sections = re.split(r"^## ", (REPOSITORY / file).read_text(), flags=re.MULTILINE)
    by_anchor = {each.split("\n")[0].lower().replace(" ", "-"): each for each in sections}
    assert f"| `{name}` |" in by_anchor[anchor]


def test_no_two_alerts_have_one_name() -> None:
    assert len(ALERTS) == sum(len(group["rules"]) for group in GROUPS)


def test_shares_are_those_of_errors_that_baton_answers_with() -> None:
    assert ends_in("BatonRequestsFail") == {error.reason for error in NOT_OF_CLIENT}
    assert ends_in("BatonRequestsTurnedAway") == {error.reason for error in TURNED_AWAY}


def test_conditions_are_asked_for_by_reasons_that_the_operator_gives() -> None:
    told = "".join(path.read_text() for path in (DEPLOY / "controller").rglob("*.py"))
    asked = [re.findall(r'reason!?="(\w+)"', rule["expr"]) for rule in ALERTS.values()]
    reasons = {reason for each in asked for reason in each}
    assert reasons == {reason for reason in reasons if f'"{reason}"' in told}
    assert reasons


def test_prometheus_takes_the_rules() -> None:
    promtool("check", "rules", *RULES)


def test_alerts_fire_when_somebody_must_act_and_not_while_all_is_well() -> None:
    promtool("test", "rules", CASES)


@each_alert
def test_each_is_shown_to_fire_and_to_wait(name: str) -> None:
    groups = yaml.safe_load(CASES.read_text())["tests"]
    tests = [test for group in groups for test in group.get("alert_rule_test", ())]
    expected = [test["exp_alerts"] for test in tests if test["alertname"] == name]
    assert any(expected)
    assert not all(expected)


def test_one_rule_of_the_prometheus_operator_holds_all(helm: Helm) -> None:
    alerts = {"enabled": True, "namespace": "rules", "labels": {"release": "prometheus"}}
    rule = one(helm.template({"alerts": alerts}), "PrometheusRule")
    assert rule["spec"]["groups"] == GROUPS
    assert rule["metadata"]["namespace"] == "rules"
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert "app.kubernetes.io/name" in rule["metadata"]["labels"]


def test_what_a_prometheus_selects_by_comes_before_the_charts_own_label(helm: Helm) -> None:
    chosen = {"app.kubernetes.io/name": "prometheus"}
    rule = one(helm.template({"alerts": {"enabled": True, "labels": chosen}}), "PrometheusRule")
    assert chosen.items() <= rule["metadata"]["labels"].items()


def test_the_operator_itself_is_scraped_where_monitors_are_served(helm: Helm) -> None:
    values = {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}
    assert not of_kind(helm.template(values), "PodMonitor")
    served = ("--api-versions", "monitoring.coreos.com/v1/PodMonitor")
    objects = helm.template(values, *served)
    monitor, operator = one(objects, "PodMonitor"), one(objects, "Deployment")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    pod = operator["spec"]["template"]
    chosen = monitor["spec"]["selector"]["matchLabels"].items()
    assert chosen <= pod["metadata"]["labels"].items()
    assert set(monitor["spec"]["podTargetLabels"]) <= pod["metadata"]["labels"].keys()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (container,) = pod["spec"]["containers"]
    assert endpoint["port"] in [port["name"] for port in container["ports"]]
