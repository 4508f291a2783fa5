"""A whole cluster under Ray, an oracle for what it says, and eyes on every worker's books."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
import signal
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from baton.client import AsyncClient, Client
from baton.client.events import Event, Finished, Routed, Tokens
from baton.config.cluster import ClusterConfig, parse_config
from baton.config.settings import changed
from baton.control.client import ControlClient
from baton.errors import BatonError
from baton.identity.identity import operator_of
from baton.link.frames import Method
from baton.link.router_end import ask_once
from baton.model_folder import find_text_files
from baton.v1 import common_pb2, control_pb2, router_pb2, worker_pb2
from cluster.local.bring_up import RunningCluster, up
from cluster.local.process_tree import Process, descendants, wait_until_gone
from engine.request import RequestId, RequestSpec, SamplingParams, TokenEvent
from engine.run.build import load_lone_engine
from router.text import TextModel
from tests.engine import checkpoints
from tests.router.callers import HttpAnswer, HttpCaller, LostError
from tests.router.deployment import byte_model

LIVE = control_pb2.WORKER_STATE_LIVE
PROMPT = [5 + number % 200 for number in range(480)]
"""Token ids that every model here knows."""

_NUM_ASKED_TOKENS = 6
_NUMBERS = itertools.count()

Fleet = control_pb2.WatchFleetResponse
Books = worker_pb2.CheckIntegrityResponse

_ENGINE = {"block_size": 8, "num_blocks": 512, "num_regions": 2, "max_num_batched_tokens": 64}
_FAKE = {"vocab_size": 257, "window": 20, "prefill_token_s": 0.0003, "decode_step_s": 0.005}


def describe(model: Path, engine: dict[str, Any], replicas: int = 2) -> ClusterConfig:
    return parse_config(
        {
            "model": str(model),
            "pools": {
                "prefill": {"role": "prefill", "replicas": replicas},
                "decode": {"role": "decode", "replicas": replicas},
            },
            "engine": _ENGINE | engine,
            # Several prompts at once at a prefill worker, so that a fault finds some in a push.
            "router": {
                "port": 0,
                "http": {"port": None},
                "placement": {"local_prefill": "never"},
                "admission": {"lease_lead_s": 0.5},
            },
            "control": {"port": 0},
        }
    )


def fake_cluster(folder: Path, replicas: int = 2) -> ClusterConfig:
    byte_model(folder)
    return describe(folder, {"backend": "fake", "fake": _FAKE}, replicas)


def random_cluster(folder: Path) -> ClusterConfig:
    """Random weights, scaled so that a lost block changes the tokens."""
    checkpoints.save("llama", folder)
    return describe(folder, {"dtype": "float32", "num_threads": 1})


def demo_cluster(folder: Path) -> ClusterConfig:
    """The shipped model, in fp32."""
    demo = Path(__file__).resolve().parents[2] / "models" / "demo"
    return describe(demo, {"dtype": "float32", "num_threads": 1})


def supervisor_among(processes: Iterable[Process]) -> Process:
    """By the title that Ray gives its process."""
    for process in processes:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process.pid}/cmdline").read_text()
            if text.startswith("ray::SupervisorActor"):
                return process
    raise AssertionError("there is no supervisor")


@dataclass
class Site:
    """A running 2 + 2 cluster and what its requests must say."""

    cluster: RunningCluster
    config: ClusterConfig

    def expected(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], **sampling: Any
    ) -> list[list[int]]:
        """What one engine in this process, with fresh memory, says to each prompt."""
        asked = {"temperature": 0.0, "ignore_eos": True} | sampling
        specs = [
            RequestSpec(
                RequestId(str(number)),
                np.array(prompt, np.uint32),
                len(prompt),
                SamplingParams(**asked, max_tokens=count),
            )
            for number, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=True))
        ]
        return engine_tokens(self.config, specs)

    def expect(self, prompt: list[int], max_tokens: int, **sampling: Any) -> list[int]:
        return self.expected([prompt], [max_tokens], **sampling)[0]

    # --- the fleet ------------------------------------------------------------------------------

    def supervisor_pid(self) -> int:
        return supervisor_among(descendants()).pid

    def wait_for(self, happened: Callable[[Fleet], object], timeout_s: float = 60) -> Fleet:
        """Watch the registry, through its absences, until it shows what is waited for."""
        give_up_at = time.monotonic() + timeout_s
        seen = None
        while time.monotonic() < give_up_at:
            try:
                with ControlClient(self.cluster.control_address) as control:
                    for seen in control.watch_fleet(5.0):
                        if happened(seen):
                            return seen
            except BatonError:
                time.sleep(0.1)
        raise AssertionError(f"it did not happen; last seen: {seen}")

    def all_live(self) -> Fleet:
        return self.wait_for(all_live)

    def wait_for_recreated(self, before: Fleet, worker_id: str) -> Fleet:
        """Until all is live and this worker is another incarnation."""
        old = live_workers(before)[worker_id].ref.incarnation

        def recreated(seen: Fleet) -> bool:
            return all_live(seen) and live_workers(seen)[worker_id].ref.incarnation != old

        return self.wait_for(recreated)

    def serves(self, fleet: Fleet, worker_id: str) -> None:
        """Have this very start of a worker take part in an answer: the others of its pool drain
        meanwhile, and are replaced."""
        workers = live_workers(fleet)
        mine = workers[worker_id]
        others = [n for n, w in workers.items() if w.pool == mine.pool and n != worker_id]
        sampled_before = num_sampled(books_of(self.cluster.control_address, mine.address))
        with ControlClient(self.cluster.control_address) as control:
            for other in others:
                control.drain(other)
        asked: list[Asked] = []
        give_up_at = time.monotonic() + 30  # routers hear of it a moment later
        while not (asked and worker_id in asked[-1][1].workers):
            assert time.monotonic() < give_up_at, f"{worker_id} was in none of {len(asked)} answers"
            asked.append(self.ask_new())
        sampled = num_sampled(books_of(self.cluster.control_address, mine.address))
        assert sampled > sampled_before, f"another {worker_id} served"
        self.check(asked)
        for other in others:
            self.wait_for_recreated(fleet, other)

    def new_prompt(self, num_tokens: int = 40) -> list[int]:
        """A prompt whose prefix no worker has cached."""
        number = next(_NUMBERS)
        return [5 + number % 200, 5 + number // 200, *PROMPT[:num_tokens]]

    def ask_new(self) -> Asked:
        prompt = self.new_prompt()
        return prompt, run(self.cluster.router_address, prompt, _NUM_ASKED_TOKENS)

    def ask(
        self,
        door: str,
        prompt: list[int],
        max_tokens: int,
        on_token: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> Answer | HttpAnswer:
        """As `run`, at either of the router's doors."""
        if door == "grpc":
            return run(self.cluster.router_address, prompt, max_tokens, on_token, **options)
        assert self.cluster.http_address is not None
        asking = over_http(self.cluster.http_address, prompt, max_tokens, on_token, **options)
        return asyncio.run(asking)

    @contextlib.contextmanager
    def streams(
        self, number: int = 6, num_tokens: int = 200, door: str = "grpc"
    ) -> Iterator[list[Future[Any]]]:
        """Requests that run; afterwards each has the oracle's tokens."""
        prompts = [PROMPT[first : first + 100] for first in range(number)]
        flowing = threading.Semaphore(0)
        with ThreadPoolExecutor(number) as threads:
            asked = [
                threads.submit(self.ask, door, prompt, num_tokens, flowing.release)
                for prompt in prompts
            ]
            for _ in range(2 * number):
                assert flowing.acquire(timeout=30)
            yield asked
            answers = [request.result(90) for request in asked]
        for answer, ids in zip(answers, self.expected(prompts, [num_tokens] * number)):
            answer.assert_says(self.text_model, ids)

    @functools.cached_property
    def text_model(self) -> TextModel:
        return TextModel(find_text_files(self.config.model))

    def check(self, asked: Sequence[Asked]) -> None:
        """Every answer is the oracle's."""
        expected = self.expected([p for p, _ in asked], [_NUM_ASKED_TOKENS] * len(asked))
        for (_, answer), tokens in zip(asked, expected, strict=True):
            assert answer.ids == tokens

    # --- books ----------------------------------------------------------------------------------

    def books(self, fleet: Fleet | None = None) -> dict[str, Books]:
        """What every live worker says of itself now."""
        seen = fleet or self.all_live()
        control = self.cluster.control_address
        workers = live_workers(seen).items()
        return {name: books_of(control, worker.address) for name, worker in workers}

    def all_sound(self, timeout_s: float = 20) -> dict[str, Books]:
        """Wait until no worker holds anything: fences and acks take a message each way."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            books = self.books()
            for worker_id, found in books.items():
                assert not found.problems, (worker_id, list(found.problems))
            if all(map(holds_nothing, books.values())):
                return books
            assert time.monotonic() < give_up_at, f"something is still held: {books}"
            time.sleep(0.05)


def engine_tokens(config: ClusterConfig, specs: list[RequestSpec]) -> list[list[int]]:
    """One engine alone, in no time: the fake one's speed is not part of what it says."""
    fake = dataclasses.replace(config.engine.fake, prefill_token_s=0.0, decode_step_s=0.0)
    engine_config = dataclasses.replace(config.engine, fake=fake)
    engine = load_lone_engine(config.model, engine_config)
    for spec in specs:
        engine.add(spec)
    found: list[list[int]] = [[] for _ in specs]
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokenEvent):
                found[int(event.request_id)].append(event.token.token_id)
    engine.check_integrity()
    engine.close()
    return found


