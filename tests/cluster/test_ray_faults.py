"""kill -9 of Ray's head and of a raylet under 50 streams, with a Redis that keeps the state of the
GCS and without: what becomes of the streams, of new requests, of the pools.

Each case prints its figures (`pytest -s`; bench/results has some). Without a Redis
the pools are lost with the head and come back: what is asserted then is that no stream ends with
wrong tokens, and that all is whole again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from baton.config.cluster import ClusterConfig, ControlConfig, PoolConfig
from baton.control.client import ControlClient
from baton.errors import BatonError
from baton.fleet import Role
from cluster.worker.rank import free_port
from tests.cluster.kubelet import Kubelet
from tests.cluster.pods import PodCluster, running_head
from tests.cluster.redis_server import running_redis
from tests.cluster.whole_cluster import (
    PROMPT,
    Answer,
    Fleet,
    Site,
    fake_cluster,
    incarnations,
    run,
)

pytestmark = [pytest.mark.full, pytest.mark.cluster, pytest.mark.timeout(500)]

_NUM_STREAMS = 50
_NUM_TOKENS = 400
_STEP_S = 0.08  # a stream lasts half a minute: longer than a head needs to come back
_SIZES = {"prefill": 1, "decode": 2}
_POOLS = {"prefill": PoolConfig(role=Role.PREFILL), "decode": PoolConfig(role=Role.DECODE)}
_WHOLE_FOR_S = 20.0
_WHOLE_WITHIN_S = 120.0
_LOOK_S = 0.2


# --- what stands around a cluster -----------------------------------------------------------------


@dataclass
class Operator:
    """Adds the pools, which are in no file of the head's, whenever the supervisor does not know
    them. Notes whether the fleet is whole."""

    address: str
    config: ClusterConfig
    looks: list[tuple[float, bool]] = field(default_factory=list)
    """(time, whether every pool had its size)."""

    def look(self) -> None:
        try:
            with ControlClient(self.address, call_timeout_s=2.0) as control:
                fleet = control.fleet()
                known = {pool.name for pool in fleet.pools}
                for name in _SIZES.keys() - known:
                    text = dataclasses.replace(self.config, pools={name: _POOLS[name]}).to_yaml()
                    control.add_pool(name, text, _SIZES[name])
            whole = is_whole(fleet)
        except BatonError:
            whole = False
        self.looks.append((time.monotonic(), whole))


def is_whole(fleet: Fleet) -> bool:
    return {pool.name: pool.live_replicas for pool in fleet.pools} == _SIZES


@dataclass
class Asker:
    """Sends one new request after the other."""

    address: str
    num_answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def ask(self) -> None:
        number = self.num_answered % 200
        try:
            run(self.address, [5 + number, *PROMPT[:40]], 2)
        except BatonError as error:
            self.refused[type(error).__name__] += 1
        else:
            self.num_answered += 1


@contextlib.contextmanager
def again_and_again(do: Callable[[], None]) -> Iterator[None]:
    over = threading.Event()

    def loop() -> None:
        while not over.wait(_LOOK_S):
            do()

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(loop)
        try:
            yield
        finally:
            over.set()
        running.result()


# --- a cluster, and its faults --------------------------------------------------------------------


@dataclass
class FaultySite(Site):
    """A cluster on pods, with all that starts it again."""

    kubelet: Kubelet
    operator: Operator
    asker: Asker

    @property
    def pods(self) -> PodCluster:
        return cast(PodCluster, self.cluster)

    def incarnations(self) -> dict[str, int]:
        return incarnations(self.wait_for(is_whole))

    def wait_until_whole_for_long(self) -> None:
        """Workers of a Ray that is gone may still tell of themselves for a while."""
        give_up_at = time.monotonic() + _WHOLE_WITHIN_S
        since = time.monotonic()
        while self.operator.looks[-1][0] < since + _WHOLE_FOR_S or not self._whole_lately():
            assert time.monotonic() < give_up_at, self.operator.looks[-5:]
            time.sleep(_LOOK_S)

    def _whole_lately(self) -> bool:
        looks = self.operator.looks
        return all(whole for at_s, whole in looks if at_s > looks[-1][0] - _WHOLE_FOR_S)


@contextlib.contextmanager
def running_site(tmp_path: Path, with_redis: bool) -> Iterator[FaultySite]:
    for name in ("model", "run", "redis"):
        (tmp_path / name).mkdir()
    base = fake_cluster(tmp_path / "model")
    fake = dataclasses.replace(base.engine.fake, decode_step_s=_STEP_S)
    config = dataclasses.replace(
        base,
        runs_on="pods",
        pools={},
        engine=dataclasses.replace(base.engine, num_blocks=8192, fake=fake),
        control=ControlConfig(port=free_port("127.0.0.1")),
    )
    control = f"127.0.0.1:{config.control.port}"
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(running_redis(tmp_path / "redis")) if with_redis else None
        pods = stack.enter_context(running_head(config, tmp_path / "run", redis))
        pods.control_address = control
        kubelet = stack.enter_context(Kubelet(pods))
        operator = Operator(control, config)
        stack.enter_context(again_and_again(operator.look))
        pods.have(**_SIZES)
        site = FaultySite(cast(Any, pods), config, kubelet, operator, Asker(""))
        site.wait_for(is_whole)
        pods.start_router(config)
        site.asker.address = pods.router_address
        yield site


def kill_gcs(site: FaultySite) -> None:
    _kill_one(site.pods, "gcs_server")


def kill_head(site: FaultySite) -> None:
    """All that is in its pod, and its volumes."""
    site.kubelet.lose_head()


def kill_raylet(site: FaultySite) -> None:
    """Of the pod in which half of the streams decode."""
    pod = site.pods.pod_of(site.wait_for(is_whole), "decode-1")
    (raylet,) = (process for process in pod.node.tree() if process.name == "raylet")
    os.kill(raylet.pid, signal.SIGKILL)


def _kill_one(pods: PodCluster, name: str) -> None:
    (found,) = (process for process in pods.head.tree() if process.name == name)
    os.kill(found.pid, signal.SIGKILL)


# --- figures --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    right: int
    """Streams, of 50, that ended with one engine's tokens."""
    wrong: int
    """That ended with others."""
    failed: dict[str, int]
    """By error."""
    refused: dict[str, int]
    """New requests, by error."""
    workers_kept: int


