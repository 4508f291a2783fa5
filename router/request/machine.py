"""One request as a state machine: `transition(state, event, now_s, config) -> (state, effects)`.

Pure: no clock, no task, no message. `RequestRun` turns what happens into events and carries out
the effects, in order. Limits are of `router.timeouts`.

| phase        | waits for                            | silence limit           | then         |
| ------------ | ------------------------------------ | ----------------------- | ------------ |
| SOUGHT       | the decode workers' answers          | `attach_s`              | QUEUED       |
| QUEUED       | a placement                          | its deadline            | RESERVING    |
| RESERVING    | Reserved or Rejected                 | `reserve_s`             | PREFILLING   |
| PREFILLING   | the first token                      | `first_token_s`         | HANDING_OVER |
| OVERTAKEN    | the first token; later ones are here | the same                | DECODING     |
| HANDING_OVER | the decode worker's first token      | `token_s`               | DECODING     |
| DECODING     | the next token                       | `token_s`               | TRAILING     |
| TRAILING     | the handoff's figures, after the end | `handoff_report_s`      | ENDED        |
| FAILED       | the verdict on a failed attempt      | none: it comes at once  | BACKING_OFF  |
| BACKING_OFF  | a timer                              | `retries.backoff_s`     | QUEUED       |
| ENDED        | nothing                              |                         |              |

A prompt that its decode worker prefills goes from PREFILLING to DECODING. A request that is found
where it runs goes on as PREFILLING or DECODING, one that is found nowhere is QUEUED. After a
failure it is QUEUED at once, or backs off, or ends.
Two more things happen beside the phase of an attempt:

- `Stream`, what its decode worker sends: OPEN; DETACHED while the link is lost and the worker may
  keep the request; MOVED when another router follows it; OVER when nothing more of it comes.
- `Prefill`, what its prefill worker was asked: NOT_ASKED, UNDER_WAY, OVER; TAKEN when it serves the
  lease for another router.

Any failure of an attempt ends it (`EndAttempt`), and is judged (`Judge`). While a moved request's
prefill is under way from here, failures wait: its new router needs that prefill. A request ends
once (`End`); nothing of it is held afterwards.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from baton.config.router import RouterConfig
from baton.errors import BatonError
from router.fleet.fleet import WorkerEntry
from router.request.failure import Failed, Failure


class Phase(enum.Enum):
    SOUGHT = "sought"
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    OVERTAKEN = "overtaken"
    HANDING_OVER = "handing over"
    DECODING = "decoding"
    TRAILING = "trailing"
    FAILED = "failed"
    BACKING_OFF = "backing off"
    ENDED = "ended"


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
_FOLLOWED = (Phase.PREFILLING, Phase.OVERTAKEN, Phase.HANDING_OVER, Phase.DECODING)
_ATTEMPT = (Phase.RESERVING, *_FOLLOWED)
"""An attempt is under way."""


@dataclass(frozen=True, slots=True)
class State:
    """`decode` and `writer`: where the attempt runs; no writer: none, or it is not known.
    `rejected`: its handoff failed, and its first token may yet be on its way."""

    phase: Phase
    stream: Stream = Stream.OPEN
    prefill: Prefill = Prefill.NOT_ASKED
    decode: WorkerEntry | None = None
    writer: WorkerEntry | None = None
    rejected: Failed | None = None

    @property
    def at(self) -> WorkerEntry:
        """The decode worker of the attempt that is under way."""
        assert self.decode is not None
        return self.decode

    @property
    def is_running(self) -> bool:
        return self.phase in _RUNNING

    @property
    def has_first_token(self) -> bool:
        return self.phase in (Phase.HANDING_OVER, Phase.DECODING, Phase.TRAILING)

    @property
    def has_moved(self) -> bool:
        return self.phase in (*_ATTEMPT, Phase.TRAILING) and self.stream is Stream.MOVED

    @property
    def is_over_there(self) -> bool:
        """Nothing of the attempt is left at the decode worker for this router to end."""
        return self.stream in (Stream.MOVED, Stream.OVER)


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """The search found the request at a decode worker. `is_running`: with tokens of its own."""

    decode: WorkerEntry
    is_running: bool


@dataclass(frozen=True, slots=True)
class NotFound:
    """It is nowhere, and can run again."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Search or line: the request ends with this error."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class Placed:
    """No `writer`: the decode worker prefills."""

    decode: WorkerEntry
    writer: WorkerEntry | None


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
class HandedOff:
    """The receiver has the prompt's KV."""


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """Nothing will be handed off. `failed` names the writer, or the receiver that was lost."""

    failed: Failed


