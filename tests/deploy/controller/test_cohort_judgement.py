"""Two cohorts' failures side by side."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.api.serving_cluster import CohortRollout
from deploy.controller.cohort_judgement import Failures, Figures, chance, failures

ROLLOUT = CohortRollout()


def counted(num_new: int, failed_new: int, num_old: int, failed_old: int) -> Fraction:
    """The same by listing every way in which the failures can fall on the requests."""
    ways = combinations(range(num_new + num_old), failed_new + failed_old)
    as_many = sum(sum(one < num_new for one in way) >= failed_new for way in ways)
    return Fraction(as_many, comb(num_new + num_old, failed_new + failed_old))


@given(st.data())
@settings(deadline=None)
def test_chance_is_that_of_all_ways_in_which_the_failures_can_fall(data: st.DataObject) -> None:
    num_new, num_old = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 7))
    failed_new = data.draw(st.integers(0, num_new))
    failed_old = data.draw(st.integers(0, num_old))
    found = chance(Figures(num_new, failed_new), Figures(num_old, failed_old))
    assert found == pytest.approx(float(counted(num_new, failed_new, num_old, failed_old)))


@pytest.mark.parametrize("percent", [5, 30])
def test_two_cohorts_that_are_alike_are_hardly_ever_told_apart(percent: int) -> None:
    """Of requests drawn alike, at a share of 10%, looked at as they come."""
    rng, taken_back = random.Random(percent), 0
    for _ in range(100):
        counts = [[0, 0], [0, 0]]  # requests and failures, of the new one and of the old one
        for number in range(2000):
            of = counts[rng.random() > 0.1]
            of[0] += 1
            of[1] += rng.random() < percent / 100
            if number % 50 == 0:
                new, old = (Figures(*each) for each in counts)
                if failures(new, old, ROLLOUT) is Failures.MANY:
                    taken_back += 1
                    break
    assert taken_back <= 3


def test_so_much_more_than_the_old_version_s_is_allowed_however_certain_it_is() -> None:
    allowing = CohortRollout(max_error_percent=10)
    new, old = Figures(1000, 390), Figures(10_000, 3000)
    assert chance(new, old) < 1e-6
    assert failures(new, old, allowing) is Failures.FEW
    assert failures(Figures(1000, 410), old, allowing) is Failures.MANY


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_a_cohort_that_fails_a_tenth_more_is_found_out(share: float) -> None:
    rng, counts = random.Random(1), [[0, 0], [0, 0]]
    for _ in range(20_000):
        is_old = rng.random() > share
        of = counts[is_old]
        of[0] += 1
        of[1] += rng.random() < (0.05 if is_old else 0.15)
    new, old = (Figures(*each) for each in counts)
    assert failures(new, old, ROLLOUT) is Failures.MANY


@pytest.mark.parametrize(("num_old", "told"), [(0, Failures.MANY), (3, Failures.IN_DOUBT)])
def test_a_version_that_failed_everything_goes_no_further_for_want_of_a_comparison(
    num_old: int, told: Failures
) -> None:
    assert failures(Figures(10, 10), Figures(num_old, 0), ROLLOUT) is told


# --- what clients gave up on ----------------------------------------------------------------------


def gave_up(num_requests: int, num_abandoned: int) -> Figures:
    return Figures(num_requests - num_abandoned, 0, num_abandoned=num_abandoned)


def test_a_version_in_which_requests_hang_until_their_clients_give_up_is_found_out() -> None:
    assert failures(gave_up(12, 12), gave_up(100, 0), ROLLOUT) is Failures.MANY
    assert failures(gave_up(12, 12), gave_up(100, 90), ROLLOUT) is Failures.FEW, "both do"
    assert failures(gave_up(9, 9), gave_up(100, 0), ROLLOUT) is Failures.IN_DOUBT


def test_what_clients_gave_up_on_says_nothing_without_a_comparison() -> None:
    assert failures(gave_up(100, 50), gave_up(0, 0), ROLLOUT) is Failures.FEW
    assert failures(gave_up(100, 50), gave_up(3, 0), ROLLOUT) is Failures.IN_DOUBT
    new = Figures(50, 20, num_abandoned=50)
    assert failures(new, gave_up(0, 0), ROLLOUT) is Failures.MANY, "by those that failed"


def test_an_old_version_that_hangs_is_no_better_than_a_new_one_that_fails_as_often() -> None:
    assert failures(Figures(100, 50), gave_up(900, 450), ROLLOUT) is Failures.FEW


@pytest.mark.parametrize("percent", [5, 30])
def test_impatient_clients_of_two_cohorts_that_are_alike_take_no_version_back(percent: int) -> None:
    """A share of 10%, looked at as they come; some requests are cancelled early and not counted."""
    rng, taken_back = random.Random(percent), 0
    for _ in range(100):
        cohorts = [[0, 0], [0, 0]]  # served and given up, of the new one and of the old one
        for number in range(2000):
            of = cohorts[rng.random() > 0.1]
            if rng.random() > 0.2:
                of[rng.random() < percent / 100] += 1
            if number % 50 == 0:
                new, old = (Figures(n, 0, num_abandoned=lost) for n, lost in cohorts)
                if failures(new, old, ROLLOUT) is Failures.MANY:
                    taken_back += 1
                    break
    assert taken_back <= 3
