"""How fast an engine was recently, and how long its next step will take.

A step costs a time for its decodes, which grows with their number and context, or without any a
time for being a step at all. It costs another time for each prompt token, which is less beside
decodes since both read the weights once, and for each token that a prompt token looks at. Each step
corrects these times as little as explains it: normalised least mean squares (Widrow and Hoff,
1960). 128 prompt tokens weigh as much as a step, so short prompts say little about long ones.
"""

from __future__ import annotations

from engine.request import StepPlan
from engine.schedule.step_work import StepWork

_DECODES, _BATCH, _CONTEXT, _STEP, _PROMPT, _JOINED, _ATTENTION = range(7)
_OF_DECODES = (_DECODES, _BATCH, _CONTEXT)
_PROMPT_UNIT = 128  # tokens, alone or joined to decodes
_BATCH_UNIT = 16  # decodes
_CONTEXT_UNIT = 1 << 14  # tokens that decodes look at
_ATTENTION_UNIT = _PROMPT_UNIT << 12  # tokens that prompt tokens look at
_KEPT = 0.8  # of an error, after the step that shows it
_KEPT_AFTER_REST = 0.3  # one step alone is never all that is known
_KEPT_WHEN_DUE = 0.5  # while decodes are seldom alone
_HALF_LIFE_S = 10.0  # of what was known, while no step said anything new
_REACH = 4  # a step of so many times the prompt tokens of the longest one so far is unlike any
_MOST_SLOWER = 2.0  # than predicted: what takes longer was held up by something else
_LEAST_JOINED = 0.25  # units of prompts from which their time beside decodes can be learned
_JOINED_WEIGHT = 0.25  # few prompt tokens say little about many
_LONGER, _SHORTER = 1.5, 0.5  # weights of steps that took more or less: most keep to a prediction
_FRESH = 32  # steps with decodes and prompts, after which decodes should run alone again


