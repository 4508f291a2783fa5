"""What a request has put out so far, for any number of clients that read at their own pace.

The log only grows. A reader is a position in it, so a slow client costs nothing and blocks nobody:
the tokens it has not taken yet reach it as one run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.errors import BatonError, OverloadedError
from baton.finish_reason import FinishReason
from baton.grpc_options import WORKER_MESSAGE_BYTES
from baton.v1 import common_pb2, router_pb2, worker_pb2
from baton.wire import DEADLINE, finish_reason_of
from router.report.ended_request import EndedRequest

TokenLogprobs = common_pb2.Logprobs  # carried from worker to client unread

# What a log takes in memory, about: a token with its text, an event, and a message with its
# log-probabilities, which takes a few times its bytes on the wire.
_TOKEN_BYTES, _MARK_BYTES, _LOGPROBS_BYTES, _LOGPROBS_FACTOR = 128, 512, 256, 4


def ended_by(tokens: worker_pb2.RequestTokens) -> FinishReason | None:
    """How a run of tokens ends its request. None: it continues, or only the attempt is over."""
    reason = finish_reason_of(tokens.finished)
    return None if tokens.error == DEADLINE or reason is FinishReason.ERROR else reason


@dataclass(frozen=True)
class Finished:
    """The end of a request that did not fail, which clients see."""

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    timings: EndedRequest
    """Clients see its times."""
    stop: str = ""
    """The stop string or stop id that ended it."""


@dataclass(frozen=True)
class TokenRun:
    """Tokens in a row; without ids when held-back text is all that was left."""

    index: int
    ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprobs]


LINGER_S = 0.01
Mark = router_pb2.Routed | router_pb2.Prefilled | router_pb2.HandedOff | router_pb2.Migrated
Event = Mark | TokenRun | Finished


@dataclass
class OutputLog:
    """Own a request's output: tokens as columns, other events with their position among them."""

    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # what each token made readable
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # as many as ids, or none
    tail: str = ""  # text that the end set free after its token had been taken
    marks: list[tuple[int, Mark]] = field(default_factory=list)  # (tokens before it, event)
    end: Finished | BatonError | None = None
    _measured_bytes: int = 0
    _num_measured: int = 0  # tokens
    _readers: list[OutputReader] = field(default_factory=list)
    _lingering: asyncio.TimerHandle | None = None

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    @property
    def num_bytes(self) -> int:
        """Return about what it takes in memory, as of the last `measure`."""
        return self._measured_bytes + _MARK_BYTES * (1 + len(self.marks))

    def measure(self, max_unread_bytes: int) -> None:
        """Count what is new, and cut off readers that have left more than that unread."""
        since, num_tokens = self._num_measured, len(self.ids)
        logprobs = self.logprobs[since:]
        on_wire = sum(one.ByteSize() for one in logprobs)
        self._measured_bytes += (
            _TOKEN_BYTES * (num_tokens - since)
            + sum(map(len, self.texts[since:]))
            + _LOGPROBS_BYTES * len(logprobs)
            + _LOGPROBS_FACTOR * on_wire
        )
        self._num_measured = num_tokens
        for reader in list(self._readers):
            if reader.num_unread * self._measured_bytes > max_unread_bytes * num_tokens:
                reader.cut_off()

    def mark(self, event: Mark) -> None:
        """Readers get it with the next token, or `LINGER_S` later: a message of its own would cost
        as much as a token's."""
        self.marks.append((len(self.ids), event))
        if self._lingering is None and self._readers:
            loop = asyncio.get_running_loop()
            self._lingering = loop.call_later(LINGER_S, self._wake_late)

    def close(self, end: Finished | BatonError) -> None:
        assert self.end is None, f"ended twice: {self.end}, then {end}"
        self.end = end
        self.wake()

    def reader(self, from_index: int) -> OutputReader:
        reader = OutputReader(self, from_index)
        self._readers.append(reader)
        return reader

    def remove(self, reader: OutputReader) -> None:
        """Remove a reader, unless it was removed before."""
        reader.on_cut_off = _nobody_waits
        if reader in self._readers:
            self._readers.remove(reader)

    def drop(self) -> None:
        """Free the output, which nobody can read any more."""
        self.ids, self.texts, self.logprobs, self.marks = [], [], [], []

    def _wake_late(self) -> None:
        self._lingering = None
        self.wake()

    def wake(self) -> None:
        for reader in self._readers:
            reader.on_news()


