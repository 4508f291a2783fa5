"""What kinds of workers a fleet has: who hands KV over to whom, and how long a request is taken."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from router.cohorts import Cohort
from router.worker_facts import KvClass, ModelIds, WorkerFacts

T = TypeVar("T")


class WorkerKinds:
    """Own how many workers of each kind are here, and which kinds were: a class that has left is
    known for as long as a stream that it began may live, which may be asked for here."""

    def __init__(self, clock: Callable[[], float], known_for_s: float) -> None:
        self._clock, self._known_for_s = clock, known_for_s
        self._next_number = itertools.count()
        self._numbers: dict[KvClass, int] = {}  # also of classes that have left
        self._model_ids: dict[KvClass, ModelIds] = {}  # likewise
        self._left_at_s: dict[KvClass, float] = {}  # of these alone, first left first
        self._num_of_class: Counter[KvClass] = Counter()
        self.classes: Sequence[tuple[KvClass, int]] = ()
        """Of the workers that are here, each with its number."""
        self.cohorts: frozenset[Cohort] = frozenset()
        """Of the workers that are here."""
        self._longest_requests: Counter[int] = Counter()  # of decode workers, in tokens
        self._longest_prompts: Counter[int] = Counter()  # of prefill workers, in tokens

    def add(self, facts: WorkerFacts) -> int:
        """The number of the worker's class: no other's, ever."""
        self._left_at_s.pop(facts.kv_class, None)
        self._num_of_class[facts.kv_class] += 1
        known = self._model_ids.get(facts.kv_class, frozenset())
        self._model_ids[facts.kv_class] = known | facts.model_ids
        if facts.can_decode:
            self._longest_requests[facts.longest_request] += 1
        if facts.can_prefill:
            self._longest_prompts[facts.longest_request - 1] += 1
        if facts.kv_class not in self._numbers:
            self._numbers[facts.kv_class] = next(self._next_number)
        self._list_classes()
        return self._numbers[facts.kv_class]

    def remove(self, facts: WorkerFacts) -> None:
        _uncount(self._num_of_class, facts.kv_class)
        if facts.kv_class not in self._num_of_class:
            self._left_at_s[facts.kv_class] = self._clock()
        self._list_classes()
        if facts.can_decode:
            _uncount(self._longest_requests, facts.longest_request)
        if facts.can_prefill:
            _uncount(self._longest_prompts, facts.longest_request - 1)

    def _list_classes(self) -> None:
        """Every request looks at them, and they hardly ever change."""
        self.classes = tuple((kv_class, self._numbers[kv_class]) for kv_class in self._num_of_class)
        self.cohorts = frozenset(kv_class.cohort for kv_class in self._num_of_class)
        self._forget()

    def _forget(self) -> None:
        now = self._clock()
        while self._left_at_s:
            kv_class, left_at_s = next(iter(self._left_at_s.items()))
            if now - left_at_s <= self._known_for_s:
                return
            del self._left_at_s[kv_class], self._numbers[kv_class], self._model_ids[kv_class]

    def model_ids(self, facts: WorkerFacts) -> ModelIds:
        """Of a worker that is here, or has just left: what all of its class have told."""
        return self._model_ids[facts.kv_class]

    def runs(self, kv_class: KvClass, model_ids: ModelIds) -> bool:
        """Whether such workers can go on with that model's stream; any can where it is unknown."""
        return not model_ids or not model_ids.isdisjoint(self._model_ids[kv_class])

    def seen_cohorts(self) -> frozenset[Cohort]:
        """Of workers that are here, or were while a stream that lives may have begun."""
        self._forget()
        return frozenset(kv_class.cohort for kv_class in self._model_ids)

    def seen_model_ids(self, cohort: Cohort) -> ModelIds:
        """Of all models of the cohort whose workers are here, or were likewise."""
        self._forget()
        seen = (ids for kv_class, ids in self._model_ids.items() if kv_class.cohort == cohort)
        return frozenset[bytes]().union(*seen)

    def num_models_seen(self, cohort: Cohort) -> int:
        """Likewise, as far as their models' fingerprints are told."""
        self._forget()
        own = (item for item in self._model_ids.items() if item[0].cohort == cohort)
        return len({told for kv_class, ids in own for told in ids - {kv_class.kv_fingerprint}})

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


def _uncount(counts: Counter[T], key: T) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
