"""The workers as this router knows them, and the load it has put on them.

`Fleet` owns a row (slot) per worker incarnation in `FleetArrays`, and every booking. A booking is
made when a request is placed and released exactly once: its prefill part with the first token, the
rest when the attempt ends.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NewType

import numpy as np

from baton.clock import NowS
from baton.config.router import LocalPrefill
from baton.fleet import WorkerState
from router.fleet.fleet_arrays import FleetArrays
from router.fleet.link_rates import LEARNING_RATE
from router.fleet.worker_facts import KvClass, WorkerFacts, WorkerKinds


@dataclass(frozen=True)
class RolesAway:
    """The roles that nobody serves now, but will again, as the registry reports them."""

    prefill: bool = False
    decode: bool = False

    def hold(self, local_prefill: LocalPrefill) -> bool:
        """Whether a request is to wait, up to its own deadline: a role that it cannot do without
        is away."""
        return self.decode or (local_prefill == "never" and self.prefill)


class RecentPeak:
    """Own what is needed of a figure's last `window_s`: the values from which it fell."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._fell_from: deque[tuple[float, int]] = deque()  # (when, value), values falling

    def falls(self, value: int, now_s: float) -> None:
        """The figure had this value until now."""
        while self._fell_from and self._fell_from[-1][1] <= value:
            self._fell_from.pop()
        self._fell_from.append((now_s, value))

    def over(self, value: int, now_s: float) -> int:
        """Return the highest that the figure has been; `value` is what it is now."""
        while self._fell_from and self._fell_from[0][0] < now_s - self._window_s:
            self._fell_from.popleft()
        return max(value, self._fell_from[0][1]) if self._fell_from else value


Slot = NewType("Slot", int)

# What a worker is taken for until the first report of its own.
DEFAULT_PREFILL_TOKENS_PER_S = 2000.0
DEFAULT_DECODE_STEP_S = 0.02
DEFAULT_HANDOFF_BYTES_PER_S = 2e9
REPORT_AGE_S = 2.0  # of a worker's figures at most: its heartbeat's and the registry's pace


@dataclass(frozen=True)
class ReportedLoad:
    """A worker's own figures; rates are 0 until it has learned them."""

    num_requests: int = 0
    num_queued_tokens: int = 0
    num_quarantined_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    handoff_bytes_per_s: float = 0.0


@dataclass(eq=False)
class WorkerEntry:
    """One worker's row, as kept by `Fleet`; read-only elsewhere."""

    slot: Slot
    facts: WorkerFacts
    state: WorkerState = WorkerState.STARTING
    state_since_s: float = 0.0
    ejected_until_s: float = 0.0
    connected: bool = False
    prefills: dict[int, int] = field(default_factory=dict)  # booking id -> tokens, oldest first
    decodes: dict[int, int] = field(default_factory=dict)  # booking id -> tokens of KV
    others_queued_tokens: int = 0  # not booked by this router, when the worker last reported
    others_requests: int = 0
    peak_requests: RecentPeak = field(default_factory=lambda: RecentPeak(REPORT_AGE_S))
    peak_queued_tokens: RecentPeak = field(default_factory=lambda: RecentPeak(REPORT_AGE_S))
    num_quarantined_blocks: int = 0

    @property
    def num_booked(self) -> int:
        return len(self.decodes.keys() | self.prefills.keys())

    @property
    def booked_queued_tokens(self) -> int:
        return sum(self.prefills.values())

    @property
    def usable(self) -> bool:
        return self.connected and self.state in (WorkerState.LIVE, WorkerState.UNLISTED)


@dataclass
class Booking:
    """Load put on a prefill worker (`prefill_slot`, for `prefill_tokens`) and a decode worker."""

    booking_id: int
    prefill: WorkerEntry
    decode: WorkerEntry
    prefill_tokens: int
    kv_tokens: int
    prefill_held: bool = True


