"""kill -9 of Ray's head and of a raylet under 50 streams, with a Redis that keeps the state of the
GCS and without: what becomes of the streams, of new requests, of the pools.

Each case prints its figures (`pytest -s`; bench/results has some). Without a Redis
the pools are lost with the head and come back: what is asserted then is that no stream ends with
wrong tokens, and that all is whole again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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
from baton.control_client import ControlClient
from baton.errors import BatonError
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
    live_workers,
    run,
)

pytestmark = [pytest.mark.full, pytest.mark.cluster, pytest.mark.timeout(500)]

_NUM_STREAMS = 50
_NUM_TOKENS = 400
_STEP_S = 0.08  # a stream lasts half a minute: longer than a head needs to come back
_SIZES = {"prefill": 1, "decode": 2}
_POOLS = {"prefill": PoolConfig(role="prefill"), "decode": PoolConfig(role="decode")}
_WHOLE_FOR_S = 20.0
_WHOLE_WITHIN_S = 120.0
_LOOK_S = 0.2


# --- what stands around a cluster -----------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """At the fleet, as the supervisor tells it."""

    at_s: float
    answered: bool
    whole: bool
    """Every pool has its size."""


@dataclass
class Operator:
    """Tells the supervisor of the pools, which stand in no file of the head's, whenever it does not
    know them; notes how the fleet is."""

    address: str
    config: ClusterConfig
    looks: list[Look] = field(default_factory=list)

    def look(self) -> None:
        try:
            with ControlClient(self.address, call_timeout_s=2.0) as control:
                fleet = control.fleet()
                known = {pool.name for pool in fleet.pools}
                for name in _SIZES.keys() - known:
                    control.add_pool(name, self._text_of(name), _SIZES[name])
        except BatonError:
            self.looks.append(Look(time.monotonic(), answered=False, whole=False))
        else:
            self.looks.append(Look(time.monotonic(), answered=True, whole=is_whole(fleet)))

    def _text_of(self, pool: str) -> str:
        return dataclasses.replace(self.config, pools={pool: _POOLS[pool]}).to_yaml()

    def answered_again_after(self, since_s: float) -> float:
        """Seconds until it answered, without a break since."""
        return self._for_good(since_s, lambda look: look.answered)

    def whole_again_after(self, since_s: float) -> float:
        return self._for_good(since_s, lambda look: look.whole)

    def _for_good(self, since_s: float, good: Callable[[Look], bool]) -> float:
        bad = [look.at_s for look in self.looks if look.at_s >= since_s and not good(look)]
        return max(bad, default=since_s) - since_s


def is_whole(fleet: Fleet) -> bool:
    return {pool.name: pool.live_replicas for pool in fleet.pools} == _SIZES


@dataclass
class Asker:
    """A new request after the other."""

    address: str
    answered: list[float] = field(default_factory=list)
    """When."""
    refused: Counter[str] = field(default_factory=Counter)

    def ask(self) -> None:
        number = len(self.answered) % 200
        try:
            run(self.address, [5 + number, *PROMPT[:40]], 2)
        except BatonError as error:
            self.refused[type(error).__name__] += 1
        else:
            self.answered.append(time.monotonic())

    def longest_gap(self, since_s: float) -> float:
        """Seconds without an answer."""
        times = [since_s, *(at for at in self.answered if at > since_s)]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


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
        fleet = self.wait_for(is_whole)
        return {name: worker.ref.incarnation for name, worker in live_workers(fleet).items()}

    def wait_until_whole_for_long(self) -> None:
        """Workers of a Ray that is gone may still tell of themselves for a while."""
        give_up_at = time.monotonic() + _WHOLE_WITHIN_S
        since = time.monotonic()
        while self.operator.looks[-1].at_s < since + _WHOLE_FOR_S or not self._whole_lately():
            assert time.monotonic() < give_up_at, self.operator.looks[-5:]
            time.sleep(_LOOK_S)

    def _whole_lately(self) -> bool:
        looks = self.operator.looks
        lately = [look for look in looks if look.at_s > looks[-1].at_s - _WHOLE_FOR_S]
        return all(look.whole for look in lately)


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
    longest_stream_s: float
    new_requests_gap_s: float
    """The longest time in which no new request was answered."""
    refused: dict[str, int]
    supervisor_after_s: float
    whole_after_s: float
    workers_kept: int
    restarts: list[str]


def measure(site: FaultySite, strike: Callable[[FaultySite], None]) -> Figures:
    prompts = [PROMPT[number : number + 100] for number in range(_NUM_STREAMS)]
    expected = site.expected(prompts, [_NUM_TOKENS] * _NUM_STREAMS)
    before, flowing = site.incarnations(), threading.Semaphore(0)
    address = site.pods.router_address
    with ThreadPoolExecutor(_NUM_STREAMS) as threads, again_and_again(site.asker.ask):
        asked = [threads.submit(run, address, p, _NUM_TOKENS, flowing.release) for p in prompts]
        for _ in range(2 * _NUM_STREAMS):
            assert flowing.acquire(timeout=60)
        struck_at = time.monotonic()
        strike(site)
        ended = [_ended(stream) for stream in asked]
        longest_s = time.monotonic() - struck_at
        site.wait_until_whole_for_long()
    told = [outcome if isinstance(outcome, str) else outcome.ids for outcome in ended]
    right = sum(ids == tokens for ids, tokens in zip(told, expected, strict=True))
    failed = Counter(outcome for outcome in told if isinstance(outcome, str))
    after = site.incarnations()
    return Figures(
        right,
        _NUM_STREAMS - right - failed.total(),
        dict(failed),
        longest_s,
        site.asker.longest_gap(struck_at),
        dict(site.asker.refused),
        site.operator.answered_again_after(struck_at),
        site.operator.whole_again_after(struck_at),
        sum(after[name] == incarnation for name, incarnation in before.items()),
        site.kubelet.restarts,
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
