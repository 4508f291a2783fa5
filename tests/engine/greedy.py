"""What greedy decoding says: tokens, and how likely each was."""

from __future__ import annotations

from dataclasses import dataclass

# Rounding moves a log-probability by less (qwen3 by up to 2e-4, the others 1e-5), any one harm to
# the KV of 1,500 tokens moves one of a dozen by more: every comparison shows the one, `test_oracle`
# the other.
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Greedy:
    """The likeliest tokens in a row, and the natural logarithms of how likely each was."""

    ids: list[int]
    logprobs: list[float]

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        """The same tokens, and as likely but for rounding. NaN is never equal."""
        return (
            isinstance(other, Greedy)
            and self.ids == other.ids
            and len(self.logprobs) == len(other.logprobs) == len(self.ids)
            and all(
                abs(one - its) <= LOGPROB_TOLERANCE
                for one, its in zip(self.logprobs, other.logprobs)
            )
        )