def all_live(fleet: Fleet) -> bool:
    return len(fleet.pools) == 2 and all(
        pool.live_replicas == pool.desired_replicas for pool in fleet.pools
    )


def live_workers(fleet: Fleet) -> dict[str, control_pb2.WorkerInfo]:
    return {w.info.ref.worker_id: w.info for w in fleet.workers if w.state == LIVE}


def incarnations(fleet: Fleet) -> dict[str, int]:
    return {name: worker.ref.incarnation for name, worker in live_workers(fleet).items()}


def wait_until(happened: Callable[[], object], within_s: float = 30, otherwise: str = "") -> None:
    """Wait for what has no event of its own."""
    give_up_at = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < give_up_at, otherwise or "it did not happen"
        time.sleep(0.005)


def pid_of(fleet: Fleet, worker_id: str) -> int:
    pid: int = live_workers(fleet)[worker_id].ref.ranks[0].process.pid
    return pid


def kill(fleet: Fleet, worker_id: str) -> None:
    os.kill(pid_of(fleet, worker_id), signal.SIGKILL)


def freeze_mid_push(
    site: Site, fleet: Fleet, worker_id: str, num_steps_before: int, pid: int
) -> None:
    """Stop a prefill worker in the middle of pushing, proved by leases that wait for it.

    It has stepped since the requests came, so it has pushed, and owes several handoffs the rest: a
    few milliseconds later, when it is stopped, it still does, and then it can finish nothing.
    """
    workers, control = live_workers(fleet), site.cluster.control_address
    give_up_at = time.monotonic() + 20
    while time.monotonic() < give_up_at:
        seen = books_of(control, workers[worker_id].address)
        if seen.num_open_handoffs < 3 or seen.num_steps <= num_steps_before:
            continue
        os.kill(pid, signal.SIGSTOP)
        books = {n: books_of(control, w.address) for n, w in workers.items() if n != worker_id}
        leases = sum(found.num_open_leases for found in books.values())
        if leases > sum(found.num_open_handoffs for found in books.values()):
            return
        os.kill(pid, signal.SIGCONT)
    raise AssertionError(f"{worker_id} was never seen in a push")


