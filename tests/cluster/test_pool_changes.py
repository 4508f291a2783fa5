"""What is asked of pools over the control service, and whom that involves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import pytest

from baton.config.workers import RegistryConfig
from baton.control.client import ControlClient
from baton.errors import (
    AlreadyExistsError,
    BatonError,
    ConfigError,
    InUseError,
    InvalidRequestError,
    NoCapacityError,
    NotFoundError,
)
from baton.v1 import control_pb2
from cluster.pools.pool_settings import PoolSettings, added_settings
from cluster.registry.control_service import Changes, serve
from cluster.registry.pool_changes import PoolBacking, PoolChanges
from cluster.registry.registry import Registration, Registry
from tests.cluster.pool_settings import settings_of
from tests.identities import OPERATOR, WORKER

TEXT = "pools: {decode-2: {role: mixed, max_replicas: 4}}"


def registry_of() -> Registry:
    registry = Registry(RegistryConfig(), time.monotonic)
    registry.pools.add(settings_of("decode"), 1)
    return registry


@asynccontextmanager
async def served(registry: Registry) -> AsyncIterator[ControlClient]:
    """Its methods block, and so belong on threads."""
    async with serve(registry, Changes(), "127.0.0.1:0", OPERATOR) as address:
        with ControlClient(address) as control:
            yield control


async def pools_told(control: ControlClient) -> dict[str, control_pb2.PoolStatus]:
    return {pool.name: pool for pool in (await asyncio.to_thread(control.fleet)).pools}


async def test_a_pool_is_added_shrunk_and_removed_while_the_registry_serves() -> None:
    async with served(registry_of()) as control:
        for _ in range(2):  # the second changes nothing
            await asyncio.to_thread(control.add_pool, "decode-2", TEXT, 2)
        reported = (await pools_told(control))["decode-2"]
        assert reported.desired_replicas == 2
        assert reported.settings_digest == added_settings("decode-2", TEXT).digest
        assert await asyncio.to_thread(control.set_replicas, "decode-2", 0) == 2
        await asyncio.to_thread(control.remove_pool, "decode-2")
        assert list(await pools_told(control)) == ["decode"]


@pytest.mark.parametrize(
    ("ask", "kind", "field"),
    [
        (lambda c: c.add_pool("decode", TEXT, 1), ConfigError, "pools"),
        (lambda c: c.add_pool("decode-2", "engine: {block_size: 0}", 1), ConfigError, None),
        (lambda c: c.add_pool("decode", TEXT.replace("-2", ""), 1), AlreadyExistsError, "pool"),
        (lambda c: c.add_pool("decode-2", TEXT, 5), InvalidRequestError, "replicas"),
        (lambda c: c.add_pool("decode-2", TEXT + "\nmodel: org/m", 1), ConfigError, "model"),
        (lambda c: c.set_replicas("decode", 9), InvalidRequestError, "replicas"),
        (lambda c: c.set_replicas("decod", 4), NotFoundError, "pool"),
        (lambda c: c.remove_pool("decode"), InUseError, "pool"),
        (lambda c: c.remove_pool("nobody"), NotFoundError, "pool"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_field_and_changes_nothing(
    ask: Callable[[ControlClient], None], kind: type[BatonError], field: str | None
) -> None:
    registry = registry_of()
    async with served(registry) as control:
        with pytest.raises(kind) as caught:
            await asyncio.to_thread(ask, control)
    assert type(caught.value) is kind
    assert field is None or caught.value.field == field
    assert registry.pools.desired_replicas() == {"decode": 1}


async def test_a_pool_whose_workers_have_not_gone_is_not_removed() -> None:
    registry = registry_of()
    registry.register(Registration("decode-0", 1, "decode", b""))
    async with served(registry) as control:
        await asyncio.to_thread(control.set_replicas, "decode", 0)
        with pytest.raises(InUseError, match="decode-0"):
            await asyncio.to_thread(control.remove_pool, "decode")
        registry.gone("decode-0", 1)
        await asyncio.to_thread(control.remove_pool, "decode")


TWO_POOLS = "pools: {p-2: {role: prefill}, d-2: {role: decode}}"


async def test_workers_agree_on_one_dtype_before_they_load() -> None:
    async with served(registry := registry_of()) as control:
        for pool in ("p-2", "d-2"):
            await asyncio.to_thread(control.add_pool, pool, TWO_POOLS, 1)
        with ControlClient(control.address, identity=WORKER) as worker:
            assert await asyncio.to_thread(worker.agree_dtype, "d-2", "bfloat16") == "bfloat16"
            assert await asyncio.to_thread(worker.agree_dtype, "p-2", "float32") == "bfloat16"
            with pytest.raises(InvalidRequestError) as caught:
                await asyncio.to_thread(worker.agree_dtype, "p-2", "auto")
        assert caught.value.field == "dtype"
    assert registry.pools.settings("p-2").dtype == "bfloat16"


async def test_a_registry_that_lost_what_was_agreed_hears_it_of_the_workers_that_serve() -> None:
    registry = registry_of()
    for n, (pool, dtype) in enumerate((("p-2", ""), ("d-2", "float16"))):
        registry.register(Registration(f"{pool}-0", n, pool, b"", dtype=dtype))
    changes = PoolChanges(registry, backing := Backing(registry))
    for pool in ("p-2", "d-2"):
        await changes.add(pool, TWO_POOLS, 1)
    assert changes.agree_dtype("p-2", "bfloat16") == "float16"
    assert backing.num_kept == 3


# --- whoever starts the workers -------------------------------------------------------------------


class Backing(PoolBacking):
    """Has room for `room` replicas, and records the sizes that were saved."""

    def __init__(self, registry: Registry, room: int = 8) -> None:
        self.kept: list[dict[str, int]] = []
        self.num_kept = 0
        self.opened = asyncio.Event()
        self._registry = registry
        self._room = room

    async def check_room(self, pool: PoolSettings, replicas: Mapping[str, int]) -> None:
        if sum(replicas.values()) > self._room:
            raise NoCapacityError(f"no room for {pool.name}", field="replicas")

    async def complete(self, reported: PoolSettings) -> PoolSettings:
        await asyncio.sleep(0)  # others have their turn
        if reported.config.runs_on == "pods":
            raise ConfigError("runs_on: must be machine", field="runs_on")
        return reported

    async def slots_known(self) -> None:
        await self.opened.wait()

    def save(self) -> None:
        self.num_kept += 1
        if (sizes := self._registry.pools.desired_replicas()) not in self.kept[-1:]:
            self.kept.append(sizes)


async def test_a_change_is_kept_when_it_is_made_and_what_is_refused_is_not() -> None:
    registry = registry_of()
    backing = Backing(registry, room=3)
    changes = PoolChanges(registry, backing)
    with pytest.raises(NoCapacityError):
        await changes.add("decode-2", TEXT, 3)
    with pytest.raises(ConfigError):
        await changes.add("decode-2", TEXT + "\nruns_on: pods", 1)
    await changes.add("decode-2", TEXT, 2)
    await changes.add("decode-2", TEXT, 2)  # said again, and so kept already
    with pytest.raises(NoCapacityError):
        await changes.set_replicas("decode", 2)
    await changes.set_replicas("decode-2", 1)
    assert backing.kept == [{"decode": 1, "decode-2": 2}, {"decode": 1, "decode-2": 1}]


async def test_of_two_calls_at_once_that_add_a_pool_one_adds_it() -> None:
    registry = registry_of()
    changes = PoolChanges(registry, backing := Backing(registry))
    await asyncio.gather(*(changes.add("decode-2", TEXT, 2) for _ in range(2)))
    assert backing.kept == [{"decode": 1, "decode-2": 2}]


class SlowBacking(Backing):
    """Settles a pool when it is let."""

    def __init__(self, registry: Registry, room: int = 8) -> None:
        super().__init__(registry, room)
        self.num_begun = 0
        self.begun = asyncio.Event()
        self.may_settle = asyncio.Event()

    async def complete(self, reported: PoolSettings) -> PoolSettings:
        self.num_begun += 1
        self.begun.set()
        await self.may_settle.wait()
        return await super().complete(reported)


async def given_up(changes: PoolChanges, backing: SlowBacking, text: str = TEXT) -> None:
    """A call that adds `decode-2`, whose caller leaves while the pool is being settled."""
    adding = asyncio.create_task(changes.add("decode-2", text, 2))
    async with asyncio.timeout(5):
        await backing.begun.wait()
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding


async def test_a_call_whose_caller_gave_up_is_what_the_repeated_one_waits_for() -> None:
    registry = registry_of()
    changes = PoolChanges(registry, backing := SlowBacking(registry))
    await given_up(changes, backing)
    repeated = asyncio.create_task(changes.add("decode-2", TEXT, 2))
    await asyncio.wait({repeated}, timeout=0.05)
    assert not repeated.done()
    backing.may_settle.set()
    await repeated
    assert backing.num_begun == 1
    assert backing.kept == [{"decode": 1, "decode-2": 2}]


async def test_other_settings_of_a_pool_that_is_being_added_wait_and_are_refused() -> None:
    registry = registry_of()
    changes = PoolChanges(registry, backing := SlowBacking(registry))
    await given_up(changes, backing)
    others = asyncio.create_task(changes.add("decode-2", TEXT + "\n", 2))
    await asyncio.wait({others}, timeout=0.05)
    assert not others.done()
    backing.may_settle.set()
    with pytest.raises(AlreadyExistsError):
        await others
    assert backing.num_begun == 1


async def test_what_refuses_a_pool_whose_caller_gave_up_is_logged_and_it_can_be_added_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = registry_of()
    changes = PoolChanges(registry, backing := SlowBacking(registry))
    await given_up(changes, backing, TEXT + "\nruns_on: pods")
    backing.may_settle.set()
    await changes.add("decode-2", TEXT, 2)
    assert "pool decode-2 was not added: runs_on: must be machine" in caplog.text
    assert backing.kept == [{"decode": 1, "decode-2": 2}]


async def test_a_pool_is_removed_once_it_is_known_whether_it_was_added() -> None:
    registry = registry_of()
    changes = PoolChanges(registry, backing := SlowBacking(registry))
    backing.opened.set()
    await given_up(changes, backing)
    removing = asyncio.create_task(changes.remove("decode-2"))
    await asyncio.wait({removing}, timeout=0.05)
    assert not removing.done()
    backing.may_settle.set()
    with pytest.raises(InUseError, match="2 replicas"):
        await removing


async def test_no_pool_is_removed_before_it_is_known_what_a_former_supervisor_left_in_it() -> None:
    registry = registry_of()
    changes = PoolChanges(registry, backing := Backing(registry))
    await changes.set_replicas("decode", 0)
    removing = asyncio.create_task(changes.remove("decode"))
    await asyncio.wait({removing}, timeout=0.05)
    registry.pools.open_slot("decode", "decode-0")  # found, and drains
    backing.opened.set()
    with pytest.raises(InUseError, match="decode-0"):
        await removing
