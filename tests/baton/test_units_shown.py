"""How `baton status` and `baton top` show two units: each has a control service of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.errors import UnavailableError
from baton.v1.control_pb2 import Unit
from cli.main import main
from cli.status import Fleets
from tests.baton.small_router import SmallControl

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def former() -> SmallControl:
    return SmallControl()


@pytest.fixture
def address(former: SmallControl) -> Iterator[str]:
    """The control service of the unit `former`."""
    with former.serve() as address:
        yield address


@pytest.fixture
def coming(former: SmallControl, address: str) -> Iterator[str]:
    """The control service of another unit, which the former one lists, too."""
    with SmallControl().serve() as coming:
        former.units = [unit("old", 0.9), unit("new", 0.1, coming)]
        yield coming


def unit(code: str, share: float, control_address: str = "") -> Unit:
    return Unit(code=code, share=share, control_address=control_address)


def rows_under(title: str, shown: str) -> list[list[str]]:
    return [line.split() for line in shown.split(f"{title}\n")[1].split("\n\n")[0].splitlines()]


@pytest.mark.parametrize("command", ["status", "top"])
def test_one_unit_is_shown_without_a_table_of_units(
    command: str, former: SmallControl, address: str, capsys: Capture
) -> None:
    former.units = [unit("old", 1.0, "in-cluster.svc:7101")]
    assert main([command, "--control", address]) == 0
    shown = capsys.readouterr().out
    assert "Units" not in shown
    assert rows_under("Pools", shown)[0][:2] == ["pool", "role"]


@pytest.mark.parametrize("command", ["status", "top"])
def test_two_units_are_shown_with_their_shares_and_pools(
    command: str, address: str, coming: str, capsys: Capture
) -> None:
    assert main(["scale", "decode", "3", "--control", coming]) == 0
    capsys.readouterr()
    assert main([command, "--control", address]) == 0
    shown = capsys.readouterr().out
    assert rows_under("Units", shown) == [
        ["unit", "requests", "live", "workers"], ["old", "90%", "1"], ["new", "10%", "3"]
    ]  # fmt: skip
    assert [row[:6] for row in rows_under("Pools", shown)[1:]] == [
        ["old", "decode", "decode", "1", "of", "1"], ["new", "decode", "decode", "3", "of", "3"]
    ]  # fmt: skip


def test_a_unit_whose_control_service_does_not_answer_is_shown_as_silent(
    former: SmallControl, address: str, capsys: Capture
) -> None:
    former.units = [unit("old", 0.9), unit("new", 0.1, "127.0.0.1:1")]
    assert main(["status", "--control", address]) == 0
    shown = capsys.readouterr().out
    assert rows_under("Units", shown)[2] == ["new", "10%", "silent"]
    assert [row[0] for row in rows_under("Pools", shown)] == ["unit", "old"]


def test_addresses_that_are_given_stand_for_those_of_the_list(
    former: SmallControl, address: str, capsys: Capture
) -> None:
    former.units = [unit("old", 0.5, "old.svc:7101"), unit("new", 0.5, "new.svc:7101")]
    assert main(["status", "--control", "127.0.0.1:1", "--unit", f"new={address}"]) == 0
    shown = capsys.readouterr().out
    assert [row[2] for row in rows_under("Units", shown)[1:]] == ["silent", "1"]


def test_a_unit_that_is_not_listed_yet_has_no_requests(
    former: SmallControl, address: str, coming: str
) -> None:
    former.units = [unit("old", 1.0, "old.svc:7101")]
    with Fleets(address, {"new": coming, "old": address}) as fleets:
        assert [(each.code, each.share) for each in fleets.read()] == [("old", 1.0), ("new", 0.0)]


def test_without_any_answer_the_address_is_named() -> None:
    with (
        Fleets("127.0.0.1:1", {"new": "127.0.0.1:2"}) as fleets,
        pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"),
    ):
        fleets.read()
