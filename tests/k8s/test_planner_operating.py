"""The planner on real pods: the Azure trace, compressed, through the router; then silence, and one
more request.

Time is compressed by the planner's settings and by the fake engine's: a trace's bin of 10 s takes a
quarter of a second, every 55th of its requests is sent, with a quarter of its tokens.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from baton.client import AsyncClient, Client
from baton.client.events import Finished
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.resources import WORKER_POOLS
from tests.cluster.planner.queueing import TRACE
from tests.k8s.installed import Installed, on_pods, router_addresses
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import eventually
from tests.k8s.streaming import clients_of, tokens_of

pytestmark = on_pods(600)

BIN_S = 0.25
EVERY = 55
FEWER_TOKENS = 4
SHARES = (0.3, 1.0, 0.12)
"""Of the trace's requests, in each third of it: the load more than triples at once, and falls."""
MOST, MOST_NEEDED = 6, 3
"""Replicas that a pool may have, and that the load takes at most, once those that it has serve."""
STABLE_S, ZERO_AFTER_S = 16.0, 40.0
PLANNER = {
    "catchUpSeconds": 20.0,
    "panicWindowSeconds": 6.0,
    "stableWindowSeconds": STABLE_S,
    "scaleInHoldSeconds": 5.0,
    "warmUpSeconds": 1.0,
}
TARGETS = {
    "ttftTargetSeconds": 1.0,
    "itlTargetSeconds": 0.2,
    "scaleToZeroAfterSeconds": ZERO_AFTER_S,
}
ENGINE = {
    "backend": "fake",
    "fake": {"prefillTokenSeconds": 0.0006, "decodeStepSeconds": 0.1},
    "maxNumSeqs": 16,
}
FLEET_WAIT_S = 2.0
"""Far less than a pod takes to start, so the router holds a request that comes after silence."""


@dataclass(frozen=True)
class Asked:
    at_s: float
    num_prompt_tokens: int
    num_tokens: int


