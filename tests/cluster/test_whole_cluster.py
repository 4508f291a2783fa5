"""The whole cluster as `baton up` starts it: Ray, supervisor, 2 + 2 workers, router, client."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from baton.client import Client
from baton.config import parse_config
from baton.control_client import ControlClient
from baton.errors import BatonError
from baton.events import Finished, FinishReason, Routed, Tokens
from baton.process_tree import descendants, wait_until_gone
from baton.v1 import control_pb2
from cluster.local import RunningCluster, up
from engine.request import RequestId, RequestSpec, SamplingParams
from tests.router.deployment import byte_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

LIVE = control_pb2.WORKER_STATE_LIVE
PROMPT = [5 + number % 200 for number in range(120)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    model = tmp_path_factory.mktemp("model")
    byte_model(model)
    config = parse_config(
        {
            "model": str(model),
            "pools": {
                "prefill": {"role": "prefill", "replicas": 2},
                "decode": {"role": "decode", "replicas": 2},
            },
            "engine": {
                "backend": "fake",
                "block_size": 8,
                "num_blocks": 512,
                "num_regions": 2,
                "max_num_batched_tokens": 64,
                "fake": {"vocab_size": 257, "window": 20, "decode_step_s": 0.005},
            },
            "router": {"port": 0, "local_prefill": "never"},
            "control": {"port": 0},
        }
    )
    before = descendants()
    with up(config, run_dir=tmp_path_factory.mktemp("run")) as running:
        processes = descendants() - before
        assert len(processes) >= 8
        yield running
        processes |= descendants() - before
    assert wait_until_gone(processes, 0.0) == set()


def expected_tokens(kit: Any, prompt: list[int], max_tokens: int, **sampling: Any) -> list[int]:
    engine = dataclasses.replace(
        kit.engine, fake=dataclasses.replace(kit.engine.fake, vocab_size=257)
    )
    asked = SamplingParams(
        **{"temperature": 0.0} | sampling, max_tokens=max_tokens, ignore_eos=True
    )
    spec = RequestSpec(RequestId("oracle"), np.array(prompt, np.uint32), len(prompt), asked)
    tokens: list[int] = kit.engine_tokens(engine, spec)
    return tokens


def run(
    address: str,
    prompt: list[int],
    max_tokens: int,
    on_token: Callable[[], None] = lambda: None,
    **options: Any,
) -> tuple[list[int], Routed, Finished]:
    """One request to its end: its tokens by index, its last placement, and how it finished."""
    tokens: dict[int, int] = {}
    routed: list[Routed] = []
    with Client(address, reconnect_within_s=30) as client:
        for event in client.generate(
            token_ids=prompt, max_tokens=max_tokens, ignore_eos=True, **options
        ):
            if isinstance(event, Routed):
                routed.append(event)
            elif isinstance(event, Tokens):
                for index, token in enumerate(event.ids, event.index):
                    assert index not in tokens, f"token {index} came twice"
                    tokens[index] = token
                on_token()
            elif isinstance(event, Finished):
                assert sorted(tokens) == list(range(len(tokens)))
                return [tokens[i] for i in range(len(tokens))], routed[-1], event
    raise AssertionError("the stream ended without Finished")


def wait_for(
    cluster: RunningCluster,
    happened: Callable[[control_pb2.WatchFleetResponse], bool],
    timeout_s: float = 60,
) -> control_pb2.WatchFleetResponse:
    """Watch the registry, through its absences, until it shows what is waited for."""
    give_up_at = time.monotonic() + timeout_s
    seen = None
    while time.monotonic() < give_up_at:
        try:
            with ControlClient(cluster.control_address) as control:
                for seen in control.watch_fleet(5.0):
                    if happened(seen):
                        return seen
        except BatonError:
            time.sleep(0.1)
    raise AssertionError(f"it did not happen; last seen: {seen}")


def all_live(fleet: control_pb2.WatchFleetResponse) -> bool:
    return all(pool.live_replicas == pool.desired_replicas for pool in fleet.pools)


def live_workers(fleet: control_pb2.WatchFleetResponse) -> dict[str, control_pb2.WorkerInfo]:
    return {w.info.ref.worker_id: w.info for w in fleet.workers if w.state == LIVE}


def kill(fleet: control_pb2.WatchFleetResponse, worker_id: str) -> None:
    os.kill(live_workers(fleet)[worker_id].ref.ranks[0].process.pid, signal.SIGKILL)


def nothing_held(fleet: control_pb2.WatchFleetResponse) -> bool:
    return all(
        w.load.num_free_blocks == w.load.num_blocks > 0 and w.load.num_quarantined_blocks == 0
        for w in fleet.workers
        if w.state == LIVE
    )


def test_requests_are_prefilled_in_one_pool_and_decoded_in_the_other_with_the_oracles_tokens(
    cluster: RunningCluster, kit: Any
) -> None:
    def one(number: int) -> None:
        prompt = PROMPT[: 10 + 7 * number]
        tokens, routed, finished = run(cluster.router_address, prompt, 20, temperature=0.0)
        assert tokens == expected_tokens(kit, prompt, 20)
        assert routed.prefill_worker.startswith("prefill-")
        assert routed.decode_worker.startswith("decode-")
        assert finished.reason is FinishReason.LENGTH

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(one, range(12)))
    wait_for(cluster, nothing_held)


def test_a_decode_worker_killed_mid_stream_costs_no_token_and_is_recreated(
    cluster: RunningCluster, kit: Any
) -> None:
    fleet = wait_for(cluster, all_live)
    streaming = threading.Event()
    with ThreadPoolExecutor(6) as threads:
        running = [
            threads.submit(
                run, cluster.router_address, PROMPT[n:], 200, streaming.set, temperature=0.0
            )
            for n in range(6)
        ]
        assert streaming.wait(30)
        kill(fleet, "decode-0")
        for number, request in enumerate(running):
            assert request.result(90)[0] == expected_tokens(kit, PROMPT[number:], 200)
    old = live_workers(fleet)["decode-0"].ref.incarnation
    again = wait_for(
        cluster,
        lambda seen: all_live(seen) and live_workers(seen)["decode-0"].ref.incarnation != old,
    )
    assert len(live_workers(again)) == 4
    tokens, _, _ = run(cluster.router_address, PROMPT, 20, temperature=0.0)
    assert tokens == expected_tokens(kit, PROMPT, 20)
    wait_for(cluster, nothing_held)


def test_a_killed_prefill_worker_is_replaced_while_requests_go_on(
    cluster: RunningCluster, kit: Any
) -> None:
    fleet = wait_for(cluster, all_live)
    with ThreadPoolExecutor(8) as threads:
        running = [
            threads.submit(run, cluster.router_address, PROMPT[n:], 40, temperature=0.0)
            for n in range(16)
        ]
        kill(fleet, "prefill-1")
        for number, request in enumerate(running):
            assert request.result(90)[0] == expected_tokens(kit, PROMPT[number:], 40)
    old = live_workers(fleet)["prefill-1"].ref.incarnation
    wait_for(
        cluster,
        lambda seen: all_live(seen) and live_workers(seen)["prefill-1"].ref.incarnation != old,
    )
    wait_for(cluster, nothing_held)


@pytest.mark.full
def test_a_worker_that_hangs_is_avoided_then_killed_and_recreated(
    cluster: RunningCluster, kit: Any
) -> None:
    fleet = wait_for(cluster, all_live)
    hung = live_workers(fleet)["decode-1"].ref
    os.kill(hung.ranks[0].process.pid, signal.SIGSTOP)
    wait_for(cluster, lambda seen: "decode-1" not in live_workers(seen), 10)
    tokens, routed, _ = run(cluster.router_address, PROMPT, 20, temperature=0.0)
    assert routed.decode_worker == "decode-0"
    assert tokens == expected_tokens(kit, PROMPT, 20)
    again = wait_for(cluster, all_live)
    assert live_workers(again)["decode-1"].ref.incarnation != hung.incarnation


def test_kill_9_of_the_supervisor_stops_nothing_and_it_adopts_what_it_finds(
    cluster: RunningCluster, kit: Any
) -> None:
    before = wait_for(cluster, all_live)
    streaming = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(
            run, cluster.router_address, PROMPT, 300, streaming.set, temperature=0.0
        )
        assert streaming.wait(30)
        os.kill(cluster.supervisor_pid(), signal.SIGKILL)
        assert running.result(60)[0] == expected_tokens(kit, PROMPT, 300)
    after = wait_for(cluster, lambda seen: len(seen.pools) == 2 and all_live(seen))
    assert {name: w.ref.incarnation for name, w in live_workers(after).items()} == {
        name: w.ref.incarnation for name, w in live_workers(before).items()
    }


def test_kill_9_of_the_router_loses_and_repeats_no_token(cluster: RunningCluster, kit: Any) -> None:
    wait_for(cluster, all_live)
    streaming = threading.Semaphore(0)
    router_pid = cluster.router_pid
    assert router_pid is not None
    with ThreadPoolExecutor(20) as threads:
        running = [
            threads.submit(
                run,
                cluster.router_address,
                PROMPT[n:],
                250,
                streaming.release,
                temperature=1.0,
                **({"seed": n} if n % 2 else {}),
            )
            for n in range(20)
        ]
        for _ in range(40):
            assert streaming.acquire(timeout=30)
        os.kill(router_pid, signal.SIGKILL)
        for number, request in enumerate(running):
            tokens, routed, _ = request.result(90)
            expected = expected_tokens(kit, PROMPT[number:], 250, temperature=1.0, seed=routed.seed)
            assert tokens == expected, number
    wait_for(cluster, nothing_held)


def test_scaling_out_and_in_changes_the_fleet_and_drains_what_leaves(
    cluster: RunningCluster, kit: Any
) -> None:
    wait_for(cluster, all_live)
    with ControlClient(cluster.control_address) as control:
        assert control.set_replicas("decode", 3) == 2
        wait_for(cluster, lambda seen: "decode-2" in live_workers(seen))
        assert control.set_replicas("decode", 2) == 3
    wait_for(cluster, lambda seen: "decode-2" not in live_workers(seen) and all_live(seen))
    tokens, _, _ = run(cluster.router_address, PROMPT, 20, temperature=0.0)
    assert tokens == expected_tokens(kit, PROMPT, 20)