class Fleet:
    """Own worker rows and bookings; everything here runs on the event loop."""

    def __init__(self, clock: NowS, on_change: Callable[[], None]) -> None:
        self._clock = clock
        self._on_change = on_change
        self._entries: dict[str, WorkerEntry] = {}
        self._by_slot: dict[Slot, WorkerEntry] = {}
        self._class_numbers: dict[KvClass, int] = {}  # no other class ever gets the number
        self._kinds: WorkerKinds | None = None  # of the workers that are here; None: not known
        self._booking_ids = itertools.count(1)
        self._bookings: dict[int, Booking] = {}
        self.arrays = FleetArrays(8)
        self.away = RolesAway()
        self.is_leaving = False
        """Its unit has left: no worker comes any more, whatever the registry last said."""

    # --- membership ----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[WorkerEntry]:
        return iter(list(self._entries.values()))

    def get(self, worker_id: str) -> WorkerEntry | None:
        return self._entries.get(worker_id)

    def at(self, slot: int) -> WorkerEntry:
        return self._by_slot[Slot(slot)]

    def slots_of(self, identities: Collection[tuple[str, int]]) -> frozenset[int]:
        """Return the slots of those workers that are still here."""
        here = (self._entries.get(worker_id) for worker_id, _ in identities)
        return frozenset(e.slot for e in here if e is not None and e.facts.identity in identities)

    @property
    def num_slots(self) -> int:
        return len(self.arrays.names)

    @property
    def kinds(self) -> WorkerKinds:
        """Cached: every request reads them, and they hardly ever change."""
        if self._kinds is None:
            facts = (entry.facts for entry in self._entries.values())
            self._kinds = WorkerKinds.of(facts, self._class_numbers)
        return self._kinds

    def add(self, facts: WorkerFacts) -> WorkerEntry:
        """Give a new worker a row. The caller removes an older incarnation first."""
        assert facts.worker_id not in self._entries, facts.worker_id
        slot = next(Slot(n) for n in itertools.count() if Slot(n) not in self._by_slot)
        if slot >= self.num_slots:
            self.arrays = self.arrays.grown()
        entry = WorkerEntry(slot, facts)
        self._entries[facts.worker_id] = self._by_slot[slot] = entry
        a = self.arrays
        a.names[slot] = facts.worker_id
        a.kv_class[slot] = self._class_numbers.setdefault(facts.kv_class, len(self._class_numbers))
        self._kinds = None
        a.can_prefill[slot] = facts.can_prefill
        a.can_decode[slot] = facts.can_decode
        a.kv_bytes_per_token[slot] = facts.kv_bytes_per_token
        a.max_running[slot] = max(1, facts.max_num_seqs)
        a.longest_request[slot] = facts.longest_request
        a.max_held_tokens[slot] = facts.max_held_tokens or np.inf
        a.prefill_tokens_per_s[slot] = DEFAULT_PREFILL_TOKENS_PER_S
        a.decode_step_s[slot] = DEFAULT_DECODE_STEP_S
        a.prefill_measured_s[slot] = a.decode_measured_s[slot] = -np.inf
        a.handoff_bytes_per_s[slot] = DEFAULT_HANDOFF_BYTES_PER_S
        a.hold_until_s[slot] = 0.0
        a.links.forget(slot)
        self._recount(entry)
        return entry

    def remove(self, entry: WorkerEntry) -> None:
        """The worker is gone; bookings on it die with it."""
        if self._entries.get(entry.facts.worker_id) is not entry:
            return
        del self._entries[entry.facts.worker_id]
        del self._by_slot[entry.slot]
        self._kinds = None
        entry.connected = False
        self.arrays.kv_class[entry.slot] = -1
        self.arrays.usable[entry.slot] = False
        self.arrays.names[entry.slot] = ""
        self._on_change()

    def set_state(self, entry: WorkerEntry, state: WorkerState) -> None:
        if state is not entry.state:
            entry.state, entry.state_since_s = state, self._clock()
        self._recount(entry)

    def set_roles(self, entry: WorkerEntry, prefills: bool, decodes: bool) -> None:
        """Set which new requests the worker gets, of those that it can serve. Others stay."""
        a, slot, facts = self.arrays, entry.slot, entry.facts
        roles = (prefills and facts.can_prefill, decodes and facts.can_decode)
        if (bool(a.can_prefill[slot]), bool(a.can_decode[slot])) != roles:
            a.can_prefill[slot], a.can_decode[slot] = roles
            self._on_change()

    def set_connected(self, entry: WorkerEntry, connected: bool) -> None:
        entry.connected = connected
        self._recount(entry)

    def hold(self, entry: WorkerEntry, seconds: float) -> None:
        """Place nothing on the worker for a while."""
        if self._is_here(entry):
            a = self.arrays
            a.hold_until_s[entry.slot] = max(a.hold_until_s[entry.slot], self._clock() + seconds)

    def eject(self, entry: WorkerEntry, seconds: float) -> None:
        """Hold a worker that failed a request, but never more than a third of its pool.

        Of two workers one may be held while the other serves. When that one fails too, both serve:
        nobody knows which of them is sick, and the sound one must not wait.
        """
        if not self._is_here(entry):
            return
        now, holds = self._clock(), self.arrays.hold_until_s
        pool = [
            peer
            for peer in self._entries.values()
            if peer.usable and peer.facts.can_decode == entry.facts.can_decode
        ]
        others = [peer for peer in pool if peer is not entry]
        held = [peer for peer in others if holds[peer.slot] > now]
        if len(held) + 1 <= max(len(pool) // 3, min(1, len(others))):
            entry.ejected_until_s = now + seconds
            holds[entry.slot] = max(holds[entry.slot], entry.ejected_until_s)
        elif len(pool) == 2:
            for peer in held:
                if holds[peer.slot] <= peer.ejected_until_s:  # not held for another reason
                    holds[peer.slot] = 0.0
                    self._on_change()

    # --- load ----------------------------------------------------------------------------------

    def report(self, entry: WorkerEntry, load: ReportedLoad) -> None:
        """Take in a worker's figures. What exceeds this router's bookings is other routers' load.
        The figures are old by a moment, so bookings that were open then and are over now are not
        others' load.
        """
        a, slot, now = self.arrays, entry.slot, self._clock()
        booked = entry.peak_requests.over(entry.num_booked, now)
        queued = entry.peak_queued_tokens.over(entry.booked_queued_tokens, now)
        entry.others_requests = max(0, load.num_requests - booked)
        entry.others_queued_tokens = max(0, load.num_queued_tokens - queued)
        entry.num_quarantined_blocks = load.num_quarantined_blocks
        for reported, figures, measured_s in (
            (load.prefill_tokens_per_s, a.prefill_tokens_per_s, a.prefill_measured_s),
            (load.decode_step_s, a.decode_step_s, a.decode_measured_s),
        ):
            if reported > 0 and (reported != figures[slot] or np.isinf(measured_s[slot])):
                figures[slot], measured_s[slot] = reported, now
        if load.handoff_bytes_per_s > 0:
            a.handoff_bytes_per_s[slot] = load.handoff_bytes_per_s
            a.links.compare(slot, load.handoff_bytes_per_s)
        self._recount(entry)

    def forget_others(self) -> None:
        """Forget others' load and quarantine, which nobody reports any more: old reports must not
        count for ever."""
        for entry in self:
            entry.others_requests = entry.others_queued_tokens = entry.num_quarantined_blocks = 0
            self._recount(entry)

    def prefill_tokens_per_s(self, entry: WorkerEntry) -> float:
        """Return the rate that the worker reported last; the default before its first."""
        if not self._is_here(entry):  # its slot may have been given away
            return DEFAULT_PREFILL_TOKENS_PER_S
        return float(self.arrays.prefill_tokens_per_s[entry.slot])

    def observe_handoff(self, booking: Booking, num_bytes: int, seconds: float) -> None:
        """Learn the bandwidth of a prefill worker, and of its link to the decode worker, from a
        handoff that is large enough."""
        writer, reader = booking.prefill, booking.decode
        if self._is_here(writer) and num_bytes >= 1 << 16 and seconds > 0:
            rates, links = self.arrays.handoff_bytes_per_s, self.arrays.links
            slot, rate = writer.slot, num_bytes / seconds
            if self._is_here(reader):
                links.observe(slot, reader.slot, rate, float(rates[slot]))
            rates[slot] += LEARNING_RATE * (rate - rates[slot])
            links.compare(slot, float(rates[slot]))

    def _recount(self, entry: WorkerEntry) -> None:
        """Bring a worker's row up to date with its entry."""
        if not self._is_here(entry):
            return
        a, slot, facts = self.arrays, entry.slot, entry.facts
        was_idle = a.queued_tokens[slot] == 0
        a.usable[slot] = entry.usable
        a.queued_tokens[slot] = entry.booked_queued_tokens + entry.others_queued_tokens
        a.head_tokens[slot] = next(iter(entry.prefills.values()), 0)
        if was_idle:
            a.head_since_s[slot] = self._clock()
        a.running[slot] = len(entry.decodes) + entry.others_requests
        left = (facts.num_blocks - entry.num_quarantined_blocks) * facts.block_size
        a.unquarantined_tokens[slot] = left if entry.num_quarantined_blocks else np.inf
        a.free_tokens[slot] = left - sum(entry.decodes.values())
        self._on_change()

    def _is_here(self, entry: WorkerEntry) -> bool:
        return self._by_slot.get(entry.slot) is entry

    def kv_use(self, entry: WorkerEntry) -> float:
        """Return the share of a worker's KV that this router's bookings and quarantine take."""
        total = entry.facts.num_blocks * entry.facts.block_size
        free = max(0.0, float(self.arrays.free_tokens[entry.slot]))
        return 1 - min(free, total) / total if total else 0.0

    # --- bookings ------------------------------------------------------------------------------

    def book(
        self, prefill_slot: int | None, decode_slot: int, prefill_tokens: int, new_tokens: int
    ) -> Booking:
        """Record the load of a placed request. `new_tokens`: those that will need KV where it
        decodes. `prefill_slot` None: it is prefilled there, too."""
        decode = self.at(decode_slot)
        prefill = decode if prefill_slot is None else self.at(prefill_slot)
        kv_tokens = decode.facts.held(new_tokens)
        booking = Booking(next(self._booking_ids), prefill, decode, prefill_tokens, kv_tokens)
        self._bookings[booking.booking_id] = booking
        prefill.prefills[booking.booking_id] = booking.prefill_tokens
        decode.decodes[booking.booking_id] = booking.kv_tokens
        self._recount(prefill)
        if prefill is not decode:
            self._recount(decode)
        return booking

    def book_running(self, entry: WorkerEntry, num_tokens: int) -> Booking:
        """Record a request that runs on a decode worker already: another router placed it."""
        kv_tokens = entry.facts.held(num_tokens)
        booking = Booking(next(self._booking_ids), entry, entry, 0, kv_tokens, prefill_held=False)
        self._bookings[booking.booking_id] = booking
        entry.decodes[booking.booking_id] = kv_tokens
        self._recount(entry)
        return booking

    def release_prefill(self, booking: Booking) -> None:
        """The prompt is computed: its tokens no longer queue. Later calls do nothing."""
        if not booking.prefill_held:
            return
        entry, now = booking.prefill, self._clock()
        entry.peak_requests.falls(entry.num_booked, now)
        entry.peak_queued_tokens.falls(entry.booked_queued_tokens, now)
        booking.prefill_held = False
        del entry.prefills[booking.booking_id]
        if self._is_here(entry):
            self.arrays.head_since_s[entry.slot] = now
        self._recount(entry)

    def release(self, booking: Booking) -> None:
        """The attempt is over. Must be called exactly once."""
        assert booking.booking_id in self._bookings, f"{booking} was released before"
        self.release_prefill(booking)
        booking.decode.peak_requests.falls(booking.decode.num_booked, self._clock())
        del booking.decode.decodes[booking.booking_id]
        del self._bookings[booking.booking_id]
        self._recount(booking.decode)

    @property
    def num_bookings(self) -> int:
        return len(self._bookings)

    def check_integrity(self) -> None:
        """Raise AssertionError when rows and bookings disagree."""
        for entry in self._entries.values():
            slot = entry.slot
            assert self._by_slot[slot] is entry, f"slot {slot} is not {entry.facts.worker_id}'s"
            booked = {b.booking_id for b in self._bookings.values() if b.decode is entry}
            assert booked == set(entry.decodes), (entry.facts.worker_id, booked, entry.decodes)
            queued = {
                b.booking_id
                for b in self._bookings.values()
                if b.prefill is entry and b.prefill_held
            }
            assert queued == set(entry.prefills), (entry.facts.worker_id, queued, entry.prefills)
            expected = entry.booked_queued_tokens + entry.others_queued_tokens
            assert self.arrays.queued_tokens[slot] == expected, (slot, expected)