def trace() -> Iterator[Asked]:
    """Every 55th request of those that each third keeps, spread evenly over its bin."""
    lines = [line for line in TRACE.read_text(encoding="utf-8").splitlines() if line[0].isdigit()]
    kept = 0.0
    for number, line in enumerate(lines):
        requests, prompts, outputs = map(int, line.split(","))
        before, kept = kept, kept + requests * SHARES[number * len(SHARES) // len(lines)] / EVERY
        for nth in range(int(before) + 1, int(kept) + 1):
            at_s = BIN_S * (number + (nth - before) / (kept - before))
            size = FEWER_TOKENS * requests
            yield Asked(at_s, max(1, round(prompts / size)), max(1, round(outputs / size)))


async def replay(addresses: Sequence[str], asked: list[Asked]) -> None:
    """Each at its time, of one router after the other, and every one is answered whole."""
    began_at = time.monotonic()

    async def one(client: AsyncClient, number: int, each: Asked) -> None:
        await asyncio.sleep(began_at + each.at_s - time.monotonic())
        prompt = [5 + (number * 7 + index) % 200 for index in range(each.num_prompt_tokens)]
        assert len(await tokens_of(client, prompt, each.num_tokens)) == each.num_tokens

    async with clients_of(addresses) as clients:
        turns = zip(itertools.cycle(clients), itertools.count(), asked, strict=False)
        await asyncio.gather(*(one(*turn) for turn in turns))


@dataclass
class Sizes:
    """What the pools' specs said over time."""

    kube: Kube
    namespace: str
    times_s: list[float] = field(default_factory=list)
    of: dict[str, list[int]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    ready: dict[str, list[int]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    """Those that served then, as statuses say."""

    def look(self) -> None:
        for pool, sizes in self.of.items():
            found = self.kube.get(WORKER_POOLS, Key(self.namespace, pool))
            sizes.append(int(found["spec"]["replicas"]))
            self.ready[pool].append(int(found.get("status", {}).get("readyReplicas", 0)))
        self.times_s.append(time.monotonic())

    def follow(self, is_over: threading.Event) -> None:
        while not is_over.wait(0.25):
            self.look()

    def changes(self, pool: str) -> list[tuple[float, int]]:
        """When it got another size, and which."""
        sizes = self.of[pool]
        pairs = enumerate(itertools.pairwise(sizes), 1)
        return [(self.times_s[at], new) for at, (old, new) in pairs if old != new]

    def course(self, pool: str) -> list[int]:
        """Its sizes, one after the other."""
        return [size for size, _ in itertools.groupby(self.of[pool])]

    def beyond(self, pool: str, most: int) -> list[tuple[int, int]]:
        """Each growth beyond `most`: to which size, and how many served of the one before."""
        pairs = enumerate(itertools.pairwise(self.of[pool]), 1)
        grown = [(at, new) for at, (old, new) in pairs if new > max(old, most)]
        return [(new, min(self.ready[pool][at - 1 : at + 1])) for at, new in grown]

    def turns_s(self, pool: str) -> list[float]:
        """When it began to grow after it had shrunk, or to shrink after it had grown."""
        known = [(self.times_s[0], self.of[pool][0]), *self.changes(pool)]
        grows = [(at_s, new > old) for (_, old), (at_s, new) in itertools.pairwise(known)]
        return [at_s for (_, was), (at_s, now) in itertools.pairwise(grows) if was != now]

    def at(self, pool: str, at_s: float) -> int:
        return self.of[pool][max(0, bisect.bisect(self.times_s, at_s) - 1)]


@contextlib.contextmanager
def followed(sizes: Sizes) -> Iterator[None]:
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(sizes.follow, is_over)
        try:
            yield
        finally:
            is_over.set()
            following.result()


def planned_pool(role: str) -> dict[str, object]:
    return {
        "role": role,
        "initialReplicas": 1,
        "minReplicas": 0,
        "maxReplicas": MOST,
        "scaling": {"mode": "planner"},
    }


def test_pools_follow_the_load_stop_together_and_come_back_for_the_next_request(
    kube: Kube, installed: Installed, kubelet: Kubelet
) -> None:
    router = {
        "placement": {"localPrefill": "never"},
        "admission": {"fleetWaitSeconds": FLEET_WAIT_S},
    }
    installed.serve(
        {role: planned_pool(role) for role in ("prefill", "decode")},
        ENGINE,
        {"router": router, "planner": PLANNER},
        planner=TARGETS,
        router={"replicas": 2},
    )
    eventually(lambda: len(router_addresses(kubelet)) == 2, "both routers are ready")
    addresses = router_addresses(kubelet)
    asked = list(trace())
    sizes = Sizes(kube, installed.namespace)
    with followed(sizes):
        began_at = time.monotonic()
        asyncio.run(replay(addresses, asked))
        ended_at = time.monotonic()

        def has_stopped() -> bool:
            pods = kubelet.pods("ray.io/node-type=worker")
            return not pods and all(sizes.of[pool][-1] == 0 for pool in sizes.of)

        eventually(has_stopped, "both pools stop", 150)
        with Client(addresses[-1]) as client:
            held_at = time.monotonic()
            events = list(client.generate("is anybody there?", max_tokens=5, ignore_eos=True))
            answered_at = time.monotonic()
    print_course(sizes, began_at, f"{len(asked)} requests")
    print(f"held and answered within {answered_at - held_at:.1f} s")
    assert isinstance(events[-1], Finished)
    assert answered_at - held_at > FLEET_WAIT_S, "nobody was there to answer at once"
    third_s = asked[-1].at_s / 3
    for pool, history in sizes.of.items():
        course = sizes.course(pool)
        assert max(course) >= 2
        for size, num_ready in sizes.beyond(pool, MOST_NEEDED):
            assert size == MOST_NEEDED + 1, "what the load takes, and not all that it may have"
            assert num_ready < MOST_NEEDED, "for what waits while a pod starts, and for that alone"
        assert max(course) in history[: bisect.bisect(sizes.times_s, ended_at)]
        assert course[-3:] == [1, 0, 1], "it falls with the load, before it stops"
        assert sizes.at(pool, began_at + third_s) == 1, "a third of the load needs one worker"
        assert sizes.at(pool, held_at) == 0
        for one_s, next_s in itertools.pairwise(sizes.turns_s(pool)):
            assert next_s - one_s > STABLE_S
    stopped = [[size == 0 for size in history] for history in sizes.of.values()]
    apart = sum(one != other for one, other in zip(*stopped, strict=True))
    assert apart <= 2, "they stop and start together, looked at one after the other"


def print_course(sizes: Sizes, began_at: float, what: str) -> None:
    for pool in sizes.of:
        course = ", ".join(f"{at_s - began_at:.0f} s: {new}" for at_s, new in sizes.changes(pool))
        print(f"{what}: {pool} from {sizes.of[pool][0]}, {course}")
