"""Plans sent as differences from the last one: equal at the other end, short, none lost."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from engine.request import BlockPush, HandoffId, RequestId, ScheduledSeq, StepPlan
from engine.run.plan_deltas import LostPlanError, PlanDecoder, PlanEncoder
from kv_transfer.layout import BlockId


def sent(encoder: PlanEncoder, plan: StepPlan) -> bytes:
    return pickle.dumps(encoder.encode(plan), protocol=pickle.HIGHEST_PROTOCOL)


def as_values(plan: StepPlan) -> tuple[object, ...]:
    seqs = [
        (
            seq.request_id,
            seq.token_ids.tolist(),
            seq.token_ids.dtype,
            seq.start,
            [table.tolist() for table in seq.block_tables],
            [table.dtype for table in seq.block_tables],
            seq.samples,
        )
        for seq in plan.seqs
    ]
    return plan.step, seqs, plan.pushes, plan.sink_messages, plan.num_tokens


def decode(tables: dict[str, np.ndarray], start: int, step: int = 1) -> StepPlan:
    """One token of each request; its table is sent as a view of the same array in every plan."""
    size = -(-(start + 1) // 16)
    seqs = tuple(
        ScheduledSeq(
            RequestId(name), np.array([step], np.uint32), start, (table[:size],), samples=True
        )
        for name, table in tables.items()
    )
    return StepPlan(step, seqs, num_tokens=len(seqs))


def random_tables(names: int, blocks: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(names)
    return {
        f"some-tenant/a-request-id-{n}#1": rng.integers(1, 90_000, blocks, dtype=np.int32)
        for n in range(names)
    }


def test_random_plans_are_the_same_at_the_other_end() -> None:
    rng = np.random.default_rng(5)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    tables = {n: [rng.integers(0, 99, 40, dtype=np.int32) for _ in range(2)] for n in range(7)}
    lengths = dict.fromkeys(tables, 1)
    for step in range(300):
        names = rng.permutation(7)[: rng.integers(0, 8)].tolist()
        seqs = []
        for name in names:
            match rng.integers(0, 6):
                case 0:  # ended, and its id came again; or preempted
                    tables[name] = [rng.integers(0, 99, 40, dtype=np.int32) for _ in range(2)]
                    lengths[name] = int(rng.integers(1, 40))
                case 1:  # a window has left blocks; a block gave way to its cached twin
                    tables[name][1][: rng.integers(0, 40)] = 0
                    tables[name][0][rng.integers(0, 40)] = 77
                case _:
                    lengths[name] = min(40, lengths[name] + int(rng.integers(0, 3)))
            views = tuple(table[: lengths[name]] for table in tables[name])
            token_ids = rng.integers(0, 1000, rng.integers(1, 9)).astype(np.uint32)
            start, samples = int(rng.integers(0, 600)), bool(rng.integers(0, 2))
            seqs.append(ScheduledSeq(RequestId(f"r{name}"), token_ids, start, views, samples))
        pushes = (BlockPush(HandoffId("h"), 1, (0, 2), (BlockId(3), BlockId(4))),)
        plan = StepPlan(step, tuple(seqs), pushes if step % 3 else (), (b"m",), num_tokens=step)
        assert as_values(decoder.plan(pickle.loads(sent(encoder, plan)))) == as_values(plan)


def test_a_step_of_long_sequences_is_sent_in_a_few_bytes_a_sequence() -> None:
    encoder, decoder, tables = PlanEncoder(), PlanDecoder(), random_tables(32, 600)
    sizes = []
    for step in range(1, 40):
        plan = decode(tables, 8192 + step, step)
        sizes.append(len(delta := sent(encoder, plan)))
        assert as_values(decoder.plan(pickle.loads(delta))) == as_values(plan)
    whole = len(pickle.dumps(plan, protocol=pickle.HIGHEST_PROTOCOL))
    assert whole > 60_000
    assert sizes[0] > 60_000  # all of them new
    assert max(sizes[1:]) < 3_000  # also where every table grows


def test_a_sequence_that_skips_a_plan_is_sent_whole_again() -> None:
    encoder, decoder, tables = PlanEncoder(), PlanDecoder(), random_tables(3, 64)
    first, second = list(tables)[:2]
    for step, names in enumerate(([first, second], [first], [second, first], [second])):
        plan = decode({name: tables[name] for name in names}, 900 + step, step)
        assert as_values(decoder.plan(pickle.loads(sent(encoder, plan)))) == as_values(plan)


@pytest.mark.parametrize("arrive", [[1], [0, 2], [0, 0], [0, 1, 0]])
def test_a_plan_that_is_lost_repeated_or_out_of_order_is_refused(arrive: list[int]) -> None:
    encoder, decoder, tables = PlanEncoder(), PlanDecoder(), random_tables(2, 64)
    deltas = [encoder.encode(decode(tables, 900 + step, step)) for step in range(3)]
    *fine, wrong = arrive
    for i in fine:
        decoder.plan(deltas[i])
    with pytest.raises(LostPlanError, match=f"plan {wrong + 1} came after plan {len(fine)}"):
        decoder.plan(deltas[wrong])


def test_a_request_cannot_be_in_a_plan_twice() -> None:
    plan = decode(random_tables(1, 8), 20)
    with pytest.raises(AssertionError):
        PlanEncoder().encode(StepPlan(1, plan.seqs * 2, num_tokens=2))
