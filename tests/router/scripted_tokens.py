"""What scripted workers compute: the tokens of a fault-free run, and one attempt under way.

The next token is a digest of the seed and of every token before it, so a lost, repeated or
re-sampled token changes all that follow.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.v1 import common_pb2, worker_pb2

FIRST_LETTER, NUM_LETTERS = 97, 26
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def next_token(seed: int, tokens: Sequence[int]) -> int:
    data = np.asarray(tokens, dtype="<u4").tobytes() + seed.to_bytes(8, "little")
    digest = hashlib.blake2b(data, digest_size=4).digest()
    return FIRST_LETTER + int.from_bytes(digest, "little") % NUM_LETTERS


def oracle(prompt: Sequence[int], seed: int, num_tokens: int) -> list[int]:
    """The output of a fault-free run."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(seed, tokens))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class Running:
    """One attempt on a decode worker."""

    spec: worker_pb2.RequestSpec
    router_id: str | None
    tokens: list[int]  # prompt and output
    task: asyncio.Task[None] | None = None
    lease_id: str = ""
    reserved: worker_pb2.Reserved | None = None
    router: str = ""  # whose session had it last
    was_attached: bool = False  # before its first token, which its writer reports to another router
    finished: int = 0
    error: str = ""
    weights: int = 0  # others give other tokens

    @property
    def num_prompt(self) -> int:
        return self.spec.num_prompt_tokens

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def next(self) -> int:
        """Sample; returns the finish reason, 0 while it goes on."""
        token = next_token(self.spec.seed ^ self.weights, self.tokens)
        self.tokens.append(token)
        if token in self.spec.stop_token_ids and not self.spec.sampling.ignore_eos:
            return STOP
        return LENGTH if len(self.output) >= self.spec.sampling.max_tokens else 0


def known_tokens(spec: worker_pb2.RequestSpec) -> list[int]:
    """Prompt and what was emitted before this attempt."""
    return [int(token) for token in np.frombuffer(spec.token_ids, dtype="<u4")]


def logprobs_of(spec: worker_pb2.RequestSpec, tokens: Sequence[int]) -> list[common_pb2.Logprobs]:
    """Where the request asks for them: each token is the likeliest, and the next ones follow."""
    if not spec.sampling.HasField("logprobs"):
        return []
    return [
        common_pb2.Logprobs(
            logprob=-0.25,
            rank=1,
            top=[
                common_pb2.TokenLogprob(id=token + number, logprob=-0.25 - number)
                for number in range(spec.sampling.logprobs)
            ],
        )
        for token in tokens
    ]