def books_of(control: str, address: str) -> Books:
    """By the keys that `baton up` made and recorded."""
    request, own = worker_pb2.CheckIntegrityRequest(), operator_of(control)
    books: Books = asyncio.run(ask_once(address, own, Method.CHECK_INTEGRITY, request, 10.0))
    return books


def num_sampled(books: Books) -> int:
    return books.num_first_tokens + books.num_later_tokens


def holds_nothing(books: Books) -> bool:
    held = books.num_waiting + books.num_running + books.num_reserved + books.num_exporting
    held += books.num_open_leases + books.num_open_handoffs
    return held + books.num_blocks_in_use + books.num_quarantined_blocks == 0


# --- requests -----------------------------------------------------------------------------------


class Answer:
    """A request's events, checked as they come: no index twice, none missing."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.routed: list[Routed] = []
        self.finished: Finished | None = None

    def assert_says(self, model: TextModel, ids: list[int]) -> None:
        assert self.ids == ids
        assert self.text == model.decode(ids)

    @property
    def workers(self) -> set[str]:
        """Of the last attempt."""
        return {self.routed[-1].prefill_worker, self.routed[-1].decode_worker}

    def take(self, event: Event) -> None:
        assert self.finished is None, f"{event} after the end"
        if isinstance(event, Routed):
            self.routed.append(event)
        elif isinstance(event, Tokens):
            assert not event.ids or event.index == len(self.ids), "a token twice, or one missing"
            self.ids += event.ids
            self.text += event.text
        elif isinstance(event, Finished):
            self.finished = event


def run(
    address: str,
    prompt: list[int],
    max_tokens: int,
    on_token: Callable[[], None] = lambda: None,
    **options: Any,
) -> Answer:
    """One request to its end, reconnecting to the router for as long as it takes to come back."""
    answer = Answer()
    with Client(address, reconnect_within_s=30) as client:
        asked = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0} | options
        for event in client.generate(token_ids=prompt, **asked):
            answer.take(event)
            if isinstance(event, Tokens):
                on_token()
    assert answer.finished is not None, "the stream ended without Finished"
    return answer


async def over_http(
    address: str, prompt: list[int], max_tokens: int, on_token: Callable[[], None], **options: Any
) -> HttpAnswer:
    """As `run`, over OpenAI's API: whoever loses an answer asks for the same again."""
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    sampling.temperature = options.pop("temperature", 0.0)
    ids = router_pb2.TokenIds(ids=prompt)
    request = router_pb2.GenerateRequest(
        token_ids=ids, sampling=sampling, request_id=uuid.uuid4().hex, **options
    )
    seen = HttpAnswer()

    def note(answer: HttpAnswer) -> bool:
        nonlocal seen
        seen = answer
        on_token()
        return False

    caller = HttpCaller(address)
    try:
        async with asyncio.timeout(60):
            while True:
                before = seen.text
                with contextlib.suppress(LostError):
                    answer = await caller.ask(request, note)
                    assert answer.text.startswith(before)
                    return answer
                await asyncio.sleep(0.1)  # as clients do
    finally:
        await caller.close()


