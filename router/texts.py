"""Reads the texts of cohorts whose model is another than the one in the router's own file.

1. The registry tells of each pool where its cluster file has the model's text (`TextSource`).
2. Where that is the model of the router's own file, the text is the router's own, whatever
   tokenizer the pool's file names: the router's is newer. Another model's is read on a thread.
   Texts whose files say the same are one.
3. What cannot be read is told in the log once, and tried again every `AGAIN_S`.
4. A cohort is forgotten once no pool and no worker is of it, and with it where its text was read;
   the text itself goes when no request that was read with it can live any more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.errors import ConfigError
from router.cohort_texts import OWN, CohortTexts, TextId, TextSource
from router.cohorts import Cohort
from router.stopped_pools import PoolReport
from router.text import TextModel

log = logging.getLogger(__name__)

AGAIN_S = 10.0
SETTLE_S = 2.0
"""Requests wait so long at most for a text that is being read."""
MAX_SETTLING = 256
"""So many at most: their messages are held meanwhile."""


@dataclass
class _Reading:
    """What became of one source."""

    text: TextId | None = None  # once it is read
    tried_s: float | None = None
    said: str = ""  # why it could not be read


class Texts:
    """Own the texts and what is being read. Lives on one event loop."""

    def __init__(
        self,
        own: TextModel,
        source: TextSource | None,
        of_cohorts: CohortTexts,
        on_change: Callable[[], None],
        keep_s: float,
    ) -> None:
        """`source`: of the router's own text; None: it is no registry's. `keep_s`: longer than any
        request lives."""
        self._source, self._of_cohorts, self._on_change = source, of_cohorts, on_change
        self._keep_s = keep_s
        self._models = {OWN: own}
        self._next_ids = itertools.count(OWN + 1)
        self._unused_since_s: dict[TextId, float] = {}  # of those that no cohort has
        self._told: dict[Cohort, frozenset[TextSource]] = {}
        self._sources: dict[TextSource, _Reading] = {}  # of these cohorts
        self._reading: dict[TextSource, asyncio.Task[None]] = {}
        self._num_settling = 0
        self._settled, self._news = asyncio.Event(), asyncio.Event()
        self._settled.set()

    def __getitem__(self, text: TextId) -> TextModel:
        return self._models[text]

    def update(self, pools: Sequence[PoolReport], here: Collection[Cohort]) -> None:
        """Take in all pools as the registry sees them now. `here`: the cohorts of live workers."""
        told: dict[Cohort, dict[tuple[str, str], TextSource]] = {}
        for pool in pools:
            models = told.setdefault(pool.cohort, {})
            if pool.text is not None:
                models[pool.text.of_model] = pool.text  # the newest pool's tokenizer
        # A registry that is told of its pools anew has yet to hear of cohorts that go on serving;
        # one that knows of no pool has just started.
        kept = {each: self._told[each] for each in self._told if each in here or not pools}
        self._told = kept | {cohort: frozenset(models.values()) for cohort, models in told.items()}
        sources = frozenset[TextSource]().union(*self._told.values())
        self._sources = {each: self._sources.get(each, _Reading()) for each in sources}
        for source, reading in self._sources.items():
            self._look_at(source, reading)
        self._forget_unused()
        self._tell()

    async def settled(self, is_wanted: Callable[[Cohort], bool]) -> None:
        """Return once no text that is wanted is on its way and has just begun to be read, or at
        once where many wait for that already: a request may be read anew later."""
        if self._settled.is_set() or self._num_settling >= MAX_SETTLING:
            return
        if any(map(is_wanted, self._of_cohorts.unread)):
            self._num_settling += 1
            try:
                await self._settled.wait()
            finally:
                self._num_settling -= 1

    async def until_read(self, is_wanted: Callable[[Cohort], bool]) -> None:
        """Return once the text of each cohort that is wanted is read."""
        while any(map(is_wanted, self._of_cohorts.unread)):
            self._news.clear()
            await self._news.wait()

    async def until_one_is_read(self, is_wanted: Callable[[Cohort], bool]) -> None:
        """Return once there is a cohort that is wanted whose text is read."""
        while not any(map(is_wanted, self._of_cohorts.read)):
            self._news.clear()
            await self._news.wait()

    async def close(self) -> None:
        tasks = list(self._reading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- reading -------------------------------------------------------------------------------

    def _look_at(self, source: TextSource, reading: _Reading) -> None:
        """Have it read, if it is not and it is time to try."""
        if reading.text is not None or source in self._reading:
            return
        if self._source is not None and source.of_model == self._source.of_model:
            reading.text = OWN
            return
        now = time.monotonic()
        if reading.tried_s is None:
            log.info("reading the text of %s: its cohorts get no request before", source)
            self._settled.clear()
            asyncio.get_running_loop().call_later(SETTLE_S, self._settled.set)
        elif now - reading.tried_s < AGAIN_S:
            return
        reading.tried_s = now
        task = self._reading[source] = asyncio.create_task(self._read(source))
        task.add_done_callback(partial(self._ended, source))

    async def _read(self, source: TextSource) -> None:
        try:
            found = await asyncio.to_thread(
                TextModel.load,
                source.model,
                source.revision or None,
                source.tokenizer or None,
                tuple(self._models.values()),
            )
        except (ConfigError, OSError) as error:
            reading = self._sources.get(source)
            if reading is not None and reading.said != str(error):
                reading.said = str(error)
                log.error("no request goes to the cohorts of %s: %s", source, error)
            return
        if (reading := self._sources.get(source)) is None:
            return  # its cohorts have gone meanwhile
        reading.text = self._id_of(found)
        log.info("the text of %s is read", source)
        self._tell()

    def _id_of(self, found: TextModel) -> TextId:
        for text, model in self._models.items():
            if model.digest == found.digest:  # read at the same time, perhaps
                return text
        text = TextId(next(self._next_ids))
        self._models[text] = found
        return text

    def _forget_unused(self) -> None:
        used = {OWN, *(reading.text for reading in self._sources.values())}
        now = time.monotonic()
        for text in list(self._models):
            if text in used:
                self._unused_since_s.pop(text, None)
            elif now - self._unused_since_s.setdefault(text, now) >= self._keep_s:
                del self._models[text], self._unused_since_s[text]

    def _ended(self, source: TextSource, task: asyncio.Task[None]) -> None:
        del self._reading[source]
        if not self._reading:
            self._settled.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("reading the text of %s ended: %r", source, error, exc_info=error)

    def _tell(self) -> None:
        texts = {cohort: self._text(sources) for cohort, sources in self._told.items()}
        vocabularies = {text: model.vocabulary for text, model in self._models.items()}
        if self._of_cohorts.update(texts, vocabularies):
            self._on_change()
        self._news.set()

    def _text(self, sources: Iterable[TextSource]) -> TextId | None:
        """Of a cohort whose pools name these: none where they are several models, whose texts are
        not the same."""
        found = {self._sources[source].text for source in sources} or {OWN}
        return found.pop() if len(found) == 1 else None
