"""What is told of cohorts beside requests that ended: what their clients gave up on."""

from __future__ import annotations

import pytest

from router.cohort_figures import WINDOW_S, CohortFigures
from tests.router.test_placement import Clock


def test_what_is_too_long_goes_by_the_cohort_that_is_fastest_and_is_remembered() -> None:
    clock = Clock()
    figures = CohortFigures(clock)
    assert figures.too_long_s(least_s=0.1) == 5.0
    assert figures.too_long_s(least_s=2.0) == 20.0
    for wait_s in (0.1, 3.0, 9.0):
        figures.meter("slow").saw_first_token(10 * wait_s)
        figures.meter("fast").saw_first_token(wait_s)
    figures.report()
    assert figures.too_long_s(least_s=0.1) == 30.0
    clock.now_s += WINDOW_S + 1.0  # everything hangs
    figures.report()
    assert figures.too_long_s(least_s=0.1) == 30.0


def test_what_clients_gave_up_on_is_told_beside_what_ended() -> None:
    clock = Clock()
    figures = CohortFigures(clock)
    figures.meter("new").abandoned()
    (told,) = figures.report()
    assert (told.requests_per_s, told.failures_per_s) == (0.0, 0.0)
    assert told.abandoned_per_s * WINDOW_S == pytest.approx(1.0)