@dataclass(frozen=True, slots=True)
class LeaseRefused:
    """The lease is served already, fenced or over: the decode worker reports how it ends.
    `taken`: it may be served for another router."""

    taken: bool


@dataclass(frozen=True, slots=True)
class Admitted:
    """The decode worker has the KV and runs the request."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of the decode worker. `leaves_gap`: earlier ones are missing. `is_own`: some are
    beyond those that the attempt began with. `has_news`: some were not emitted yet."""

    leaves_gap: bool
    is_own: bool
    has_news: bool
    finishes: bool


@dataclass(frozen=True, slots=True)
class Complete:
    """The request is over with what was emitted."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Another router follows the request."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """`failed`: what the loss means if the request cannot be attached again."""

    failed: Failed


@dataclass(frozen=True, slots=True)
class Attached:
    """The worker goes on with the attempt on the next link."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """Anything else that ends an attempt: silence, no answer to Attach, its end by the worker.
    `is_over_there`: the decode worker has ended it."""

    failed: Failed
    is_over_there: bool = False


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The one that `SetTimer` set."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """On a failed attempt: how long to wait before the next, or the request's end."""

    wait_s: float = 0.0
    error: BatonError | None = None


@dataclass(frozen=True, slots=True)
class Aborted:
    """By its client, or because its last client has gone (`by_name` False)."""

    by_name: bool


@dataclass(frozen=True, slots=True)
class Orphaned:
    """The router goes: the request continues at its decode worker for another one."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class Overruled:
    """The deadline has passed, or its model is served no more: it ends with this error."""

    error: BatonError


Event = (
    Found
    | NotFound
    | Refused
    | Placed
    | Reserved
    | Rejected
    | FirstToken
    | HandedOff
    | PrefillFailed
    | LeaseRefused
    | Admitted
    | Tokens
    | Complete
    | Moved
    | LinkLost
    | Attached
    | AttemptFailed
    | TimerFired
    | Verdict
    | Aborted
    | Orphaned
    | Overruled
)


# --- effects --------------------------------------------------------------------------------------


class Do(enum.Enum):
    """Effects without a value. Those about tokens and figures are of the event's message."""

    SEARCH = "ask the decode workers for the request"
    STOP_SEARCH = "leave off"
    ENQUEUE = "take the position in line"
    LEAVE_LINE = "give it up"
    RESERVE = "listen, and send Reserve to the decode worker"
    ASK_PREFILL = "send the lease to the writer"
    NOTE_RESERVED = "the decode worker has room"
    NOTE_FIRST = "the prompt is computed"
    NOTE_HANDED_OFF = "figures of the handoff"
    EMIT = "put out the tokens"
    KEEP_EARLY = "keep the tokens for those before them"
    ATTACH = "attach the attempt again on the worker's next link"
    CANCEL_EVERYWHERE = "abort the request at every decode worker"


@dataclass(frozen=True, slots=True)
class Expect:
    """Limit the silence of these workers, from now. `limit_s` None: as long as the prompt is
    predicted to take there, and `timeouts.first_token_s`."""

    what: str
    limit_s: float | None
    workers: tuple[WorkerEntry, ...]


@dataclass(frozen=True, slots=True)
class SetTimer:
    """In place of the one before."""

    at_s: float


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """Leave nothing of it here, and release its booking. `cancels`: nor at its decode worker."""

    cancels: bool


@dataclass(frozen=True, slots=True)
class Judge:
    """Answered at once by `Verdict`. `was_running`: the decode worker computed it."""

    failed: Failed
    was_running: bool


class Outcome(enum.Enum):
    COMPLETE = "complete"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class End:
    how: Outcome | BatonError


Effect = Do | Expect | SetTimer | EndAttempt | Judge | End
Step = tuple[State, tuple[Effect, ...]]


# --- the machine ----------------------------------------------------------------------------------


def start(is_sought: bool) -> Step:
    """`is_sought`: another router may have begun the request."""
    if is_sought:
        return State(Phase.SOUGHT), (Do.SEARCH,)
    return State(Phase.QUEUED), (Do.ENQUEUE,)