class LearnedRates:
    """Times of past steps; the newest weigh most."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        half = max(1, max_num_batched_tokens // 2) / _PROMPT_UNIT
        self._least_units = {_PROMPT: min(1.0, half), _JOINED: min(_LEAST_JOINED, half)}
        """Fewest units of prompts in a step from which the time of a unit can be learned."""
        self._times_s: list[float | None] = [None, 0.0, 0.0, None, None, None, 0.0]
        self._longest = 0  # prompt tokens of one step
        self._longest_joined = 0  # of one step with decodes
        self._decodes = StepWork()  # the last ones
        self._num_joined = _FRESH  # steps with prompts since decodes last ran alone
        self._learned_at_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Rate of a long prompt without decodes beside it, chunk by chunk; 0.0 while unknown."""
        step_s, unit_s = self._times_s[_STEP], self._times_s[_PROMPT]
        if unit_s is None:
            unit_s = self._times_s[_JOINED]
        if unit_s is None:
            return 0.0
        chunk_s = (step_s or 0.0) + unit_s * self.max_num_batched_tokens / _PROMPT_UNIT
        return self.max_num_batched_tokens / chunk_s if chunk_s else 0.0

    @property
    def decode_step_s(self) -> float:
        """Time of the last decodes by themselves; 0.0 while unknown."""
        return self.seconds(self._decodes) or 0.0

    @property
    def longest_joined(self) -> int:
        """Most prompt tokens that ever shared a step with decodes."""
        return self._longest_joined

    @property
    def wants_decodes_alone(self) -> bool:
        """Whether a step without prompts is due, to learn what decodes alone take."""
        return self._num_joined >= _FRESH

    def predict(self, plan: StepPlan) -> float | None:
        """Predict how long the step will take. None: this kind of work, or prompts this long, were
        never measured."""
        work = StepWork.of(plan)
        return None if work.num_prompt_tokens > _REACH * self._longest else self.seconds(work)

    def seconds(self, work: StepWork) -> float | None:
        """Predict how long the work will take, be it longer than any before. None: its kind was
        never measured."""
        amounts = _amounts(work)
        if amounts[_JOINED] and self._times_s[_JOINED] is None:
            amounts[_PROMPT], amounts[_JOINED] = amounts[_JOINED], 0.0
        for kind, (amount, time_s) in enumerate(zip(amounts, self._times_s)):
            if time_s is None and amount and amount >= self._least_units.get(kind, 0.0):
                return None
        return self._sum_s(amounts)

    def learn(self, plan: StepPlan, elapsed_s: float, now_s: float) -> None:
        """Learn from a step that took `elapsed_s` and ended now."""
        work = StepWork.of(plan)
        amounts = _amounts(work)
        if not any(amounts) or elapsed_s <= 0:
            return
        joins = bool(work.num_decodes and work.num_prompt_tokens)
        prompt = _JOINED if joins else _PROMPT
        if joins and self._times_s[_JOINED] is None:
            self._times_s[_JOINED] = self._times_s[_PROMPT]
        kinds = [kind for kind, amount in enumerate(amounts) if amount]
        new = [kind for kind in kinds if self._times_s[kind] is None]
        are_too_few = prompt in new and amounts[prompt] < self._least_units[prompt]
        if are_too_few:
            amounts[prompt] = amounts[_ATTENTION] = 0.0
            kinds = [kind for kind in kinds if amounts[kind]]
            new.remove(prompt)
        predicted_s = self._sum_s(amounts)
        if new:
            rest_s = max(elapsed_s - predicted_s, 0.1 * elapsed_s)
            self._explain(predicted_s + rest_s, amounts, new)
            # What was known may have explained too much.
            self._explain(elapsed_s, amounts, [kind for kind in kinds if kind not in new])
        elif not are_too_few or elapsed_s < predicted_s:  # else it may be due to the few
            kept = _KEPT * 0.5 ** ((now_s - self._learned_at_s) / _HALF_LIFE_S)
            kept = max(kept, _KEPT_AFTER_REST)
            if joins and not are_too_few and not self.wants_decodes_alone:
                kinds = [kind for kind in kinds if kind not in _OF_DECODES]
                weight = _LONGER if elapsed_s > predicted_s else _SHORTER
                weight /= 1 + _JOINED_WEIGHT / amounts[_JOINED] ** 2
                kept = 1 - weight * (1 - kept)
            elif work.num_decodes and self.wants_decodes_alone:
                kept = min(kept, _KEPT_WHEN_DUE)
            elapsed_s = min(elapsed_s, _MOST_SLOWER * max(predicted_s, 0.1 * elapsed_s))
            self._explain(elapsed_s + kept * (predicted_s - elapsed_s), amounts, kinds)
        self._learned_at_s = now_s
        self._longest = max(self._longest, work.num_prompt_tokens)
        if work.num_decodes:
            self._decodes = work.decodes_alone
            self._num_joined = self._num_joined + 1 if joins else 0
            self._longest_joined = max(self._longest_joined, work.num_prompt_tokens)

    def _sum_s(self, amounts: list[float]) -> float:
        return sum(amount * (time_s or 0.0) for amount, time_s in zip(amounts, self._times_s))

    def _explain(self, target_s: float, amounts: list[float], kinds: list[int]) -> None:
        """Correct the times of these kinds by as little as makes the work take `target_s`."""
        times_s = [time_s or 0.0 for time_s in self._times_s]
        while kinds:
            error_s = target_s - sum(amount * time_s for amount, time_s in zip(amounts, times_s))
            norm = sum(amounts[kind] ** 2 for kind in kinds)
            for kind in kinds:
                times_s[kind] += error_s * amounts[kind] / norm
            below = [kind for kind in kinds if times_s[kind] < 0]
            for kind in below:
                times_s[kind] = 0.0
            if not below:
                break
            kinds = [kind for kind in kinds if kind not in below]  # the others take the rest
        for kind, amount in enumerate(amounts):
            if amount:
                self._times_s[kind] = times_s[kind]


def _amounts(work: StepWork) -> list[float]:
    """Return how much of each kind the work has."""
    units = work.num_prompt_tokens / _PROMPT_UNIT
    joins = work.num_decodes > 0
    return [
        float(joins),
        work.num_decodes / _BATCH_UNIT,
        work.num_decode_pairs / _CONTEXT_UNIT,
        float(units > 0 and not joins),
        0.0 if joins else units,
        units if joins else 0.0,
        work.num_prompt_pairs / _ATTENTION_UNIT,
    ]
