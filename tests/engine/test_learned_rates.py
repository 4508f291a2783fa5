"""What an engine says of its own speed: the newest counts most, and a bad moment does not last."""

from __future__ import annotations

import random

import pytest

from engine.request import RequestId, ScheduledSeq, StepPlan
from engine.schedule.learned_rates import LearnedRates
from tests.engine.fakes import prompt


def step_of(prompt_tokens: int = 0, decodes: int = 0) -> StepPlan:
    lengths = [prompt_tokens] * (prompt_tokens > 0) + [1] * decodes
    seqs = tuple(
        ScheduledSeq(RequestId(str(number)), prompt(length), 0, (), samples=True)
        for number, length in enumerate(lengths)
    )
    return StepPlan(1, seqs, num_tokens=sum(lengths))


class Machine:
    """Takes a time for every step, for decodes and for each prompt token; nothing is random."""

    def __init__(self, step_s: float, decode_s: float, token_s: float) -> None:
        self.step_s, self.decode_s, self.token_s = step_s, decode_s, token_s
        self.rates, self.now_s = LearnedRates(2048), 0.0

    def time_s(self, plan: StepPlan) -> float:
        num_decodes = sum(len(seq.token_ids) == 1 for seq in plan.seqs)
        fixed_s = self.decode_s if num_decodes else self.step_s
        return fixed_s + self.token_s * (plan.num_tokens - num_decodes)

    def run(self, plan: StepPlan, times: int = 1, slower: float = 1.0) -> None:
        for _ in range(times):
            elapsed_s = self.time_s(plan) * slower
            self.now_s += elapsed_s
            self.rates.learn(plan, elapsed_s, self.now_s)

    def rest(self, seconds: float) -> None:
        self.now_s += seconds

    @property
    def true_rate(self) -> float:
        return 2048 / (self.step_s + 2048 * self.token_s)


def test_the_decode_rate_is_learned_where_every_step_has_prompts_in_it() -> None:
    machine = Machine(step_s=0.02, decode_s=0.02, token_s=0.01)
    machine.run(step_of(prompt_tokens=40))
    mixed = step_of(prompt_tokens=40, decodes=1)
    assert machine.rates.predict(mixed) is None
    machine.run(mixed)
    assert machine.rates.decode_step_s > 0
    assert machine.rates.predict(mixed) == pytest.approx(machine.time_s(mixed))


def test_steps_of_all_kinds_are_kept_apart_and_predicted() -> None:
    machine = Machine(step_s=0.01, decode_s=0.03, token_s=0.0001)
    kinds = [step_of(2048), step_of(2), step_of(300), step_of(0, 4), step_of(700, 3)]
    for _ in range(40):
        for plan in kinds:
            machine.run(plan)
    for plan in [*kinds, step_of(1000), step_of(100, 1)]:
        assert machine.rates.predict(plan) == pytest.approx(machine.time_s(plan), rel=0.1)
    assert machine.rates.prefill_tokens_per_s == pytest.approx(machine.true_rate, rel=0.1)
    assert machine.rates.decode_step_s == pytest.approx(0.03, rel=0.1)


@pytest.mark.parametrize("pause_s", [0.0, 3.0, 60.0])
@pytest.mark.parametrize("length", [2, 16])
def test_short_prompts_say_little_of_long_ones(length: int, pause_s: float) -> None:
    """A chat's turn leaves few tokens to compute. Were they to spoil the rate, long prompts would
    be refused for their timeouts, and never correct it."""
    machine = Machine(step_s=0.02, decode_s=0.02, token_s=0.0001)
    machine.run(step_of(2048), 20)
    for _ in range(40):
        machine.rest(pause_s)
        machine.run(step_of(length))
    assert machine.rates.prefill_tokens_per_s == pytest.approx(machine.true_rate, rel=0.4)
    assert machine.rates.predict(step_of(length)) == pytest.approx(0.02, rel=0.2)


def test_a_rate_learned_in_a_bad_moment_does_not_outlive_the_next_long_prompt() -> None:
    machine = Machine(step_s=0.01, decode_s=0.01, token_s=0.0001)
    machine.run(step_of(16), slower=100.0)  # the first prompt of all, while everything starts
    machine.rest(60.0)
    machine.run(step_of(1500))
    assert machine.rates.prefill_tokens_per_s == pytest.approx(machine.true_rate, rel=0.3)


