"""What a step computes, as far as its time depends on it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.request import StepPlan


@dataclass
class StepWork:
    """Sums over a step's sequences."""

    num_decodes: int = 0
    num_decode_pairs: int = 0
    """Tokens that the decodes look at, counted for each decode."""
    num_prompt_tokens: int = 0
    num_prompt_pairs: int = 0
    """Tokens that the prompt tokens look at, counted for each."""

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """Sum up a step. A prompt's single last token counts as a decode."""
        work = cls()
        for seq in plan.seqs:
            if len(seq.token_ids) == 1:
                work.add_decode(seq.start)
            else:
                work.add_prompt(len(seq.token_ids), seq.start)
        return work

    def add_decode(self, start: int) -> None:
        """Add a decode of the token at position `start`."""
        self.num_decodes += 1
        self.num_decode_pairs += start + 1

    def add_prompt(self, num_tokens: int, start: int) -> None:
        """Add a prompt's tokens from position `start` on."""
        self.num_prompt_tokens += num_tokens
        self.num_prompt_pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2

    def with_prompt(self, num_tokens: int, start: int) -> StepWork:
        work = replace(self)
        work.add_prompt(num_tokens, start)
        return work

    @property
    def decodes_alone(self) -> StepWork:
        return StepWork(self.num_decodes, self.num_decode_pairs)
