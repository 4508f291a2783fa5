"""One attempt as a state machine: `transition(state, event, now_s, config) -> (state, effects)`.

Pure: no clock, no task, no message. `Attempt` turns what happens into events and carries out the
effects, in order. Limits are of `router.timeouts`.

| phase        | waits for                            | silence limit           | then         |
| ------------ | ------------------------------------ | ----------------------- | ------------ |
| RESERVING    | Reserved or Rejected                 | `reserve_s`             | PREFILLING   |
| PREFILLING   | the first token                      | `first_token_s`         | HANDING_OVER |
| OVERTAKEN    | the first token; later ones are here | the same                | DECODING     |
| HANDING_OVER | the decode worker's first token      | `token_s`               | DECODING     |
| DECODING     | the next token                       | `token_s`               | TRAILING     |
| TRAILING     | the handoff's figures, after the end | `handoff_report_s`      | OVER         |
| OVER         | nothing                              |                         |              |

A prompt that its decode worker prefills goes from PREFILLING to DECODING. An attempt that is found
where it runs begins as PREFILLING or DECODING.
Two more things happen beside the phase:

- `Stream`, what its decode worker sends: OPEN; DETACHED while the link is lost and the worker may
  keep the request; MOVED when another router follows it; OVER when nothing more of it comes.
- `Prefill`, what its prefill worker was asked: NOT_ASKED, UNDER_WAY, OVER; TAKEN when it serves the
  lease for another router.

An attempt ends once (`End`), with its request or with what failed; nothing of it is held
afterwards. While a moved request's prefill is under way from here, failures wait: its new router
needs that prefill.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Literal

from baton.config.router import RouterConfig
from baton.errors import BatonError
from router.fleet.fleet import WorkerEntry
from router.request.failure import Failed, Failure


class Phase(enum.Enum):
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    OVERTAKEN = "overtaken"
    HANDING_OVER = "handing over"
    DECODING = "decoding"
    TRAILING = "trailing"
    OVER = "over"


class Stream(enum.Enum):
    OPEN = "open"
    DETACHED = "detached"
    MOVED = "moved"
    OVER = "over"


class Prefill(enum.Enum):
    NOT_ASKED = "not asked"
    UNDER_WAY = "under way"
    OVER = "over"
    TAKEN = "taken"


_RUNNING = (Phase.OVERTAKEN, Phase.DECODING)  # the decode worker computes it
_BEFORE_FIRST = (Phase.RESERVING, Phase.PREFILLING, Phase.OVERTAKEN)  # token


@dataclass(frozen=True, slots=True)
class State:
    """`decode` and `writer`: where the attempt runs; no writer: none, or it is not known.
    `rejected`: its handoff failed, and its first token may yet be on its way."""

    phase: Phase
    decode: WorkerEntry
    writer: WorkerEntry | None = None
    stream: Stream = Stream.OPEN
    prefill: Prefill = Prefill.NOT_ASKED
    rejected: Failed | None = None
    is_attached: bool = False
    """Another router began it, and may have asked for its prefill."""

    @property
    def is_running(self) -> bool:
        return self.phase in _RUNNING

    @property
    def has_first_token(self) -> bool:
        return self.phase in (Phase.HANDING_OVER, Phase.DECODING, Phase.TRAILING)

    @property
    def has_moved(self) -> bool:
        return self.phase is not Phase.OVER and self.stream is Stream.MOVED

    @property
    def is_over_there(self) -> bool:
        """Whether nothing of it is left at the decode worker for this router to end."""
        return self.stream in (Stream.MOVED, Stream.OVER)


# --- events ---------------------------------------------------------------------------------------


class Signal(enum.Enum):
    """Events without a value."""

    ADMITTED = "the decode worker has the KV and runs the request"
    HANDED_OFF = "the prefill worker's call ended: the receiver has the prompt's KV"
    LEASE_REFUSED = "it is served already, fenced or over: the decode worker reports how it ends"
    COMPLETE = "the request is over with what was emitted"
    MOVED = "another router follows the request"
    ATTACHED = "the worker goes on with the attempt on the next link"
    TIMER_FIRED = "the one that `SetTimer` set"


@dataclass(frozen=True, slots=True)
class Reserved:
    """`has_lease`: the prompt's KV is to come from `writer`. No writer: it is not known here."""

    has_lease: bool
    writer: WorkerEntry | None


