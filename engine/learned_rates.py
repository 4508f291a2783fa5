"""How fast an engine was recently, and how long its next step will take.

A step costs a time for its decodes (or, without any, a time for being a step at all) and a time for
each prompt token. Each step corrects these times as little as explains it: normalised least mean
squares (Widrow and Hoff, 1960). 128 prompt tokens weigh as much as a step, so short prompts say
little about long ones.
"""

from __future__ import annotations

from engine.request import StepPlan

_DECODES, _STEP, _PROMPT = range(3)
_PROMPT_UNIT = 128  # tokens
_KEPT = 0.8  # of an error, after the step that shows it
_KEPT_AFTER_REST = 0.3  # one step alone is never all that is known
_HALF_LIFE_S = 10.0  # of what was known, while no step said anything new
_REACH = 4  # a step of so many times the prompt tokens of the longest one so far is unlike any


class LearnedRates:
    """Times of past steps; the newest weigh most."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._chunk = max_num_batched_tokens
        self._least_units = min(_PROMPT_UNIT, max(1, max_num_batched_tokens // 2)) / _PROMPT_UNIT
        """Fewest units of prompts in a step from which the time of a unit can be learned."""
        self._times_s: list[float | None] = [None, None, None]  # of decodes, a step, a unit
        self._longest = 0  # prompt tokens of one step
        self._learned_at_s = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Rate of a long prompt, chunk by chunk; 0.0 while unknown."""
        step_s, unit_s = self._times_s[_STEP], self._times_s[_PROMPT]
        if unit_s is None:
            return 0.0
        chunk_s = (step_s or 0.0) + unit_s * self._chunk / _PROMPT_UNIT
        return self._chunk / chunk_s if chunk_s else 0.0

    @property
    def decode_step_s(self) -> float:
        """0.0 while unknown."""
        return self._times_s[_DECODES] or 0.0

    def predict(self, plan: StepPlan) -> float | None:
        """How long the step will take. None: this kind of work, or prompts this long, were never
        measured."""
        work = _work(plan)
        if work[_PROMPT] * _PROMPT_UNIT > _REACH * self._longest:
            return None
        needed = [*work[:_PROMPT], work[_PROMPT] >= self._least_units]
        if any(need and time_s is None for need, time_s in zip(needed, self._times_s)):
            return None
        return self._sum_s(work)

    def learn(self, plan: StepPlan, elapsed_s: float, now_s: float) -> None:
        """Learn from a step that took `elapsed_s` and ended now."""
        work = _work(plan)
        if not any(work) or elapsed_s <= 0:
            return
        self._longest = max(self._longest, round(work[_PROMPT] * _PROMPT_UNIT))
        done = [kind for kind, amount in enumerate(work) if amount]
        new = [kind for kind in done if self._times_s[kind] is None]
        are_too_few = _PROMPT in new and work[_PROMPT] < self._least_units
        if are_too_few:
            work[_PROMPT] = 0.0
            done.remove(_PROMPT)
            new.remove(_PROMPT)
        predicted_s = self._sum_s(work)
        if are_too_few and not new and elapsed_s > predicted_s:
            return  # the prompts may have taken what is more
        if new:
            rest_s = max(elapsed_s - predicted_s, 0.1 * elapsed_s)
            self._explain(predicted_s + rest_s, work, new)
            # What was known may have explained too much.
            self._explain(elapsed_s, work, [kind for kind in done if kind not in new])
        else:
            kept = _KEPT * 0.5 ** ((now_s - self._learned_at_s) / _HALF_LIFE_S)
            kept = max(kept, _KEPT_AFTER_REST)
            self._explain(elapsed_s + kept * (predicted_s - elapsed_s), work, done)
        self._learned_at_s = now_s

    def _sum_s(self, work: list[float]) -> float:
        return sum(amount * (time_s or 0.0) for amount, time_s in zip(work, self._times_s))

    def _explain(self, target_s: float, work: list[float], kinds: list[int]) -> None:
        """Correct the times of these kinds by as little as makes the work take `target_s`."""
        times_s = [time_s or 0.0 for time_s in self._times_s]
        while kinds:
            error_s = target_s - sum(amount * time_s for amount, time_s in zip(work, times_s))
            norm = sum(work[kind] ** 2 for kind in kinds)
            for kind in kinds:
                times_s[kind] += error_s * work[kind] / norm
            below = [kind for kind in kinds if times_s[kind] < 0]
            for kind in below:
                times_s[kind] = 0.0
            if not below:
                break
            kinds = [kind for kind in kinds if kind not in below]  # the others take the rest
        for kind, amount in enumerate(work):
            if amount:
                self._times_s[kind] = times_s[kind]


def _work(plan: StepPlan) -> list[float]:
    """Whether the step decodes, whether it has only prompts, and its prompt tokens in units.

    A prompt's single last token counts as a decode.
    """
    num_decodes = sum(len(seq.token_ids) == 1 for seq in plan.seqs)
    num_prompt_tokens = plan.num_tokens - num_decodes
    has_only_prompts = bool(plan.seqs) and not num_decodes
    return [float(num_decodes > 0), float(has_only_prompts), num_prompt_tokens / _PROMPT_UNIT]