class OutputReader:
    """One client's position: it gets every token from `from_index` on, once and in order."""

    def __init__(self, log: OutputLog, from_index: int) -> None:
        self._log = log
        self._from_index = self._index = self._num_seen = from_index
        self._num_before = len(log.ids)  # when it came
        self._next_mark = 0
        self._tail_taken = False
        self.on_news: Callable[[], None] = _nobody_waits
        """Called when there may be news: maybe none, also after the end. May not call the log's
        owner."""
        self.on_cut_off: Callable[[], None] = _nobody_waits

    async def take(self) -> list[Event]:
        """Return what is new, at least one event, neighbouring tokens as one run; empty at the end.

        Raises the BatonError the request ended with, after everything before it was taken.
        """
        while (events := self.take_now()) == []:
            coming = asyncio.get_running_loop().create_future()
            self.on_news = partial(_set, coming)
            await coming
        return events or []

    def take_now(self) -> list[Event] | None:
        """Return what is new, if anything is; None after the end. Raises as `take`."""
        events = self._take_now()
        if events:
            return events
        end = self._log.end
        if isinstance(end, BatonError):
            raise end
        if end is None:
            return []
        if self._tail_taken:
            return None
        self._tail_taken = True
        tail = self._log.tail
        return [TokenRun(len(self._log.ids), (), tail, ()), end] if tail else [end]

    def take_seen(self) -> str:
        """Return the text of the tokens before its first one; a second time, none."""
        num_seen, self._num_seen = self._num_seen, 0
        return "".join(self._log.texts[:num_seen])

    @property
    def num_unread(self) -> int:
        """Count the tokens that it has yet to take."""
        return len(self._log.ids) - max(self._index, self._num_before)

    def cut_off(self) -> None:
        """Let go of the output: all that is left to take is an error."""
        asyncio.get_running_loop().call_soon(self.on_cut_off)
        error = OverloadedError("the client left too much of the output unread")
        self._log, self._index, self._next_mark = OutputLog(end=error), 0, 0

    @property
    def has_more(self) -> bool:
        """Tell whether there is something to take although nothing new came: the end."""
        return self._log.end is not None

    def _take_now(self) -> list[Event]:
        log, events = self._log, list[Event]()
        while True:
            marks = log.marks
            if self._next_mark < len(marks) and marks[self._next_mark][0] <= self._index:
                position, mark = marks[self._next_mark]
                self._next_mark += 1
                if position >= self._from_index or isinstance(mark, router_pb2.Routed):
                    events.append(mark)
                continue
            stop = marks[self._next_mark][0] if self._next_mark < len(marks) else len(log.ids)
            if self._index >= stop:
                return events
            events.append(self._run(stop))

    def _run(self, stop: int) -> TokenRun:
        log, start = self._log, self._index
        self._index = stop
        text = "".join(log.texts[start:stop])
        return TokenRun(start, log.ids[start:stop], text, log.logprobs[start:stop])


def _nobody_waits() -> None:
    pass


def _set(coming: asyncio.Future[None]) -> None:
    if not coming.done():
        coming.set_result(None)


def sendable_logprobs(
    known: Sequence[TokenLogprobs], spec: worker_pb2.RequestSpec, max_message_bytes: int
) -> Sequence[TokenLogprobs]:
    """Return the log-probabilities of all tokens so far; none if they could make the message to
    the worker too large: that would break the session for all its requests."""
    num_bytes = spec.ByteSize() + sum(one.ByteSize() for one in known)
    return known if num_bytes <= min(max_message_bytes, WORKER_MESSAGE_BYTES) // 2 else ()
