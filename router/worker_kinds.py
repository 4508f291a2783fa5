"""The kinds of workers in a fleet: which hand KV to which, and how long a request they accept."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from router.worker_facts import KvClass, WorkerFacts

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
