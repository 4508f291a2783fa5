"""Two engines under random orders: every stream is the undisturbed one's, nothing is leaked."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.errors import InvalidRequestError
from engine.request import (
    FinishedEvent,
    HandoffId,
    PrefilledEvent,
    RequestId,
    RequestSpec,
    ReservedEvent,
    SampledToken,
    SamplingParams,
)
from tests.engine.fakes import (
    Streams,
    alone,
    drain,
    fake_config,
    pair,
    pool_is_whole,
    prompt,
    reserve,
)
from tests.engine.fakes import spec_of as make_spec

REQUESTS = st.tuples(
    st.integers(1, 90),  # length
    st.integers(0, 2),  # seed of the prompt
    st.sampled_from([0, 20, 48, 90]),  # shared with the others
    st.integers(1, 40),  # max_tokens
    st.sampled_from([0.0, 1.0]),
    st.integers(-1, 1),  # priority
)


@dataclass
class Handoff:
    spec: RequestSpec
    lease: ReservedEvent
    handoff_id: HandoffId
    first: SampledToken | None = None
    over: bool = False  # the first token ended it, or it was aborted


class Pair(RuleBasedStateMachine):
    """A prefill and a decode engine; local requests and handoffs, aborts and failures."""

    @initialize(
        windows=st.sampled_from([(None, True), (20, True), (40, True), (20, False), (40, False)]),
        num_blocks=st.tuples(st.integers(12, 40), st.integers(12, 40)),
        chunks=st.tuples(st.sampled_from([8, 40, 200]), st.sampled_from([8, 40, 200])),
        max_num_seqs=st.sampled_from([2, 5, 64]),
    )
    def begin(
        self,
        windows: tuple[int | None, bool],
        num_blocks: tuple[int, int],
        chunks: tuple[int, int],
        max_num_seqs: int,
    ) -> None:
        self.windows = window, sees_all = windows
        if not sees_all:  # pools that hold windows, but no longest prompt
            num_blocks = (num_blocks[0] // 4 + 2, num_blocks[1] // 4 + 2)
        configs = [
            fake_config(n, window, max_num_batched_tokens=c, max_num_seqs=min(c, max_num_seqs))
            for n, c in zip(num_blocks, chunks)
        ]
        sender, receiver, self.wire = pair(*configs, sees_all)
        self.prefill, self.decode = sender.core, receiver.core
        self.specs: dict[str, RequestSpec] = {}
        self.handoffs: dict[str, Handoff] = {}
        self.quarantined: list[RequestId] = []
        self.streams = Streams()
        self.aborted: set[str] = set()
        self.count = 0

    def new_spec(self, request: tuple[int, int, int, int, float, int]) -> RequestSpec:
        length, seed, shared, max_tokens, temperature, priority = request
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        self.count += 1
        ids = prompt(length, seed, shared)
        return make_spec(f"r{self.count}", ids, sampling, priority=priority)

    @rule(request=REQUESTS)
    def run_locally(self, request: tuple[int, int, int, int, float, int]) -> None:
        spec = self.new_spec(request)
        try:
            self.decode.add(spec)
        except InvalidRequestError:
            return  # larger than the whole pool
        self.specs[spec.request_id] = spec

    @rule(request=REQUESTS)
    def hand_over(self, request: tuple[int, int, int, int, float, int]) -> None:
        spec = self.new_spec(request)
        try:
            lease = reserve(self.decode, spec)
        except InvalidRequestError:
            return
        if not isinstance(lease, ReservedEvent):
            return
        handoff = Handoff(spec, lease, self.wire.open(lease))
        try:
            self.prefill.add_prefill(spec, handoff.handoff_id, lease.num_cached_tokens)
        except InvalidRequestError:
            self.decode.release(spec.request_id)
            return
        self.handoffs[spec.request_id] = handoff

    @rule()
    def step_prefill(self) -> None:
        if self.prefill.has_work():
            self.take_prefilled(self.prefill.step())

    def take_prefilled(self, events: object) -> None:
        for event in events:  # type: ignore[attr-defined]
            if isinstance(event, PrefilledEvent):
                handoff = self.handoffs[event.request_id]
                handoff.first, handoff.over = event.token, event.finished is not None
                pushed = sorted(self.wire.pushed[handoff.handoff_id])
                assert pushed == sorted(self.wire.owed(handoff.lease))
            else:
                assert not isinstance(event, FinishedEvent), event

    @rule(steps=st.integers(1, 12))
    def step_decode(self, steps: int) -> None:
        for _ in range(steps):
            if self.decode.has_work():
                self.streams.take(self.decode.step())

    def ready(self) -> list[Handoff]:
        return [h for h in self.handoffs.values() if h.first is not None]

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def finish_handoff(self, data: st.DataObject) -> None:
        handoff = data.draw(st.sampled_from(self.ready()))
        self.complete(handoff)

    def complete(self, handoff: Handoff) -> None:
        request_id = handoff.spec.request_id
        assert handoff.first is not None
        del self.handoffs[request_id]
        self.prefill.release(request_id)
        first = handoff.first.token_id
        self.streams.tokens[request_id] = [first]
        self.specs[request_id] = handoff.spec
        if handoff.over:
            self.decode.release(request_id)
        else:
            self.decode.admit(request_id, handoff.first)

    @precondition(lambda self: self.handoffs)
    @rule(data=st.data(), early=st.booleans())
    def fail_handoff(self, data: st.DataObject, early: bool) -> None:
        """The lease is fenced at some point; a late push goes nowhere near a reused block."""
        request_id = data.draw(st.sampled_from(sorted(self.handoffs)))
        handoff = self.handoffs.pop(request_id)
        self.decode.abort(RequestId(request_id))
        self.quarantined.append(RequestId(request_id))
        self.prefill.abort(RequestId(request_id))
        for event in self.prefill.step():
            if isinstance(event, PrefilledEvent):
                self.take_prefilled([event])
        if early:
            del self.wire.leases[handoff.handoff_id]
        self.prefill.release(RequestId(request_id))

    @precondition(lambda self: self.quarantined)
    @rule()
    def writer_stopped(self) -> None:
        self.decode.release(self.quarantined.pop())

    @precondition(lambda self: self.specs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.specs)))
        self.decode.abort(RequestId(request_id))
        self.aborted.add(request_id)

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        if hasattr(self, "decode"):
            self.prefill.check_integrity()
            self.decode.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "decode"):
            return
        while self.quarantined:
            self.writer_stopped()
        while self.handoffs:
            while self.prefill.has_work():
                self.take_prefilled(self.prefill.step())
            ready = self.ready()
            assert ready, "exports wait for blocks that nobody will release"
            self.complete(ready[0])
        drain(self.decode, self.streams)
        for request_id, spec in self.specs.items():
            expected = alone(spec, *self.windows)
            got = self.streams.tokens.get(request_id, [])
            if request_id in self.aborted:
                expected = expected[: len(got)]
            assert got == expected, request_id
        pool_is_whole(self.prefill)
        pool_is_whole(self.decode)


TestPair = Pair.TestCase
TestPair.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_two_engines_survive_long_random_orders() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Pair, settings=settings(max_examples=600, stateful_step_count=120, deadline=None)
    )