def measure(site: FaultySite, strike: Callable[[FaultySite], None]) -> Figures:
    prompts = [PROMPT[number : number + 100] for number in range(_NUM_STREAMS)]
    expected = site.expected(prompts, [_NUM_TOKENS] * _NUM_STREAMS)
    before, flowing = site.incarnations(), threading.Semaphore(0)
    address = site.pods.router_address
    with ThreadPoolExecutor(_NUM_STREAMS) as threads, again_and_again(site.asker.ask):
        asked = [threads.submit(run, address, p, _NUM_TOKENS, flowing.release) for p in prompts]
        for _ in range(2 * _NUM_STREAMS):
            assert flowing.acquire(timeout=60)
        strike(site)
        ended = [_ended(stream) for stream in asked]
        site.wait_until_whole_for_long()
    failed = Counter(outcome for outcome in ended if isinstance(outcome, str))
    right = sum(
        not isinstance(outcome, str) and outcome.ids == tokens
        for outcome, tokens in zip(ended, expected, strict=True)
    )
    after = site.incarnations()
    return Figures(
        right,
        _NUM_STREAMS - right - failed.total(),
        dict(failed),
        dict(site.asker.refused),
        sum(after[name] == incarnation for name, incarnation in before.items()),
    )


def _ended(stream: Future[Answer]) -> Answer | str:
    """Its answer, or what kind of error it ended with."""
    try:
        return stream.result(_WHOLE_WITHIN_S)
    except BatonError as error:
        return type(error).__name__


# --- the cases ------------------------------------------------------------------------------------

_FAULTS = [kill_gcs, kill_head, kill_raylet]


@pytest.mark.parametrize("strike", _FAULTS)
def test_with_a_redis_no_stream_is_lost_and_nothing_but_what_was_killed_is_started_anew(
    tmp_path: Path, strike: Callable[[FaultySite], None]
) -> None:
    with running_site(tmp_path, with_redis=True) as site:
        figures = measure(site, strike)
        print(strike.__name__, "with Redis:", figures)
        assert (figures.right, figures.failed, figures.refused) == (_NUM_STREAMS, {}, {})
        assert figures.workers_kept == sum(_SIZES.values()) - (strike is kill_raylet)
        site.all_sound()


@pytest.mark.parametrize("strike", _FAULTS)
def test_without_a_redis_no_token_is_wrong_and_the_pools_come_back(
    tmp_path: Path, strike: Callable[[FaultySite], None]
) -> None:
    with running_site(tmp_path, with_redis=False) as site:
        figures = measure(site, strike)
        print(strike.__name__, "without Redis:", figures)
        assert figures.wrong == 0
        if strike is kill_raylet:
            assert figures.right == _NUM_STREAMS
        site.all_sound()
