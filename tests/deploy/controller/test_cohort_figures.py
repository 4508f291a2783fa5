"""What routers tell of cohorts, summed over a step of a rollout."""

from __future__ import annotations

import dataclasses

import pytest

from baton.v1 import control_pb2
from deploy.controller.cohort_figures import CohortFigures
from deploy.controller.cohort_judgement import Figures
from deploy.controller.cohort_rollout import Phase, Progress
from deploy.controller.objects import Key

MAIN = Key("models", "main")
STEP = Progress("old", "new", Phase.WATCHING, 10)


def told(
    *routers: tuple[float, float, float | None],
) -> control_pb2.WatchFleetResponse:
    """Each router's requests/s, failures/s and gap between tokens of the new cohort."""
    answer = control_pb2.WatchFleetResponse()
    for requests_per_s, failures_per_s, itl_s in routers:
        figures = control_pb2.CohortFigures(
            cohort="new", requests_per_s=requests_per_s, failures_per_s=failures_per_s, itl_s=itl_s
        )
        answer.routers.add(cohorts=[figures])
    return answer


def test_requests_of_all_routers_are_counted_over_the_time_since_the_step_began() -> None:
    figures = CohortFigures()
    assert figures.take(MAIN, STEP, (told((99.0, 9.0, None)), 100.0)) is None
    for heard_at_s in (102.0, 104.0):
        found = figures.take(MAIN, STEP, (told((3.0, 0.0, 0.01), (1.0, 0.5, 0.03)), heard_at_s))
    assert found is not None
    assert found.figures["new"].num_requests == pytest.approx(16.0)
    assert found.figures["new"].num_failures == pytest.approx(2.0)
    assert found.figures["new"].itl_s == pytest.approx(0.015)
    assert found.seconds == 4.0


def test_another_step_begins_anew_and_a_silence_is_not_filled_in() -> None:
    figures = CohortFigures()
    figures.take(MAIN, STEP, (told(), 0.0))
    found = figures.take(MAIN, STEP, (told((1.0, 0.0, None)), 1000.0))
    assert found is not None
    assert found.seconds == 10.0
    assert found.figures["new"].num_requests == pytest.approx(10.0)
    assert found.figures["new"].itl_s is None
    later = dataclasses.replace(STEP, weight=50)
    assert figures.take(MAIN, later, (told((1.0, 0.0, None)), 1001.0)) is None


def test_what_clients_gave_up_on_is_counted_apart_and_is_enough_to_compare_with() -> None:
    figures = CohortFigures()
    answer = control_pb2.WatchFleetResponse()
    answer.routers.add(cohorts=[control_pb2.CohortFigures(cohort="old", abandoned_per_s=5.0)])
    for heard_at_s in (0.0, 4.0):
        found = figures.take(MAIN, STEP, (answer, heard_at_s))
    assert found is not None
    assert (found.figures["old"].num_requests, found.figures["old"].num_abandoned) == (
        0.0,
        pytest.approx(20.0),
    )
    later = dataclasses.replace(STEP, weight=100)
    for heard_at_s in (5.0, 6.0):
        found = figures.take(MAIN, later, (control_pb2.WatchFleetResponse(), heard_at_s))
    assert found is not None
    assert found.figures["old"].num_abandoned == pytest.approx(20.0)


def told_of_old(requests_per_s: float) -> control_pb2.WatchFleetResponse:
    """A fifth of them failed."""
    answer = control_pb2.WatchFleetResponse()
    figures = control_pb2.CohortFigures(
        cohort="old", requests_per_s=requests_per_s, failures_per_s=requests_per_s / 5, itl_s=0.01
    )
    answer.routers.add(cohorts=[figures])
    return answer


def test_once_the_old_version_has_no_requests_what_failed_of_it_before_counts_on() -> None:
    figures, now = CohortFigures(), 0.0
    for weight, requests_per_s in ((10, 5.0), (99, 1.0), (100, 0.0)):
        step = dataclasses.replace(STEP, weight=weight)
        for _ in range(4):
            now += 2.0
            found = figures.take(MAIN, step, (told_of_old(requests_per_s), now))
        assert found is not None
        assert found.figures["old"].num_requests == pytest.approx(30.0)
        assert found.figures["old"].num_failures == pytest.approx(6.0)
    other = dataclasses.replace(STEP, serving="new", next="newer")
    for _ in range(2):
        found = figures.take(MAIN, other, (told_of_old(0.0), now))
    assert found is not None
    assert found.figures["new"].num_requests == 0.0


def test_how_fast_the_old_version_was_is_known_while_it_has_a_share_and_no_requests() -> None:
    figures, now = CohortFigures(), 0.0
    course = []
    for weight, requests_per_s in ((0, 5.0), (50, 0.0), (75, 0.0), (100, 0.0)):
        step = dataclasses.replace(STEP, weight=weight)
        answer = told_of_old(requests_per_s) if requests_per_s else told()
        for _ in range(4):
            now += 2.0
            found = figures.take(MAIN, step, (answer, now))
        assert found is not None
        course.append((found.figures["old"].itl_s, found.figures["old"].itl_before_s))
    known = pytest.approx(0.01)
    assert course == [(known, None), (None, known), (None, known), (None, None)]


def test_requests_without_a_gap_between_tokens_do_not_hide_how_fast_the_old_version_was() -> None:
    """Those that have long answers may all be the new one's."""
    figures, now = CohortFigures(), 0.0
    course = []
    for weight, itl_s in ((0, 0.01), (50, None), (75, None)):
        step, answer = dataclasses.replace(STEP, weight=weight), told_of_old(5.0)
        if itl_s is None:
            answer.routers[0].cohorts[0].ClearField("itl_s")
        for _ in range(4):
            now += 2.0
            found = figures.take(MAIN, step, (answer, now))
        assert found is not None
        old = found.figures["old"]
        course.append((round(old.num_requests), old.itl_s, old.itl_before_s))
    known = pytest.approx(0.01)
    assert course == [(30, known, None), (30, None, known), (30, None, known)]


def test_a_version_alone_is_not_judged_beside_the_last_requests_of_the_old_one() -> None:
    figures, alone = CohortFigures(), dataclasses.replace(STEP, weight=100)
    for second in range(4):
        found = figures.take(MAIN, alone, (told_of_old(1.0), float(second)))
    assert found is not None
    assert found.figures["old"] == Figures()
