"""One writer of a pool's size at a time: where the planner is that, what a person sets is the
planner's again, and people read so."""

from __future__ import annotations

from tests.k8s.installed import Installed, on_pods
from tests.k8s.operating import eventually

pytestmark = on_pods(600)

PLANNER = {
    "panicWindowSeconds": 2.0,
    "stableWindowSeconds": 6.0,
    "scaleInHoldSeconds": 1.0,
    "warmUpSeconds": 1.0,
}
PLANNED = {
    "role": "decode",
    "initialReplicas": 1,
    "minReplicas": 1,
    "maxReplicas": 2,
    "scaling": {"mode": "planner"},
}
PLANNED_WITHIN_S = 90.0
"""A loaded machine's; the planner looks every few seconds."""


def test_what_a_person_scales_in_planner_mode_is_the_planners_again_and_is_reported(
    installed: Installed,
) -> None:
    installed.serve({"decode": PLANNED}, advanced={"planner": PLANNER})
    installed.scale("decode", 2)

    def size() -> int:
        return int(installed.read("wp/decode")["spec"]["replicas"])

    eventually(lambda: size() == 1, "nothing is asked for: one is enough", PLANNED_WITHIN_S)

    def events() -> str:
        described = installed.kubectl("describe", "wp/decode")
        return described.partition("Events:")[2]

    eventually(lambda: "ScaledIn" in events(), "it is reported")
    found = events()
    for reason, message in (
        ("ScaledOut", "from 1 to 2 replicas"),
        ("Planned", "from 2 to 1 replicas: "),
        ("ScaledIn", "from 2 to 1 replicas"),
    ):
        assert any(reason in line and message in line for line in found.splitlines()), found
    assert installed.read("wp/decode")["status"]["desiredReplicas"] == 1