@dataclass(frozen=True, slots=True)
class Rejected:
    failed: Failed


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Of the prefill worker. `finishes`: no other follows it."""

    finishes: bool


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """Nothing will be handed off. `failed` names the writer, or the receiver that was lost."""

    failed: Failed


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of the decode worker. `leaves_gap`: earlier ones are missing. `is_own`: some are
    beyond those that the attempt began with. `has_news`: some were not emitted yet."""

    leaves_gap: bool
    is_own: bool
    has_news: bool
    finishes: bool


@dataclass(frozen=True, slots=True)
class LinkLost:
    """`failed`: what the loss means if the request cannot be attached again."""

    failed: Failed


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """Anything else that ends an attempt: silence, no answer to Attach, its end by the worker.
    `is_over_there`: the decode worker has ended it."""

    failed: Failed
    is_over_there: bool = False


class Outcome(enum.Enum):
    COMPLETE = "complete"
    ABORTED = "aborted"


HowOver = Outcome | BatonError | Failed
"""How an attempt ends: with its request, or with what failed."""


class Stop(enum.Enum):
    """Why a request ends from outside."""

    ABORTED = "by its client"
    LEFT = "its last client has gone"
    ORPHANED = "the router goes: it continues at its decode worker for another one"
    OVERRULED = "its deadline has passed, or its model is served no more"


@dataclass(frozen=True, slots=True)
class Stopped:
    why: Stop
    end: Outcome | BatonError


Event = (
    Signal
    | Reserved
    | Rejected
    | FirstToken
    | PrefillFailed
    | Tokens
    | LinkLost
    | AttemptFailed
    | Stopped
)
OfPrefill = FirstToken | PrefillFailed | Literal[Signal.HANDED_OFF, Signal.LEASE_REFUSED]


# --- effects --------------------------------------------------------------------------------------


class Do(enum.Enum):
    """Effects without a value. Those about tokens and figures are of the event's message."""

    NOTE_RESERVED = "the decode worker has room"
    NOTE_FIRST = "the prompt is computed"
    NOTE_HANDED_OFF = "figures of the handoff"
    EMIT = "put out the tokens"
    KEEP_EARLY = "keep the tokens for those before them"
    ATTACH = "attach the attempt again on the worker's next link"
    CANCEL_EVERYWHERE = "abort the request at every decode worker"


@dataclass(frozen=True, slots=True)
class AskPrefill:
    """Send it the lease of the event's message."""

    writer: WorkerEntry


