"""The attempt's state machine against a model of its workers, in virtual time.

`World` carries out effects as `Attempt` and `RequestRun` do, on counters in place of workers. Any
event that the failure table names may come next. Whatever the order: each token comes out once and
in order, at most one attempt is alive with one booking, every wait has a limit, and the end leaves
nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.config.router import RouterConfig
from baton.errors import BatonError, DeadlineError, ShuttingDownError
from router.fleet.fleet import WorkerEntry
from router.request import machine
from router.request.failure import Failed, Failure
from router.request.machine import Do, Event, Outcome, Phase, Prefill, Signal, State, Stop, Stream
from tests.router.fleets import entry_of, two_and_two

CONFIG = RouterConfig()
NUM_TOKENS = 5
DEADLINE_S = 5000.0
ENDED_BY_WORKER = (Failure.DECODE_FAILED, Failure.GIVEN_UP, Failure.STALE)
ENDED_FROM_OUTSIDE = {
    Stop.ABORTED: Outcome.ABORTED,
    Stop.LEFT: Outcome.ABORTED,
    Stop.ORPHANED: ShuttingDownError("it goes", has_begun=True),
}
REJECTIONS = (Failure.NO_CAPACITY, Failure.DRAINING, Failure.HANDOFF_FAILED, Failure.REJECTED)


def workers() -> tuple[WorkerEntry, WorkerEntry]:
    fleet = two_and_two(ManualClock(0.0))
    return entry_of(fleet, "d0"), entry_of(fleet, "p0")


@dataclass
class World:
    """One request, its workers and its timers."""

    decode: WorkerEntry
    writer: WorkerEntry
    now_s: float = 0.0
    state: State = field(init=False)  # of its newest attempt
    num_emitted: int = 0
    num_computed: int = 0  # by the attempt's decode worker, from the request's first token on
    first_index: int = 0
    has_lease: bool = False
    is_admitted: bool = False
    is_in_line: bool = False
    is_searching: bool = False
    is_attempting: bool = False
    is_attaching: bool = False
    is_prefilling: bool = False
    early: int | None = None  # tokens up to here wait for those before them
    silent_at_s: float = math.inf
    timer_at_s: float = math.inf
    end: object = None
    num_attempts: int = 0
    events: list[tuple[Event, int]] = field(default_factory=list)

    # --- as RequestRun and Attempt do -----------------------------------------------------------

    def begin(self, is_sought: bool) -> None:
        self.state = State(Phase.OVER, self.decode)
        self.is_searching, self.is_in_line = is_sought, not is_sought

    def feed(self, event: Event, tokens_to: int = 0) -> None:
        """`tokens_to`: the output index after the last token that comes with the event."""
        self.events.append((event, tokens_to))
        while self.events:
            event, tokens_to = self.events.pop(0)
            self.state, effects = machine.transition(self.state, event, self.now_s, CONFIG)
            self._carry_out(effects, tokens_to)
            if not self.events and self.early is not None and self.is_attempting:
                early, self.early = self.early, None
                self._tokens(self.num_emitted, early)
        self.check()

    def _carry_out(self, effects: tuple[machine.Effect, ...], tokens_to: int) -> None:
        for effect in effects:
            assert self.end is None, f"{effect} after the end"
            match effect:
                case machine.Expect(limit_s=limit_s, workers=named):
                    assert self.is_attempting, effect
                    assert all(isinstance(worker, WorkerEntry) for worker in named)
                    self.silent_at_s = self.now_s + (20.0 if limit_s is None else limit_s)
                case machine.SetTimer(at_s):
                    self.timer_at_s = at_s
                case machine.AskPrefill():
                    assert not self.is_prefilling, "a lease is written once"
                    self.is_prefilling = True
                case machine.End(how):
                    assert self.is_attempting
                    self.is_attempting = self.is_attaching = self.is_prefilling = False
                    self.silent_at_s = self.timer_at_s = math.inf
                    self.early = None
                    self._over(how)
                case Do():
                    self._do(effect, tokens_to)

    def _do(self, effect: Do, tokens_to: int) -> None:
        match effect:
            case Do.EMIT:
                assert self.is_attempting
                self._emit(tokens_to)
            case Do.KEEP_EARLY:
                self.early = max(tokens_to, self.early or 0)
            case Do.ATTACH:
                assert self.is_attempting
                self.is_attaching = True
            case _:
                pass

    def _begin_attempt(self, phase: Phase, writer: WorkerEntry | None = None) -> None:
        assert not self.is_attempting, "two attempts at once"
        self.is_attempting, self.num_attempts = True, self.num_attempts + 1
        self.first_index = self.num_computed = self.num_emitted
        self.has_lease = self.is_admitted = phase is Phase.DECODING
        is_attached = phase is not Phase.RESERVING
        self.state = State(phase, self.decode, writer, is_attached=is_attached)
        self.silent_at_s = self.now_s + 20.0

    def _emit(self, tokens_to: int) -> None:
        if tokens_to > self.num_emitted:
            self.num_emitted = tokens_to
        assert self.num_emitted <= NUM_TOKENS
        if self.num_emitted == NUM_TOKENS:
            self.events.append((Signal.COMPLETE, 0))

    def _over(self, how: machine.HowOver) -> None:
        if not isinstance(how, Failed):
            self.end = how
        elif how.failure is Failure.MOVED or self.num_attempts >= 4:
            self.end = BatonError(how.message)
        elif self.num_attempts % 2:
            self.timer_at_s = self.now_s + 0.05
        else:
            self.is_in_line = True

    def _tokens(self, start: int, end: int) -> None:
        event = machine.Tokens(
            leaves_gap=start > self.num_emitted,
            is_own=end > self.first_index,
            has_news=end > self.num_emitted,
            finishes=end == NUM_TOKENS,
        )
        self.events.append((event, end))

    def check(self) -> None:
        if self.end is not None:
            assert self.state.phase is Phase.OVER
            held = (self.is_in_line, self.is_searching, self.is_attempting, self.is_prefilling)
            assert not any(held), held
            return
        waits = (self.is_in_line, self.is_searching, self.is_attempting)
        assert sum(waits) <= 1, waits
        if not any(waits):
            assert self.timer_at_s < math.inf, f"{self.state}: nothing ends its wait"
        if self.state.has_moved:
            assert self.is_prefilling, "nobody needs it any more"
        if self.is_attempting and self.state.rejected is not None:
            assert self.timer_at_s < math.inf, "its first token is waited for without a limit"
        if self.is_attempting and self.state.stream is not Stream.MOVED:
            is_limited = min(self.silent_at_s, self.timer_at_s) < math.inf or self.is_attaching
            assert is_limited, f"{self.state}: silence has no limit"

    # --- what may come next --------------------------------------------------------------------

    def failed(self, failure: Failure, of_writer: bool = False) -> Failed:
        return Failed(failure, self.writer if of_writer else self.decode, failure.value)

    def possible(self) -> list[str]:
        """Of its workers; else time passes."""
        names = ["time passes"]
        if self.is_searching:
            names += ["found", "found running", "not found", "refused"]
        if self.is_in_line:
            names += ["placed", "placed locally", "refused"]
        if not self.is_attempting:
            return names
        state = self.state
        if self.is_prefilling:
            names += ["first token", "prefill failed", "lease refused"]
            if self.num_emitted > self.first_index:
                names.append("handed off")
        if state.stream is Stream.OPEN:
            names += ["link lost", "moved", "ended by its worker"]
            names += ["reserved without a lease"] if not self.has_lease else []
            names += ["reserved", "rejected"] if not self.is_admitted else []
            if self.has_lease:
                names += ["admitted", "token", "two tokens"]
        elif state.stream is Stream.DETACHED:
            names += ["link lost", "attached", "not attached", "taken over"]
        return names

    def happen(self, name: str, draw: st.DataObject) -> None:
        match name:
            case "time passes":
                self.pass_time()
            case "found" | "found running":
                self.is_searching = False
                self._begin_attempt(Phase.PREFILLING if name == "found" else Phase.DECODING)
            case "not found":
                self.is_searching, self.is_in_line = False, True
            case "refused":
                self.is_searching = self.is_in_line = False
                self.end = BatonError("refused")
            case "placed" | "placed locally":
                self.is_in_line = False
                self._begin_attempt(Phase.RESERVING, self.writer if name == "placed" else None)
            case _:
                self._of_attempt(name, draw)

    def stop(self, why: Stop, end: Outcome | BatonError) -> None:
        if self.is_attempting:
            return self.feed(machine.Stopped(why, end))
        self.is_searching = self.is_in_line = False
        self.end = end

    def pass_time(self) -> None:
        """Until the next limit."""
        at_s = min(self.silent_at_s, self.timer_at_s, DEADLINE_S)
        self.now_s = max(self.now_s, at_s)
        if at_s == DEADLINE_S:
            self.stop(Stop.OVERRULED, DeadlineError("too late"))
        elif at_s == self.timer_at_s:
            self.timer_at_s = math.inf
            self.is_in_line = not self.is_attempting  # it had backed off
            self.feed(Signal.TIMER_FIRED)
        else:
            self.silent_at_s = math.inf
            self.feed(machine.AttemptFailed(self.failed(Failure.STUCK)))

    def _of_attempt(self, name: str, draw: st.DataObject) -> None:
        match name:
            case "reserved" | "reserved without a lease":
                self.has_lease = True
                is_local = name != "reserved"
                self.feed(machine.Reserved(not is_local, None if is_local else self.writer))
            case "rejected":
                self.feed(machine.Rejected(self.failed(draw.draw(st.sampled_from(REJECTIONS)))))
            case "first token":
                is_last = self.first_index + 1 == NUM_TOKENS
                self.is_prefilling &= not is_last
                self.feed(machine.FirstToken(finishes=is_last), self.first_index + 1)
            case "handed off":
                self.is_prefilling = False
                self.feed(Signal.HANDED_OFF)
            case "prefill failed":
                self.is_prefilling = False
                failed = self.failed(Failure.HANDOFF_FAILED, of_writer=True)
                self.feed(machine.PrefillFailed(failed))
            case "lease refused":
                self.is_prefilling = False
                self.feed(Signal.LEASE_REFUSED)
            case _:
                self._of_stream(name, draw)

    def _of_stream(self, name: str, draw: st.DataObject) -> None:
        match name:
            case "admitted":
                self.is_admitted = True
                self.feed(Signal.ADMITTED)
            case "token" | "two tokens":
                self._decode_worker_sends(1 if name == "token" else 2)
            case "moved" | "taken over":
                self.is_attaching = False
                self.feed(Signal.MOVED)
            case "link lost":
                self.feed(machine.LinkLost(self.failed(Failure.DECODE_LOST)))
            case "attached":  # with everything from the request's first token on
                self.is_attaching = False
                self.feed(Signal.ATTACHED)
                self._tokens(0, self.num_computed)
                self.feed(*self.events.pop())
            case "not attached":
                self.is_attaching = False
                self.feed(machine.AttemptFailed(self.failed(Failure.DECODE_LOST)))
            case "ended by its worker":
                failure = draw.draw(st.sampled_from(ENDED_BY_WORKER))
                self.feed(machine.AttemptFailed(self.failed(failure), is_over_there=True))

    def _decode_worker_sends(self, count: int) -> None:
        """Where the prompt was prefilled elsewhere, from the second token on."""
        start = self.num_computed
        if self.state.prefill is not Prefill.NOT_ASKED and start == self.first_index:
            start += 1
        end = min(start + count, NUM_TOKENS)
        if start < end:
            self.num_computed, self.is_admitted = end, True
            self._tokens(start, end)
            self.feed(*self.events.pop())


@settings(max_examples=250, deadline=None)
@given(st.data(), st.booleans())
def test_whatever_happens_a_request_ends_once_and_leaves_nothing(
    draw: st.DataObject, is_sought: bool
) -> None:
    world = World(*workers())
    world.begin(is_sought)
    for _ in range(draw.draw(st.integers(0, 40))):
        if world.end is not None:
            break
        if not draw.draw(st.integers(0, 15)):
            world.stop(*draw.draw(st.sampled_from(list(ENDED_FROM_OUTSIDE.items()))))
        else:
            world.happen(draw.draw(st.sampled_from(world.possible())), draw)
    for _ in range(100):  # and then nobody says anything any more
        if world.end is not None:
            break
        world.pass_time()
    assert world.end is not None
    if world.end is Outcome.COMPLETE:
        assert world.num_emitted == NUM_TOKENS


def test_a_request_that_nothing_befalls_runs_through_its_phases() -> None:
    world = World(*workers())
    world.begin(is_sought=False)
    seen = []
    for name in ("placed", "reserved", "first token", "handed off", "admitted"):
        world.happen(name, None)  # type: ignore[arg-type]
        seen.append(world.state.phase)
    while world.end is None:
        world.happen("token", None)  # type: ignore[arg-type]
    assert seen == [
        Phase.RESERVING,
        Phase.PREFILLING,
        Phase.HANDING_OVER,
        Phase.HANDING_OVER,
        Phase.DECODING,
    ]
    assert world.end is Outcome.COMPLETE
    assert world.num_emitted == NUM_TOKENS


def test_an_event_that_means_nothing_changes_nothing() -> None:
    ended, reserving = (State(phase, workers()[0]) for phase in (Phase.OVER, Phase.RESERVING))
    for event in (Signal.ADMITTED, Signal.TIMER_FIRED, Signal.HANDED_OFF, Signal.MOVED):
        assert machine.transition(ended, event, 0.0, CONFIG) == (ended, ())
    for event in (Signal.ATTACHED, Signal.TIMER_FIRED):
        assert machine.transition(reserving, event, 0.0, CONFIG) == (reserving, ())
