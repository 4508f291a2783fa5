"""What a worker registers of itself, and the kinds of workers in a fleet."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from baton.v1 import common_pb2

NO_BOUND = 1 << 30  # tokens; of an unknown length


@dataclass(frozen=True)
class KvClass:
    """What workers must share for KV to be handed over between them."""

    kv_fingerprint: bytes
    block_size: int


@dataclass(frozen=True)
class WorkerFacts:
    """What never changes in one incarnation of a worker."""

    worker_id: str
    incarnation: int
    can_prefill: bool
    can_decode: bool
    address: str
    model: str
    kv_fingerprint: bytes
    block_size: int
    num_blocks: int
    max_model_len: int
    max_request_tokens: int
    max_held_tokens: int
    """Of one request, where windows leave blocks as it goes; 0: it holds its whole length."""
    max_num_seqs: int
    vocab_size: int
    kv_bytes_per_token: int
    ref: common_pb2.WorkerRef = field(compare=False)
    """Passed on unread: it names the writer of a lease."""
    pool: str = ""

    @property
    def identity(self) -> tuple[str, int]:
        """Worker id and incarnation: its slot, once it has left, is given to another."""
        return (self.worker_id, self.incarnation)

    @property
    def kv_tokens(self) -> int:
        """Tokens of one request that KV memory can hold; 0: memory does not bound its length."""
        if self.max_request_tokens or self.max_held_tokens:
            return self.max_request_tokens
        return self.num_blocks * self.block_size  # a worker that reports neither

    @property
    def longest_request(self) -> int:
        """Prompt plus output tokens that the worker accepts: the last token has no KV."""
        if not self.kv_tokens:
            return self.max_model_len or NO_BOUND
        return min(self.max_model_len or NO_BOUND, self.kv_tokens + 1)

    @property
    def is_bound_by_memory(self) -> bool:
        """It accepts less than its model's context."""
        return 0 < self.kv_tokens <= self.max_model_len

    def held(self, num_tokens: int) -> int:
        """Tokens of KV that a request of this length takes at most."""
        return min(num_tokens, self.max_held_tokens or num_tokens)

    @property
    def kv_class(self) -> KvClass:
        return KvClass(self.kv_fingerprint, self.block_size)


T = TypeVar("T")


class WorkerKinds:
    """Own how many workers of each kind are here."""

    def __init__(self) -> None:
        self._next_number = itertools.count()
        self._numbers: dict[KvClass, int] = {}
        self._num_of_class: Counter[KvClass] = Counter()
        self.classes: Sequence[tuple[KvClass, int]] = ()
        """Of the workers that are here, each with its number."""
        self._longest_requests: Counter[int] = Counter()  # of decode workers, in tokens
        self._longest_prompts: Counter[int] = Counter()  # of prefill workers, in tokens

    def add(self, facts: WorkerFacts) -> int:
        """The number of the worker's class: no other's, ever."""
        if facts.kv_class not in self._numbers:
            self._numbers[facts.kv_class] = next(self._next_number)
        self._num_of_class[facts.kv_class] += 1
        if facts.can_decode:
            self._longest_requests[facts.longest_request] += 1
        if facts.can_prefill:
            self._longest_prompts[facts.longest_request - 1] += 1
        self._list_classes()
        return self._numbers[facts.kv_class]

    def remove(self, facts: WorkerFacts) -> None:
        _uncount(self._num_of_class, facts.kv_class)
        if facts.kv_class not in self._num_of_class:
            del self._numbers[facts.kv_class]
        if facts.can_decode:
            _uncount(self._longest_requests, facts.longest_request)
        if facts.can_prefill:
            _uncount(self._longest_prompts, facts.longest_request - 1)
        self._list_classes()

    def _list_classes(self) -> None:
        """Cached: every request reads them, and they hardly ever change."""
        self.classes = tuple(self._numbers.items())

    @property
    def longest_request(self) -> int | None:
        """Prompt plus output tokens that some decode worker accepts; None without one."""
        return max(self._longest_requests, default=None)

    @property
    def longest_prompt(self) -> int | None:
        """Prompt tokens that some prefill worker accepts; None without one."""
        return max(self._longest_prompts, default=None)

    def check_integrity(self, classes: Counter[KvClass]) -> None:
        """Raise AssertionError when these are not the workers that are here."""
        assert classes == self._num_of_class, (classes, self._num_of_class)
        assert classes.keys() == self._numbers.keys(), (classes, self._numbers)


def _uncount(counts: Counter[T], key: T) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
