"""What kinds of workers a fleet has: who hands KV over to whom, and how long a request is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from router.cohorts import Cohort
from router.worker_facts import KvClass, ModelIds, WorkerFacts

T = TypeVar("T")


class WorkerKinds:
    """Own how many workers of each kind are here."""

    def __init__(self) -> None:
        self._numbers: dict[KvClass, int] = {}  # also of classes that left
        self._model_ids: dict[KvClass, ModelIds] = {}  # likewise
        self._num_of_class: Counter[KvClass] = Counter()
        self.classes: Sequence[tuple[KvClass, int]] = ()
        """Of the workers that are here, each with its number."""
        self.cohorts: frozenset[Cohort] = frozenset()
        """Of the workers that are here."""
        self._longest_requests: Counter[int] = Counter()  # of decode workers, in tokens
        self._longest_prompts: Counter[int] = Counter()  # of prefill workers, in tokens

    def add(self, facts: WorkerFacts) -> int:
        """The number of the worker's class, which is its class's for good."""
        self._num_of_class[facts.kv_class] += 1
        known = self._model_ids.get(facts.kv_class, frozenset())
        self._model_ids[facts.kv_class] = known | facts.model_ids
        if facts.can_decode:
            self._longest_requests[facts.longest_request] += 1
        if facts.can_prefill:
            self._longest_prompts[facts.longest_request - 1] += 1
        number = self._numbers.setdefault(facts.kv_class, len(self._numbers))
        self._list_classes()
        return number

    def remove(self, facts: WorkerFacts) -> None:
        _uncount(self._num_of_class, facts.kv_class)
        self._list_classes()
        if facts.can_decode:
            _uncount(self._longest_requests, facts.longest_request)
        if facts.can_prefill:
            _uncount(self._longest_prompts, facts.longest_request - 1)

    def _list_classes(self) -> None:
        """Every request looks at them, and they hardly ever change."""
        self.classes = tuple((kv_class, self._numbers[kv_class]) for kv_class in self._num_of_class)
        self.cohorts = frozenset(kv_class.cohort for kv_class in self._num_of_class)

    def model_ids(self, facts: WorkerFacts) -> ModelIds:
        """Of a worker that is here, or was: what all of its class have told."""
        return self._model_ids[facts.kv_class]

    def runs(self, kv_class: KvClass, model_ids: ModelIds) -> bool:
        """Whether such workers can go on with that model's stream; any can where it is unknown."""
        return not model_ids or not model_ids.isdisjoint(self._model_ids[kv_class])

    def num_models(self, cohort: Cohort) -> int:
        """Of its workers that are here, as far as their models' fingerprints are told."""
        told = (c for c in self._num_of_class if c.cohort == cohort)
        return len(
            {fingerprint for c in told for fingerprint in self._model_ids[c] - {c.kv_fingerprint}}
        )

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