@dataclass(frozen=True, slots=True)
class Expect:
    """Limit the silence of these workers, from now. `limit_s` None: as long as the prompt is
    predicted to take there, and `timeouts.first_token_s`."""

    what: str
    limit_s: float | None
    workers: tuple[WorkerEntry, ...]


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Set the timer, in place of the one before."""

    at_s: float


@dataclass(frozen=True, slots=True)
class End:
    """Leave nothing of the attempt here, and release its booking. `cancels`: nor at its decode
    worker."""

    how: HowOver
    cancels: bool


Effect = Do | AskPrefill | Expect | SetTimer | End
Step = tuple[State, tuple[Effect, ...]]


# --- the machine ----------------------------------------------------------------------------------


def transition(state: State, event: Event, now_s: float, config: RouterConfig) -> Step:
    """Return what follows from an event. One that means nothing in this state changes nothing."""
    match event:
        case _ if state.phase is Phase.OVER:
            return state, ()
        case Stopped():
            return _stopped(state, event)
        case FirstToken() | PrefillFailed() | Signal.HANDED_OFF | Signal.LEASE_REFUSED:
            return _of_prefill_worker(state, event, config)
        case Signal.TIMER_FIRED if state.phase is Phase.TRAILING:
            return _end(state, Outcome.COMPLETE)
        case _ if state.phase is Phase.TRAILING:
            return state, ()
        case Signal.TIMER_FIRED if state.rejected is not None:
            return _fail_rejected(state, state.rejected)
    return _of_stream(state, event, now_s, config)


def _stopped(state: State, event: Stopped) -> Step:
    if state.phase is Phase.TRAILING:  # its output is complete
        return (state, ()) if event.why is Stop.OVERRULED else _end(state, Outcome.COMPLETE)
    before: tuple[Effect, ...] = ()
    if state.has_moved:
        if event.why is Stop.LEFT:
            return state, ()  # its new router may need the prefill that is under way from here
        if event.why is Stop.ABORTED:
            before = (Do.CANCEL_EVERYWHERE,)
    state, effects = _end(state, event.end, cancels=event.why is not Stop.ORPHANED)
    return state, before + effects


def _of_stream(state: State, event: Event, now_s: float, config: RouterConfig) -> Step:
    match event:
        case Signal.COMPLETE:
            if state.is_running and state.prefill is Prefill.UNDER_WAY:
                trailing = replace(state, phase=Phase.TRAILING, rejected=None)
                return trailing, (SetTimer(now_s + config.timeouts.handoff_report_s),)
            return _end(state, Outcome.COMPLETE)
        case Signal.MOVED:
            return _fail(replace(state, stream=Stream.MOVED), _moved(state.decode))
        case LinkLost(failed) if not state.is_over_there:
            if state.phase is Phase.RESERVING:  # a lost answer to Reserve does not come again
                return _fail(state, failed)
            return replace(state, stream=Stream.DETACHED), (Do.ATTACH,)
        case Signal.ATTACHED if state.stream is Stream.DETACHED:
            return replace(state, stream=Stream.OPEN), ()
        case AttemptFailed(failed, is_over_there):
            return _fail(replace(state, stream=Stream.OVER) if is_over_there else state, failed)
    return _of_decode_worker(state, event, now_s, config)


def _of_decode_worker(state: State, event: Event, now_s: float, config: RouterConfig) -> Step:
    match event:
        case Reserved():
            return _reserved(state, event)
        case Rejected(failed):
            state = replace(state, stream=Stream.OVER)
            if failed.failure is Failure.HANDOFF_FAILED and state.phase in _BEFORE_FIRST:
                # A writer gives up when its first token ends the request, or another router
                # cancels it: that token, or its refusal to serve again, may be on its way.
                at_s = now_s + config.timeouts.handoff_report_s
                return replace(state, rejected=failed), (SetTimer(at_s),)
            return _fail_rejected(state, failed)
        case Signal.ADMITTED if state.phase in _BEFORE_FIRST:
            return replace(state, phase=Phase.OVERTAKEN), ()
        case Signal.ADMITTED:
            expect = Expect("a token", config.timeouts.token_s, (state.decode,))
            return replace(state, phase=Phase.DECODING), (expect,)
        case Tokens():
            return _tokens(state, event, config)
    return state, ()


def _reserved(state: State, event: Reserved) -> Step:
    if state.phase not in (Phase.RESERVING, Phase.PREFILLING):
        return state, ()
    if state.prefill is not Prefill.NOT_ASKED:
        return state, ()
    effects: list[Effect] = []
    if not event.has_lease:
        effects.append(Expect("a first token", None, (state.decode,)))
    elif event.writer is not None:
        state = replace(state, writer=event.writer, prefill=Prefill.UNDER_WAY)
        effects += [Expect("a first token", None, (event.writer,)), AskPrefill(event.writer)]
    # Else the first router has asked it: the lease gives the time to wait.
    if state.phase is Phase.RESERVING:  # noted once the prefill has been asked for
        effects.append(Do.NOTE_RESERVED)
    return replace(state, phase=Phase.PREFILLING), tuple(effects)


def _tokens(state: State, event: Tokens, config: RouterConfig) -> Step:
    if event.leaves_gap:
        phase = Phase.OVERTAKEN if state.phase in _BEFORE_FIRST else Phase.DECODING
        return replace(state, phase=phase), (Do.KEEP_EARLY,)
    effects: list[Effect] = []
    if event.finishes:
        state = replace(state, stream=Stream.OVER)
    if event.is_own:
        if state.phase in _BEFORE_FIRST:
            effects.append(Do.NOTE_FIRST)
        state = replace(state, phase=Phase.DECODING)
    if event.has_news:
        effects.append(Expect("a token", config.timeouts.token_s, (state.decode,)))
    effects.append(Do.EMIT)
    return state, tuple(effects)


def _of_prefill_worker(state: State, event: OfPrefill, config: RouterConfig) -> Step:
    if isinstance(event, FirstToken):
        return _first_token(state, event.finishes, config)
    # A lease of this router's own is refused when its writer came too late for it.
    is_taken = event is Signal.LEASE_REFUSED and state.is_attached
    state = replace(state, prefill=Prefill.TAKEN if is_taken else Prefill.OVER)
    effects: tuple[Effect, ...] = (Do.NOTE_HANDED_OFF,) if event is Signal.HANDED_OFF else ()
    if state.phase is Phase.TRAILING:
        state, more = _end(state, Outcome.COMPLETE)
    elif state.stream is Stream.MOVED:
        state, more = _fail(state, _moved(state.decode))
    else:
        state, more = _prefill_over(state, event, config)
    return state, effects + more


def _prefill_over(state: State, event: OfPrefill, config: RouterConfig) -> Step:
    """Return what it means for an attempt that goes on. Once the decode worker has taken over, a
    failure does not matter, unless the first token is lost."""
    if isinstance(event, PrefillFailed):
        return (state, ()) if state.phase is Phase.DECODING else _fail(state, event.failed)
    if state.is_running:
        return state, ()
    if event is Signal.HANDED_OFF:
        expect = Expect("the handed-off request", config.timeouts.token_s, (state.decode,))
    else:  # the lease gives the time to wait
        expect = Expect("a token", config.timeouts.max_s, (state.decode,))
    return state, (expect,)


def _first_token(state: State, finishes: bool, config: RouterConfig) -> Step:
    was_running, effects = state.is_running, list[Effect]()
    if finishes:
        state = replace(state, prefill=Prefill.OVER)
        if state.stream is not Stream.MOVED:
            state = replace(state, stream=Stream.OVER)  # its writer informs the decode worker
    if state.phase is Phase.TRAILING:
        return _end(state, Outcome.COMPLETE) if finishes else (state, ())
    if state.phase in _BEFORE_FIRST:
        effects.append(Do.NOTE_FIRST)
        phase = Phase.DECODING if was_running else Phase.HANDING_OVER
        state = replace(state, phase=phase)
    if was_running:
        effects.append(Expect("a token", config.timeouts.token_s, (state.decode,)))
    else:  # it hangs at the writer, or at the receiver that does not acknowledge
        workers = (state.writer or state.decode, state.decode)
        effects.append(Expect("the end of the handoff", config.timeouts.token_s, workers))
    return state, (*effects, Do.EMIT)


def _fail_rejected(state: State, failed: Failed) -> Step:
    if failed.failure is Failure.HANDOFF_FAILED:
        if state.writer is None or state.prefill is Prefill.TAKEN:
            failed = replace(failed, failure=Failure.WRITER_UNKNOWN)
        failed = replace(failed, worker=state.writer or state.decode)
    return _fail(state, failed)


def _moved(decode: WorkerEntry) -> Failed:
    return Failed(Failure.MOVED, decode, "another router attached it")


def _fail(state: State, failed: Failed) -> Step:
    if state.stream is Stream.MOVED:
        if state.prefill is Prefill.UNDER_WAY:
            return state, ()  # another router needs the prefill that is under way from here
        failed = replace(failed, failure=Failure.MOVED)
    return _end(state, replace(failed, was_running=state.is_running))


def _end(state: State, how: HowOver, cancels: bool = True) -> Step:
    end = End(how, cancels and not state.is_over_there)
    return replace(state, phase=Phase.OVER), (end,)