def transition(state: State, event: Event, now_s: float, config: RouterConfig) -> Step:
    """What follows. An event that means nothing in this state changes nothing."""
    match event:
        case Aborted() | Orphaned() | Overruled():
            return _ended_from_outside(state, event)
        case Found() | NotFound() | Refused() | Placed() | Verdict():
            return _outside_attempts(state, event, now_s, config)
        case TimerFired():
            return _timer_fired(state)
        case FirstToken() | HandedOff() | PrefillFailed() | LeaseRefused():
            return _of_prefill_worker(state, event, config)
        case _ if state.phase in _ATTEMPT:
            return _of_attempt(state, event, now_s, config)
    return state, ()


def _ended_from_outside(state: State, event: Aborted | Orphaned | Overruled) -> Step:
    if state.phase is Phase.ENDED:
        return state, ()
    if state.phase is Phase.TRAILING:  # its output is complete
        return (state, ()) if isinstance(event, Overruled) else _finish(state)
    how: Outcome | BatonError = Outcome.ABORTED
    before: tuple[Effect, ...] = ()
    match event:
        case Aborted(by_name):
            if state.has_moved and not by_name:
                return state, ()  # its new router may need the prefill that is under way from here
            if state.has_moved or state.phase is Phase.SOUGHT:
                before = (Do.CANCEL_EVERYWHERE,)
        case Orphaned(error) | Overruled(error):
            how = error
    cancels = not isinstance(event, Orphaned) and not state.is_over_there
    match state.phase:
        case Phase.SOUGHT:
            leave: tuple[Effect, ...] = (Do.STOP_SEARCH,)
        case Phase.QUEUED:
            leave = (Do.LEAVE_LINE,)
        case Phase.BACKING_OFF | Phase.FAILED:
            leave = ()
        case _:
            leave = (EndAttempt(cancels),)
    return State(Phase.ENDED), (*before, *leave, End(how))


def _outside_attempts(
    state: State,
    event: Found | NotFound | Refused | Placed | Verdict,
    now_s: float,
    config: RouterConfig,
) -> Step:
    match state.phase, event:
        case Phase.SOUGHT, Found(decode, is_running):
            limit_s = config.timeouts.token_s if is_running else config.timeouts.max_s
            phase = Phase.DECODING if is_running else Phase.PREFILLING
            return State(phase, decode=decode), (Expect("a token", limit_s, (decode,)),)
        case Phase.SOUGHT, NotFound():
            return State(Phase.QUEUED), (Do.ENQUEUE,)
        case ((Phase.SOUGHT | Phase.QUEUED), Refused(error)):
            return State(Phase.ENDED), (End(error),)
        case Phase.QUEUED, Placed(decode, writer):
            expect = Expect("an answer to Reserve", config.timeouts.reserve_s, (decode,))
            return State(Phase.RESERVING, decode=decode, writer=writer), (expect, Do.RESERVE)
        case Phase.FAILED, Verdict(error=BatonError() as error):
            return State(Phase.ENDED), (End(error),)
        case Phase.FAILED, Verdict(wait_s) if wait_s > 0:
            return State(Phase.BACKING_OFF), (SetTimer(now_s + wait_s),)
        case Phase.FAILED, Verdict():
            return State(Phase.QUEUED), (Do.ENQUEUE,)
    return state, ()


def _timer_fired(state: State) -> Step:
    if state.phase is Phase.BACKING_OFF:
        return State(Phase.QUEUED), (Do.ENQUEUE,)
    if state.phase is Phase.TRAILING:
        return _finish(state)
    if state.rejected is not None and state.phase in _ATTEMPT:
        return _fail_rejected(state, state.rejected)
    return state, ()


def _of_attempt(state: State, event: Event, now_s: float, config: RouterConfig) -> Step:
    """While one is under way."""
    match event:
        case Complete():
            if state.is_running and state.prefill is Prefill.UNDER_WAY:
                trailing = replace(state, phase=Phase.TRAILING, rejected=None)
                return trailing, (SetTimer(now_s + config.timeouts.handoff_report_s),)
            return _finish(state)
        case Moved():
            return _fail(replace(state, stream=Stream.MOVED), _moved(state.at))
        case LinkLost(failed) if not state.is_over_there:
            if state.phase is Phase.RESERVING:  # a lost answer to Reserve does not come again
                return _fail(state, failed)
            return replace(state, stream=Stream.DETACHED), (Do.ATTACH,)
        case Attached() if state.stream is Stream.DETACHED:
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
        case Admitted():
            return _admitted(state, config)
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
        effects.append(Expect("a first token", None, (state.at,)))
    elif event.writer is not None:
        state = replace(state, writer=event.writer, prefill=Prefill.UNDER_WAY)
        effects += [Expect("a first token", None, (event.writer,)), Do.ASK_PREFILL]
    # Else the first router has asked it: the lease gives the time to wait.
    if state.phase is Phase.RESERVING:  # noted once the prefill has been asked for
        effects.append(Do.NOTE_RESERVED)
    return replace(state, phase=Phase.PREFILLING), tuple(effects)


