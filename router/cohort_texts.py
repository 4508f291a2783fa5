"""Which text is whose. A text is what makes a model's ids of words and words of its ids: tokenizer,
chat template, ends, sampling defaults. Ids of one text mean nothing to a model of another.

1. What comes as text is read with the text of the cohort that it draws, and goes to cohorts of that
   text alone; before its first token it may be read anew, with another's.
2. What comes as token ids is taken for what the model makes that most requests go to, and goes to
   cohorts of the same tokenizer alone.
3. A cohort whose text is not read gets nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

from router.cohorts import Cohort

TextId = NewType("TextId", int)
OWN = TextId(0)
"""Of the model that the router's own file names."""


@dataclass(frozen=True)
class TextSource:
    """Where a text is read from, as a cluster file says it; empty: the model's main branch, the
    model's own tokenizer."""

    model: str
    revision: str = ""
    tokenizer: str = ""

    @property
    def of_model(self) -> tuple[str, str]:
        return self.model, self.revision

    def __str__(self) -> str:
        revision = f" ({self.revision})" if self.revision else ""
        tokenizer = f" with the tokenizer of {self.tokenizer}" if self.tokenizer else ""
        return f"{self.model}{revision}{tokenizer}"


class CohortTexts:
    """Own which text each cohort has. Pure: `Texts` reads them."""

    def __init__(self) -> None:
        self._texts: Mapping[Cohort, TextId | None] = {}
        self._vocabularies: Mapping[TextId, bytes] = {}
        self.version = 0

    def update(
        self, texts: Mapping[Cohort, TextId | None], vocabularies: Mapping[TextId, bytes]
    ) -> bool:
        """Every cohort's text, None where it is not read, and of each text what its ids mean;
        whether anything is new."""
        if texts == self._texts:
            return False
        self._texts, self._vocabularies = dict(texts), dict(vocabularies)
        self.version += 1
        return True

    def of(self, cohort: Cohort) -> TextId | None:
        """None: it is not read. A cohort of which nothing is told has the router's own: registries
        of former releases tell nothing."""
        return self._texts.get(cohort, OWN)

    def knows(self, cohort: Cohort) -> bool:
        """Whether the registry tells of it; by one that tells of none there is one only. A stream
        may come back of one that has gone, or is yet to be told of: its text may be any."""
        return cohort in self._texts or not (self._texts or cohort)

    @property
    def unread(self) -> list[Cohort]:
        return sorted(cohort for cohort, text in self._texts.items() if text is None)

    @property
    def read(self) -> list[Cohort]:
        return sorted(cohort for cohort, text in self._texts.items() if text is not None)

    def is_only(self, text: TextId) -> bool:
        """Whether all cohorts have this one."""
        return all(each == text for each in self._texts.values())

    def have_the_same_ids(self, one: TextId, other: TextId) -> bool:
        return one == other or self._vocabularies.get(one) == self._vocabularies.get(other)

    def main(self, weights: Mapping[Cohort, int]) -> TextId:
        """Of the model that most new requests go to, by these weights of the cohorts; of two that
        get as many, the router's own."""
        shares = Counter[TextId]()
        for cohort, weight in weights.items():
            text = self.of(cohort)
            if text is not None:
                shares[text] += weight
        return max(shares, key=lambda text: (shares[text], text == OWN), default=OWN)
