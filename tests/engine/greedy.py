"""What a lone engine says; of greedy decoding the tokens, and how likely each was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.request import RequestId, RequestSpec, SampledToken, SamplingParams, TokenEvent
from engine.run.core import EngineCore

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

    @classmethod
    def of(cls, tokens: Sequence[SampledToken]) -> Greedy:
        """Tokens that were asked for with their log-probabilities."""
        logprobs = [token.logprobs.logprob for token in tokens if token.logprobs is not None]
        return cls([token.token_id for token in tokens], logprobs)


def run_alone(
    engine: EngineCore,
    prompts: Sequence[npt.ArrayLike],
    sampling: SamplingParams | Sequence[SamplingParams],
) -> list[list[SampledToken]]:
    """The answers to all prompts, in one batch; the pool is whole afterwards."""
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    for number, prompt in enumerate(prompts):
        token_ids = np.asarray(prompt, np.uint32)
        name = RequestId(str(number))
        engine.add(RequestSpec(name, token_ids, len(token_ids), params[number]))
    found: list[list[SampledToken]] = [[] for _ in prompts]
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokenEvent):
                found[int(event.request_id)].append(event.token)
    engine.check_integrity()
    assert engine.load().num_running == engine.load().num_waiting == 0
    return found