def _admitted(state: State, config: RouterConfig) -> Step:
    if state.phase in _BEFORE_FIRST:
        return replace(state, phase=Phase.OVERTAKEN), ()
    expect = Expect("a token", config.timeouts.token_s, (state.at,))
    return replace(state, phase=Phase.DECODING), (expect,)


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
        effects.append(Expect("a token", config.timeouts.token_s, (state.at,)))
    effects.append(Do.EMIT)
    return state, tuple(effects)


def _of_prefill_worker(
    state: State,
    event: FirstToken | HandedOff | PrefillFailed | LeaseRefused,
    config: RouterConfig,
) -> Step:
    if state.phase not in (*_ATTEMPT, Phase.TRAILING):
        return state, ()
    if isinstance(event, FirstToken):
        return _first_token(state, event.finishes, config)
    is_taken = isinstance(event, LeaseRefused) and event.taken
    state = replace(state, prefill=Prefill.TAKEN if is_taken else Prefill.OVER)
    effects: tuple[Effect, ...] = (Do.NOTE_HANDED_OFF,) if isinstance(event, HandedOff) else ()
    if state.phase is Phase.TRAILING:
        state, more = _finish(state)
    elif state.stream is Stream.MOVED:
        state, more = _fail(state, _moved(state.at))
    else:
        state, more = _prefill_over(state, event, config)
    return state, effects + more


def _prefill_over(
    state: State, event: HandedOff | PrefillFailed | LeaseRefused, config: RouterConfig
) -> Step:
    """What it means for an attempt that goes on. Once the decode worker has taken over, a failure
    does not matter, unless the first token is lost."""
    if isinstance(event, PrefillFailed):
        return (state, ()) if state.phase is Phase.DECODING else _fail(state, event.failed)
    if state.is_running:
        return state, ()
    if isinstance(event, HandedOff):
        expect = Expect("the handed-off request", config.timeouts.token_s, (state.at,))
    else:  # the lease gives the time to wait
        expect = Expect("a token", config.timeouts.max_s, (state.at,))
    return state, (expect,)


def _first_token(state: State, finishes: bool, config: RouterConfig) -> Step:
    was_running, effects = state.is_running, list[Effect]()
    if finishes:
        state = replace(state, prefill=Prefill.OVER)
        if state.stream is not Stream.MOVED:
            state = replace(state, stream=Stream.OVER)  # its writer informs the decode worker
    if state.phase is Phase.TRAILING:
        return _finish(state) if finishes else (state, ())
    if state.phase in _BEFORE_FIRST:
        effects.append(Do.NOTE_FIRST)
        phase = Phase.DECODING if was_running else Phase.HANDING_OVER
        state = replace(state, phase=phase)
    if was_running:
        effects.append(Expect("a token", config.timeouts.token_s, (state.at,)))
    else:  # it hangs at the writer, or at the receiver that does not acknowledge
        workers = (state.writer or state.at, state.at)
        effects.append(Expect("the end of the handoff", config.timeouts.token_s, workers))
    return state, (*effects, Do.EMIT)


def _fail_rejected(state: State, failed: Failed) -> Step:
    if failed.failure is Failure.HANDOFF_FAILED:
        if state.writer is None or state.prefill is Prefill.TAKEN:
            failed = replace(failed, failure=Failure.WRITER_UNKNOWN)
        failed = replace(failed, worker=state.writer or state.at)
    return _fail(state, failed)


def _moved(decode: WorkerEntry) -> Failed:
    return Failed(Failure.MOVED, decode, "another router attached it")


def _fail(state: State, failed: Failed) -> Step:
    if state.stream is Stream.MOVED:
        if state.prefill is Prefill.UNDER_WAY:
            return state, ()  # another router needs the prefill that is under way from here
        failed = replace(failed, failure=Failure.MOVED)
    end = EndAttempt(cancels=not state.is_over_there)
    return State(Phase.FAILED), (end, Judge(failed, state.is_running))


def _finish(state: State) -> Step:
    end = EndAttempt(cancels=not state.is_over_there)
    return State(Phase.ENDED), (end, End(Outcome.COMPLETE))
