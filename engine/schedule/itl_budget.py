"""How much of a prompt may share a step with decodes: a budget of seconds.

Every running stream waits for the whole step. So the step may take `max_itl_factor` times what its
decodes would take alone, by the learned rates, but has room for a block of prompt at least. Chunks
grow from one block to at most twice the longest so far, since nobody knows what a longer one takes.
"""

from __future__ import annotations

from bisect import bisect_right

from engine.schedule.learned_rates import LearnedRates
from engine.schedule.step_work import StepWork

_AIM = 0.8  # of the budget: steps differ, and a stream that is handed over waits for the end of one


class ItlBudget:
    """Decides how many prompt tokens fit. It reads the rates, which their owner writes."""

    def __init__(self, rates: LearnedRates, block_size: int, max_itl_factor: float | None) -> None:
        """Bound steps by `max_itl_factor`. None: a step may take any time."""
        self._rates = rates
        self._block_size = block_size
        self._max_factor = max_itl_factor

    def num_prompt_tokens(self, work: StepWork, start: int, most: int) -> int:
        """Tokens of a prompt from position `start` on, at most `most`, for which a step with this
        work has room."""
        if self._max_factor is None or not work.num_decodes:
            return most
        rates = self._rates
        if rates.wants_decodes_alone:
            return 0
        least = 0 if work.num_prompt_tokens else min(most, self._block_size)
        most = min(most, 2 * rates.longest_joined - work.num_prompt_tokens)
        return max(least, self._room(work, start, most))

    def prefill_tokens_per_s(self, decodes: StepWork) -> float:
        """Rate at which a prompt is prefilled beside these decodes; 0.0 while unknown."""
        rates = self._rates
        if self._max_factor is None or not decodes.num_decodes or not rates.prefill_tokens_per_s:
            return rates.prefill_tokens_per_s
        chunk = max(self._block_size, self._room(decodes, 0, rates.max_num_batched_tokens))
        seconds = rates.seconds(decodes.with_prompt(chunk, 0))
        return chunk / seconds if seconds else 0.0

    def _room(self, work: StepWork, start: int, most: int) -> int:
        """Tokens, at most `most`, that fit; 0 while unknown."""
        alone_s = self._rates.seconds(work.decodes_alone)
        if alone_s is None or self._max_factor is None:
            return 0

        def seconds(num_tokens: int) -> float:
            return self._rates.seconds(work.with_prompt(num_tokens, start)) or 0.0

        longest_s = _AIM * self._max_factor * alone_s
        return bisect_right(range(1, most + 1), longest_s, key=seconds)
