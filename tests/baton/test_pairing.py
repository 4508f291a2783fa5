"""Who in a fleet can exchange KV with no other, and how `baton status` says it."""

from __future__ import annotations

import pytest

from baton.v1 import common_pb2, control_pb2
from cli.status import UnitFleet, print_status
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


def test_a_worker_of_another_kind_than_every_partner_is_named_with_them() -> None:
    seen = fleet(
        worker("prefill-0", b"a"),
        worker("prefill-1", b"a"),
        worker("decode-0", b"a"),
        worker("decode-1", b"b"),
    )
    assert unpaired(seen) == {
        "decode-1": "decode-1 has another KV fingerprint than every prefill worker (prefill-0, "
        "prefill-1): it pairs with none; engine.dtype and engine.block_size must be the same in "
        "all pools"
    }


def test_a_worker_that_computes_in_another_dtype_is_told_which_and_what_says_it() -> None:
    seen = fleet(worker("prefill-0", b"a"), worker("decode-0", b"a"), worker("decode-1", b"b"))
    for each, dtype in zip(seen.workers, ("bfloat16", "bfloat16", "float32"), strict=True):
        each.info.dtype = dtype
    assert unpaired(seen) == {
        "decode-1": "decode-1 computes in float32, unlike every prefill worker (prefill-0): it "
        "pairs with none; set one engine.dtype for all"
    }


def test_two_kinds_of_kv_pair_each_with_its_own() -> None:
    kinds = (b"a", b"b")
    prefills = [worker(f"prefill-{n}", kind) for n, kind in enumerate(kinds)]
    decodes = [worker(f"decode-{n}", kind) for n, kind in enumerate(kinds)]
    assert unpaired(fleet(*prefills, *decodes)) == {}


def test_a_worker_of_the_same_role_is_no_partner_and_one_that_is_gone_is_none_either() -> None:
    seen = fleet(
        worker("prefill-0", b"a"),
        worker("decode-0", b"a"),
        worker("decode-1", b"b"),
        worker("decode-2", b"b"),
        worker("prefill-1", b"b", GONE),
    )
    assert list(unpaired(seen)) == ["decode-1", "decode-2"]


def test_workers_whose_partners_are_not_there_yet_are_not_told_of() -> None:
    assert unpaired(fleet(worker("decode-0", b"a"), worker("decode-1", b"b"))) == {}


def test_a_mixed_worker_pairs_with_every_role_but_not_with_itself() -> None:
    odd = fleet(worker("mixed-0", b"a"), worker("mixed-1", b"a"), worker("mixed-2", b"b"))
    assert list(unpaired(odd)) == ["mixed-2"]
    assert "every other worker (mixed-0, mixed-1)" in unpaired(odd)["mixed-2"]
    joined = fleet(*odd.workers, worker("decode-0", b"b"))
    assert unpaired(joined) == {}


def test_one_that_leaves_is_a_partner_still_but_is_not_told_of_itself() -> None:
    seen = fleet(
        worker("prefill-0", b"a", DRAINING), worker("decode-0", b"a"), worker("prefill-1", b"b")
    )
    assert list(unpaired(seen)) == ["prefill-1"]
    left = fleet(worker("prefill-0", b"a", DRAINING), worker("decode-1", b"b"))
    assert list(unpaired(left)) == ["decode-1"]


def test_many_partners_are_counted_not_listed() -> None:
    prefills = [worker(f"prefill-{n}", b"a") for n in range(9)]
    (line,) = (
        line
        for worker_id, line in unpaired(fleet(*prefills, worker("decode-0", b"b"))).items()
        if worker_id == "decode-0"
    )
    assert "(prefill-0, prefill-1, prefill-2 and 6 more)" in line


def test_status_says_who_pairs_with_none(capsys: pytest.CaptureFixture[str]) -> None:
    workers = worker("prefill-0", b"a"), worker("decode-0", b"a"), worker("decode-1", b"b")
    print_status([UnitFleet("", 1.0, fleet(*workers))])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "pairs with none" in line)
    assert line.startswith("decode-1 has another KV fingerprint than every prefill worker")
