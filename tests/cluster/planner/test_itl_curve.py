"""What is learned of the gap between tokens."""

from __future__ import annotations

import math

import pytest

from cluster.planner.measure import ItlCurve, ItlPoint


def learned(*points: tuple[float, float]) -> ItlCurve:
    curve = ItlCurve()
    for streams, itl_s in points:
        curve = curve.with_point(ItlPoint(streams, itl_s))
    return curve


def test_nothing_is_asked_for_while_nothing_is_known() -> None:
    assert ItlCurve().workers_for_itl(1_000, 0.04, 0.05) == 0


def test_one_number_of_streams_is_taken_as_in_proportion() -> None:
    """40 streams, 20 at each of 2 workers, 40 ms apart."""
    assert learned((20, 0.04)).workers_for_itl(1_000, 0.04, 0.05) == pytest.approx(1.6)
    assert learned((20, 0.04)).workers_for_itl(1_000, 0.04, 0.02) == pytest.approx(4)


def test_two_numbers_of_streams_show_the_base_and_so_what_a_worker_can_do() -> None:
    """Base 20 ms and 1 ms a stream: a worker runs 30 streams 50 ms apart, 600 tokens/s."""
    curve = learned((10, 0.03), (20, 0.04))
    assert curve.workers_for_itl(1_200, 0.03, 0.05) == pytest.approx(2)
    assert curve.workers_for_itl(1_200, 0.04, 0.05) == pytest.approx(2), "also where it is slower"


def test_a_target_that_one_stream_alone_misses_is_out_of_reach() -> None:
    curve = learned((10, 0.03), (20, 0.04))
    assert curve.reaches(0.021)
    assert not curve.reaches(0.0209)
    assert curve.workers_for_itl(1_200, 0.03, 0.02) == 0


def test_no_more_workers_are_asked_for_than_there_are_streams() -> None:
    """One number of streams promises the most of fewer: 2 ms for one alone."""
    curve = learned((20, 0.04))
    assert curve.workers_for_itl(1_000, 0.04, 0.002) == pytest.approx(40)
    assert not curve.reaches(0.0019)
    assert curve.workers_for_itl(1_000, 0.04, 0.0005) == 0


def test_a_gap_that_streams_do_not_change_is_believed_four_times_as_far_as_it_was_seen() -> None:
    curve = learned((10, 0.03), (20, 0.03))
    assert curve.workers_for_itl(16_000 / 3, 0.03, 0.05) == pytest.approx(160 / 80)


def test_a_gap_that_streams_do_not_change_may_be_just_the_target() -> None:
    for target_s in (0.05, math.nextafter(0.05, 1.0)):
        curve = learned((1, 0.05), (4, 0.05))
        assert curve.reaches(target_s)
        assert curve.workers_for_itl(320, 0.05, target_s) == pytest.approx(16 / 16)


def test_a_base_is_never_less_than_nothing() -> None:
    curve = learned((10, 0.01), (20, 0.04))
    assert curve.workers_for_itl(1_000, 0.04, 0.04) == pytest.approx(1.8, abs=0.1)


def test_streams_are_over_sooner_where_tokens_come_faster_and_so_take_less_kv() -> None:
    """800 tokens/s 40 ms apart are 32 streams, 20 ms apart were 16; each takes 1/16 of a worker."""
    curve = learned((10, 0.03), (20, 0.04))
    workers = curve.workers_for_kv(800, 0.04, 1 / 16)
    streams = workers * (20e-3 * 800) / (workers - 1e-3 * 800)
    assert workers == pytest.approx(streams / 16)
    assert workers < 32 / 16
    assert learned((20, 0.04)).workers_for_kv(800, 0.04, 1 / 16) == 2


def test_what_was_seen_stays_known_while_another_number_is_seen_for_long() -> None:
    curve = learned((10, 0.03), *[(20, 0.04)] * 1_000)
    assert curve.workers_for_itl(1_200, 0.04, 0.05) == pytest.approx(2)


def test_a_single_odd_figure_hardly_changes_what_is_known() -> None:
    curve = learned(*[(10, 0.03), (20, 0.04)] * 10, (20, 0.08))
    assert curve.workers_for_itl(1_200, 0.04, 0.05) == pytest.approx(2, rel=0.25)
