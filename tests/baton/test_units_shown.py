"""How `baton status` and `baton top` show two units: each has a control service of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from baton.config.workers import RegistryConfig
from baton.control_client import ControlClient
from baton.errors import UnavailableError
from baton.v1 import control_pb2
from cli.main import main
from cli.status import Fleets
from cluster.registry.control_service import Changes, serve
from cluster.registry.registry import Registry
from tests.cluster.pool_settings import settings_of

Capture = pytest.CaptureFixture[str]


def registry_of(replicas: int) -> Registry:
    registry = Registry(RegistryConfig(), time.monotonic)
    registry.pools.add(settings_of(max_replicas=9), replicas)
    return registry


@pytest.fixture
async def former() -> AsyncIterator[str]:
    async with serve(registry_of(3), Changes(), "127.0.0.1:0") as address:
        yield address


@pytest.fixture
async def coming() -> AsyncIterator[str]:
    async with serve(registry_of(1), Changes(), "127.0.0.1:0") as address:
        yield address


def set_units(address: str, *units: tuple[str, str, float]) -> None:
    with ControlClient(address) as control:
        control.set_units(
            control_pb2.Unit(code=code, control_address=where, share=share)
            for code, where, share in units
        )


async def run(*arguments: str) -> int:
    """Run a command beside the services."""
    return await asyncio.to_thread(main, arguments)


def rows_under(title: str, shown: str) -> list[list[str]]:
    return [line.split() for line in shown.split(f"{title}\n")[1].split("\n\n")[0].splitlines()]


async def test_the_units_and_their_shares_are_read_from_the_control_service(former: str) -> None:
    with ControlClient(former) as control:
        (lone,) = await asyncio.to_thread(control.units)
        assert (lone.code, lone.share) == ("", 1.0)
        await asyncio.to_thread(set_units, former, ("old", "", 0.9), ("new", "there:7101", 0.1))
        assert [unit.code for unit in await asyncio.to_thread(control.units)] == ["old", "new"]


@pytest.mark.parametrize("command", ["status", "top"])
async def test_one_unit_is_shown_without_a_table_of_units(
    command: str, former: str, capsys: Capture
) -> None:
    await asyncio.to_thread(set_units, former, ("old", "in-cluster.svc:7101", 1.0))
    assert await run(command, "--control", former) == 0
    shown = capsys.readouterr().out
    assert "Units" not in shown
    assert rows_under("Pools", shown)[0][:2] == ["pool", "role"]


@pytest.mark.parametrize("command", ["status", "top"])
async def test_two_units_are_shown_with_their_shares_and_pools(
    command: str, former: str, coming: str, capsys: Capture
) -> None:
    await asyncio.to_thread(set_units, former, ("old", "", 0.9), ("new", coming, 0.1))
    assert await run(command, "--control", former) == 0
    shown = capsys.readouterr().out
    assert rows_under("Units", shown) == [
        ["unit", "requests", "live", "workers"], ["old", "90%", "0"], ["new", "10%", "0"]
    ]  # fmt: skip
    assert [row[:6] for row in rows_under("Pools", shown)[1:]] == [
        ["old", "decode", "decode", "0", "of", "3"], ["new", "decode", "decode", "0", "of", "1"]
    ]  # fmt: skip


async def test_a_unit_whose_control_service_does_not_answer_is_shown_as_silent(
    former: str, capsys: Capture
) -> None:
    await asyncio.to_thread(set_units, former, ("old", "", 0.9), ("new", "127.0.0.1:1", 0.1))
    assert await run("status", "--control", former) == 0
    shown = capsys.readouterr().out
    assert rows_under("Units", shown)[2] == ["new", "10%", "silent"]
    assert [row[0] for row in rows_under("Pools", shown)] == ["unit", "old"]


async def test_addresses_that_are_given_stand_for_those_of_the_list(
    former: str, coming: str, capsys: Capture
) -> None:
    units = ("old", "old.svc:7101", 0.5), ("new", "new.svc:7101", 0.5)
    await asyncio.to_thread(set_units, former, *units)
    await asyncio.to_thread(set_units, coming, *units)
    given = ["--unit", f"new={coming}"]
    assert await run("status", "--control", "127.0.0.1:1", *given) == 0
    shown = capsys.readouterr().out
    assert [row[2] for row in rows_under("Units", shown)[1:]] == ["silent", "0"]


async def test_a_unit_that_is_not_listed_yet_has_no_requests(former: str, coming: str) -> None:
    await asyncio.to_thread(set_units, former, ("old", "old.svc:7101", 1.0))
    with Fleets(former, {"new": coming, "old": former}) as fleets:
        assert [(each.code, each.share) for each in await asyncio.to_thread(fleets.read)] == [
            ("old", 1.0), ("new", 0.0)
        ]  # fmt: skip


def test_without_any_answer_the_address_is_named() -> None:
    with (
        Fleets("127.0.0.1:1", {"new": "127.0.0.1:2"}) as fleets,
        pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"),
    ):
        fleets.read()
