"""A mixed pool goes from 3 prefill workers and 1 decode worker to 1 and 3, and back, under load."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence

from baton.client import AsyncClient
from baton.client.events import Routed
from baton.control.client import ControlClient
from baton.v1 import common_pb2, control_pb2
from tests.k8s.installed import FAKE, Installed, control_address, on_pods, router_addresses
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.objects import restarts_of
from tests.k8s.operating import eventually
from tests.k8s.streaming import clients_of, streaming

pytestmark = on_pods(600)

NUM_TOKENS = 150
WITHIN_S = 5.0
PLACED_WITHIN_S = 60.0
"""Where it takes longer than it should, the test says how long."""
PROBES_EACH, PROBE_TOKENS = 4, 150
ENGINE = {**FAKE, "fake": {**FAKE["fake"], "prefillTokenSeconds": 0.001}}
PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE

Roles = dict[str, int]


def roles_of(fleet: control_pb2.WatchFleetResponse) -> Roles:
    """What each worker of the pool is to get new requests for."""
    return {worker.info.ref.worker_id: worker.active_role for worker in fleet.workers}


def split(roles: Roles) -> tuple[int, int]:
    """Workers that prefill alone, and that decode alone."""
    found = list(roles.values())
    return found.count(PREFILL), found.count(DECODE)


class MixedPool:
    """The pool `mixed` of the release's ServingCluster."""

    def __init__(self, installed: Installed, kubelet: Kubelet) -> None:
        self._installed, self._kubelet = installed, kubelet
        self._control = control_address(kubelet)

    def switch(self, prefill: int, decode: int) -> float:
        """By kubectl. In how many seconds requests were placed so."""
        with ControlClient(self._control) as control:
            before = roles_of(control.fleet())
        began_at = time.monotonic()
        patch = f'{{"spec": {{"rolePlan": {{"prefill": {prefill}, "decode": {decode}}}}}}}'
        self._installed.kubectl("patch", "wp/mixed", "--type=merge", "-p", patch)
        with ControlClient(self._control) as control:
            found = map(roles_of, control.watch_fleet(60.0))
            roles = next(each for each in found if split(each) == (prefill, decode))
        self._wait_placed(before, roles)
        return time.monotonic() - began_at

    def pods(self) -> list[tuple[str, int]]:
        """Each one's identity, and how often its containers were started again."""
        pods = self._kubelet.pods("ray.io/node-type=worker")
        return sorted((pod["metadata"]["uid"], restarts_of(pod)) for pod in pods)

    def _wait_placed(self, before: Roles, roles: Roles) -> None:
        """Until a request goes by these roles to a worker that had another one before."""
        switched = {worker for worker, role in roles.items() if before[worker] != role}
        assert switched
        addresses = router_addresses(self._kubelet)

        def are_placed() -> bool:
            pairs = asyncio.run(placed(addresses))
            by_roles = [(roles[prefill], roles[decode]) for prefill, decode in pairs]
            is_anew = not switched.isdisjoint(itertools.chain.from_iterable(pairs))
            return set(by_roles) == {(PREFILL, DECODE)} and is_anew

        eventually(are_placed, "workers act in their new roles", PLACED_WITHIN_S)


async def placed(addresses: Sequence[str]) -> list[tuple[str, str]]:
    """Workers of requests that every router is asked for at once: more than one takes soon."""

    async def ask(client: AsyncClient) -> tuple[str, str]:
        prompt = [5 + random.randrange(200) for _ in range(PROBE_TOKENS)]  # nobody has it cached
        events = client.generate(token_ids=prompt, max_tokens=1, temperature=0.0)
        (routed,) = [event async for event in events if isinstance(event, Routed)]
        return routed.prefill_worker, routed.decode_worker

    async with clients_of(addresses) as clients:
        return await asyncio.gather(*(ask(client) for client in clients * PROBES_EACH))


def test_roles_are_switched_within_seconds_and_no_stream_changes_and_no_pod_restarts(
    installed: Installed, kubelet: Kubelet
) -> None:
    mixed = {"role": "mixed", "initialReplicas": 4}
    pools = {"prefill": None, "decode": None, "mixed": mixed}  # None: not the chart's own
    installed.serve(pools, ENGINE, router={"replicas": 2})
    eventually(lambda: len(router_addresses(kubelet)) == 2, "both routers are ready")
    pool = MixedPool(installed, kubelet)
    pool.switch(3, 1)
    pods = pool.pods()
    with streaming(kubelet, NUM_TOKENS) as streams:
        for prefill, decode in ((1, 3), (3, 1), (1, 3), (3, 1)):
            seconds = pool.switch(prefill, decode)
            print(f"to {prefill} prefill and {decode} decode: {seconds:.1f} s")
            assert seconds < WITHIN_S
            streams.wait_rounds(2)  # one that has begun with the new roles, too
    assert pool.pods() == pods
