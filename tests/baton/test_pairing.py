"""Who in a fleet can exchange KV with no other."""

from __future__ import annotations

import pytest

from baton.v1 import common_pb2, control_pb2
from cluster.registry.pairing import unpaired

ROLES = {
    "prefill": common_pb2.WORKER_ROLE_PREFILL,
    "decode": common_pb2.WORKER_ROLE_DECODE,
    "mixed": common_pb2.WORKER_ROLE_MIXED,
}
LIVE, GONE = control_pb2.WORKER_STATE_LIVE, control_pb2.WORKER_STATE_GONE
DRAINING = control_pb2.WORKER_STATE_DRAINING


def worker(
    worker_id: str, kind: bytes, state: control_pb2.WorkerState.ValueType = LIVE
) -> control_pb2.FleetWorker:
    info = control_pb2.WorkerInfo(
        ref=common_pb2.WorkerRef(worker_id=worker_id),
        role=ROLES[worker_id.split("-")[0]],
        kv_fingerprint=kind,
    )
    return control_pb2.FleetWorker(info=info, state=state)


def fleet(*workers: control_pb2.FleetWorker) -> control_pb2.WatchFleetResponse:
    return control_pb2.WatchFleetResponse(workers=workers)


A, B = b"a", b"b"
OTHER_KIND = "another KV fingerprint than every prefill worker (prefill-0, prefill-1)"


def test_a_worker_of_another_kind_than_every_partner_is_named_with_them() -> None:
    prefills = worker("prefill-0", A), worker("prefill-1", A)
    assert unpaired(fleet(*prefills, worker("decode-0", A), worker("decode-1", B))) == {
        "decode-1": f"decode-1 has {OTHER_KIND}: it pairs with none; engine.dtype and "
        "engine.block_size must be the same in all pools"
    }


def test_a_worker_that_computes_in_another_dtype_is_named_with_its_setting() -> None:
    seen = fleet(worker("prefill-0", A), worker("decode-0", A), worker("decode-1", B))
    for each, dtype in zip(seen.workers, ("bfloat16", "bfloat16", "float32"), strict=True):
        each.info.dtype = dtype
    assert unpaired(seen) == {
        "decode-1": "decode-1 computes in float32, unlike every prefill worker (prefill-0): it "
        "pairs with none; set one engine.dtype for all"
    }


@pytest.mark.parametrize(
    ("workers", "named"),
    [
        pytest.param(
            [worker("prefill-0", A), worker("prefill-1", B), worker("decode-0", A),
             worker("decode-1", B)], [], id="two kinds pair each with its own",
        ),
        pytest.param(
            [worker("prefill-0", A), worker("decode-0", A), worker("decode-1", B),
             worker("decode-2", B), worker("prefill-1", B, GONE)], ["decode-1", "decode-2"],
            id="neither the same role nor a gone worker is a partner",
        ),
        pytest.param(
            [worker("decode-0", A), worker("decode-1", B)], [], id="partners have yet to come"
        ),
        pytest.param(
            [worker("mixed-0", A), worker("mixed-1", A), worker("mixed-2", B)], ["mixed-2"],
            id="a mixed worker pairs with every role but not with itself",
        ),
        pytest.param(
            [worker("mixed-0", A), worker("mixed-1", A), worker("mixed-2", B),
             worker("decode-0", B)], [], id="a decode worker pairs with a mixed one",
        ),
        pytest.param(
            [worker("prefill-0", A, DRAINING), worker("decode-0", A), worker("prefill-1", B)],
            ["prefill-1"], id="a draining worker is a partner still",
        ),
        pytest.param(
            [worker("prefill-0", A, DRAINING), worker("decode-1", B)], ["decode-1"],
            id="a draining worker itself is not named",
        ),
    ],
)  # fmt: skip
def test_workers_without_a_partner_are_named(
    workers: list[control_pb2.FleetWorker], named: list[str]
) -> None:
    assert list(unpaired(fleet(*workers))) == named


def test_many_partners_are_counted_not_listed() -> None:
    prefills = [worker(f"prefill-{n}", b"a") for n in range(9)]
    line = unpaired(fleet(*prefills, worker("decode-0", B)))["decode-0"]
    assert "(prefill-0, prefill-1, prefill-2 and 6 more)" in line