async def start(
    client: AsyncClient,
    prompt: list[int],
    max_tokens: int,
    leave_after: int | None = None,
    leave_within_s: float | None = None,
) -> Answer:
    """One greedy request; it is given up after so many events, or so much time, if any is given."""
    answer = Answer()
    events: AsyncIterator[Event] = client.generate(
        token_ids=prompt, max_tokens=max_tokens, ignore_eos=True, temperature=0.0
    )
    async with contextlib.aclosing(cast(Any, events)):
        num_events = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(leave_within_s):
                async for event in events:
                    answer.take(event)
                    num_events += 1
                    if num_events == leave_after:
                        break
    return answer


Asked = tuple[list[int], Answer]
"""A prompt and what came."""


@contextlib.contextmanager
def running_site(config: ClusterConfig, run_dir: Path | None = None) -> Iterator[Site]:
    """Up, and afterwards not one of its processes is left."""
    before = descendants()
    with up(config, run_dir=run_dir) as cluster:
        processes = descendants() - before
        yield Site(cluster, config)
        processes |= descendants() - before
    assert wait_until_gone(processes, 0.0) == set()


CLUSTERS = {"fake": fake_cluster, "random": random_cluster, "demo": demo_cluster}
KINDS = ["fake", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("random", "demo"))]


def site_of(kind: str, folders: pytest.TempPathFactory) -> contextlib.AbstractContextManager[Site]:
    """With both doors."""
    config = CLUSTERS[kind](folders.mktemp("model"))
    config = dataclasses.replace(config, router=changed(config.router, http={"port": 0}))
    return running_site(config)