@pytest.mark.parametrize("varied", [True, False])
def test_a_first_step_that_was_slow_is_corrected_also_where_every_step_is_mixed(
    varied: bool,
) -> None:
    machine = Machine(step_s=0.02, decode_s=0.02, token_s=0.0002)
    machine.run(step_of(512))
    machine.run(step_of(512, 8), slower=40.0)
    for number in range(300):
        machine.run(step_of(100 + 37 * number % 400 if varied else 500, 8))
    expected = step_of(300 if varied else 500, 8)
    assert machine.rates.predict(expected) == pytest.approx(machine.time_s(expected), rel=0.2)
    if varied:  # else they cannot be kept apart
        assert machine.rates.decode_step_s == pytest.approx(0.02, rel=0.5)
        assert machine.rates.prefill_tokens_per_s == pytest.approx(machine.true_rate, rel=0.5)


def test_nothing_is_predicted_from_prompts_far_shorter() -> None:
    machine = Machine(step_s=0.02, decode_s=0.02, token_s=0.01)
    machine.run(step_of(16))
    assert machine.rates.predict(step_of(64)) is not None
    assert machine.rates.predict(step_of(65)) is None
    assert not machine.rates.prefill_tokens_per_s


@pytest.mark.parametrize("tail", [2, 8])
@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_a_decode_worker_s_first_short_tails_do_not_set_its_prefill_rate(
    tail: int, slower: float
) -> None:
    machine = Machine(step_s=0.02, decode_s=0.02, token_s=0.0001)
    machine.run(step_of(decodes=4), 20)
    machine.run(step_of(tail, decodes=4), slower=slower)
    machine.run(step_of(tail, decodes=4), 20)
    assert not machine.rates.prefill_tokens_per_s
    machine.run(step_of(500, decodes=4))
    assert machine.rates.prefill_tokens_per_s == pytest.approx(1 / machine.token_s, rel=0.2)


def test_short_prompts_among_decodes_do_not_slow_the_reported_decodes() -> None:
    machine = Machine(step_s=0.05, decode_s=0.05, token_s=0.002)
    for _ in range(40):
        machine.run(step_of(decodes=4), 4)
        machine.run(step_of(100, decodes=4))
    assert machine.rates.decode_step_s == pytest.approx(0.05, rel=0.05)


def test_decodes_are_predicted_by_their_number_and_context_and_chunks_by_what_they_look_at() -> (
    None
):
    rates, now_s = LearnedRates(2048), 0.0

    def time_s(plan: StepPlan) -> float:
        decodes = [seq.start for seq in plan.seqs if len(seq.token_ids) == 1]
        prompts = [(len(s.token_ids), s.start) for s in plan.seqs if len(s.token_ids) > 1]
        decode_s = 0.01 + 0.0005 * len(decodes) + 1e-6 * sum(decodes)
        return decode_s + sum(n * (1e-4 + 1e-7 * (start + n / 2)) for n, start in prompts)

    def step(num_decodes: int, context: int, num_tokens: int, start: int) -> StepPlan:
        lengths = [(1, context)] * num_decodes + [(num_tokens, start)] * (num_tokens > 0)
        seqs = tuple(
            ScheduledSeq(RequestId(str(number)), prompt(length), first, (), samples=True)
            for number, (length, first) in enumerate(lengths)
        )
        return StepPlan(1, seqs, num_tokens=sum(length for length, _ in lengths))

    rng = random.Random(0)
    for _ in range(3000):
        decodes = rng.randint(1, 32), rng.randint(100, 2000)
        chunk = rng.choice([(0, 0), (rng.randint(16, 512), rng.randint(0, 8000))])
        plan = step(*decodes, *chunk)
        now_s += time_s(plan)
        rates.learn(plan, time_s(plan), now_s)
    for plan in (
        step(2, 200, 0, 0),
        step(32, 2000, 0, 0),
        step(8, 500, 256, 0),
        step(8, 500, 256, 8000),
    ):
        assert rates.predict(plan) == pytest.approx(time_s(plan), rel=0.2)


def test_one_slow_short_step_after_a_rest_is_not_believed_whole() -> None:
    machine = Machine(step_s=0.01, decode_s=0.01, token_s=0.0001)
    machine.run(step_of(2048), 20)
    machine.rest(60.0)
    machine.run(step_of(16), slower=300.0)
    machine.run(step_of(16), 11)
    assert machine.rates.prefill_tokens_per_s > 0.2 * machine.true_rate
