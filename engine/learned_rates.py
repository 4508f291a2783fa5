"""How fast an engine was of late, and how long its next step will take."""

from __future__ import annotations

from engine.request import StepPlan

_KEPT = 0.8  # of what was known, after a unit of work
_PROMPT_UNIT = 128  # tokens: a prompt of few tokens tells little about long ones
_HALF_LIFE_S = 10.0  # of what was known, in time


class Pace:
    """Seconds per unit of work, newest weighing most; the more units, the more it weighs."""

    def __init__(self, unit: int) -> None:
        self.seconds = 0.0  # per piece of work, of which `unit` are a unit; 0.0: nothing is known
        self._unit = unit
        self._learned_at_s = 0.0

    def learn(self, amount: int, elapsed_s: float, now_s: float) -> None:
        """`amount` pieces took `elapsed_s`. What is old counts little: it may have been learned
        in a bad moment, such as a worker's first steps."""
        age_s = now_s - self._learned_at_s
        kept = _KEPT ** (amount / self._unit) * 0.5 ** (age_s / _HALF_LIFE_S)
        newest = elapsed_s / amount
        self.seconds = kept * self.seconds + (1 - kept) * newest if self.seconds else newest
        self._learned_at_s = now_s


class LearnedRates:
    """Speed of past steps."""

    def __init__(self) -> None:
        self._prefill, self._decode = Pace(_PROMPT_UNIT), Pace(1)

    @property
    def prefill_tokens_per_s(self) -> float:
        """0.0 while nothing is known."""
        return 1 / self._prefill.seconds if self._prefill.seconds else 0.0

    @property
    def decode_step_s(self) -> float:
        """0.0 while nothing is known."""
        return self._decode.seconds

    def learn(self, plan: StepPlan, elapsed_s: float, now_s: float) -> None:
        """A step with prompts in it took what its decodes take alone, the rest is prefill. Where no
        step was of decodes alone, theirs is what such a step took beyond its prompts."""
        if not plan.seqs or elapsed_s <= 0:
            return
        num_decodes, num_prefill_tokens = _kinds(plan)
        if not num_prefill_tokens:
            self._decode.learn(1, elapsed_s, now_s)
            return
        if num_decodes and not self._decode.seconds and self._prefill.seconds:
            prefill_s = num_prefill_tokens * self._prefill.seconds
            self._decode.learn(1, max(elapsed_s - prefill_s, 0.1 * elapsed_s), now_s)
            return
        decode_s = self._decode.seconds if num_decodes else 0.0
        prefill_s = max(elapsed_s - decode_s, 0.1 * elapsed_s)
        self._prefill.learn(num_prefill_tokens, prefill_s, now_s)

    def predict(self, plan: StepPlan) -> float | None:
        """How long the step will take; None when a kind of work in it was never measured."""
        num_decodes, num_prefill_tokens = _kinds(plan)
        if (num_decodes and not self._decode.seconds) or (
            num_prefill_tokens and not self._prefill.seconds
        ):
            return None
        decode_s = self._decode.seconds if num_decodes else 0.0
        return decode_s + num_prefill_tokens * self._prefill.seconds


def _kinds(plan: StepPlan) -> tuple[int, int]:
    """Decodes in a step, and tokens of prompts: a prompt's single last one counts as a decode."""
    num_decodes = sum(len(seq.token_ids) == 1 for seq in plan.seqs)
    return num_decodes, plan.num_tokens - num_decodes
