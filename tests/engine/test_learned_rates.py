"""What an engine says of its own speed: the newest counts most, and a bad moment does not last."""

from __future__ import annotations

import pytest

from engine.learned_rates import LearnedRates, Pace
from engine.request import RequestId, ScheduledSeq, StepPlan
from tests.engine.fakes import prompt


def test_the_decode_rate_is_learned_where_every_step_has_prompts_in_it() -> None:
    rates = LearnedRates()
    prompt_of, decode = (
        ScheduledSeq(RequestId(name), prompt(num_tokens), 0, (), samples=True)
        for name, num_tokens in (("p", 40), ("d", 1))
    )
    rates.learn(StepPlan(1, (prompt_of,), num_tokens=40), 0.4, 1.0)
    mixed = StepPlan(2, (decode, prompt_of), num_tokens=41)
    assert rates.predict(mixed) is None
    rates.learn(mixed, 0.5, 1.0)
    assert rates.decode_step_s == pytest.approx(0.1)
    assert rates.predict(mixed) == pytest.approx(0.5)
    rates.learn(StepPlan(3, (decode,), num_tokens=1), 0.2, 1.0)
    assert rates.decode_step_s == pytest.approx(0.12)


def test_short_prompts_say_little_of_long_ones() -> None:
    pace = Pace(128)
    pace.learn(2048, 0.2, 1.0)
    pace.learn(1, 0.02, 1.0)
    assert pace.seconds == pytest.approx(0.2 / 2048, rel=0.5)
    pace.learn(2048, 0.4, 1.0)
    assert pace.seconds == pytest.approx(0.4 / 2048, rel=0.05)


def test_a_pace_learned_in_a_bad_moment_does_not_outlive_the_next_measure() -> None:
    pace = Pace(128)
    pace.learn(16, 1.6, 0.0)  # the first prompt of all, on a machine where everything starts
    pace.learn(16, 0.016, 60.0)
    assert pace.seconds == pytest.approx(0.001, rel=2)
