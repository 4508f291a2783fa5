"""The contract of a placement's terms, which each file of `router/placement/terms` keeps."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from router.fleet.fleet_arrays import FleetArrays, Floats
from router.placement import choice, terms
from router.placement.choice import choose, ranked
from router.placement.placement import PlacementQuery
from router.placement.terms import TERMS, At, Term
from tests.router.fleets import POLICY, cheapest, entry_of, query, two_and_two
from tests.router.placement_oracle import random_fleet, random_query

NUM_SLOTS = 40
NOT_REPORTED = {"names", "links"}


def columns(fleet: FleetArrays) -> dict[str, Floats]:
    return {name: column for name, column in vars(fleet).items() if name not in NOT_REPORTED}


def conforms(term: Term) -> None:
    """It returns seconds for every slot, or None; writes nothing; and what it says of a worker
    depends on no other worker."""
    said = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        fleet = random_fleet(rng, NUM_SLOTS)
        asked = random_query(rng, fleet, POLICY)
        for column in (*columns(fleet).values(), asked.cached_tokens, asked.tokens_per_s):
            column.flags.writeable = False
        seconds = term.of(fleet, asked)
        if seconds is None:
            continue
        said += 1
        assert seconds.shape == (NUM_SLOTS,)
        assert seconds.dtype == np.float64
        assert not np.isnan(seconds).any()
        assert (seconds > -1.0).all(), "a bonus is small: else it hides what the others say"
        slot = int(rng.integers(NUM_SLOTS))
        others, asks = changed(fleet, asked, slot)
        again = term.of(others, asks)
        assert again is not None
        assert again[slot] == seconds[slot], "another worker has changed, and so has what it says"
    assert said, "it never had anything to say"
    assert isinstance(term.AT, At)


def changed(
    fleet: FleetArrays, asked: PlacementQuery, kept: int
) -> tuple[FleetArrays, PlacementQuery]:
    """Every worker but one is another one."""
    other, order = FleetArrays(NUM_SLOTS), np.roll(np.arange(NUM_SLOTS), 1)
    other.names, other.links = fleet.names, fleet.links
    order[kept] = kept
    for name, column in columns(fleet).items():
        getattr(other, name)[:] = column[order]
    return other, dataclasses.replace(
        asked,
        cached_tokens=asked.cached_tokens[order],
        tokens_per_s=asked.tokens_per_s[order],
        step_s=asked.step_s[order],
    )


@pytest.mark.parametrize("name", TERMS)
def test_a_term_keeps_the_contract(name: str) -> None:
    conforms(TERMS[name])


def broken(name: str) -> Term:
    """The queue's term with a fault."""

    def of(fleet: FleetArrays, asked: PlacementQuery) -> Floats | None:
        right = TERMS["queue"].of(fleet, asked)
        assert right is not None
        if name == "writes":
            fleet.queued_tokens[:] = 0
        faults = {
            "too short": right[:-1],
            "not a number": np.where(right > 1, np.nan, right),
            "of another type": right.astype(np.float32),
            "of the fleet": right - right.mean() / 1e6,
            "nothing": None,
            "huge": right - 100.0,
        }
        return faults.get(name, right)

    return SimpleNamespace(AT=At.PREFILL, of=of)


@pytest.mark.parametrize(
    "name",
    ["writes", "too short", "not a number", "of another type", "of the fleet", "nothing", "huge"],
)  # fmt: skip
def test_the_contract_finds_a_fault(name: str) -> None:
    conforms(broken("none"))
    with pytest.raises((AssertionError, ValueError)):
        conforms(broken(name))


WARM = """
\"\"\"Seconds that a worker loses to its heat.\"\"\"

import numpy as np

from router.placement.terms import At, FleetArrays, Floats, PlacementQuery

AT = At.{at}


def of(fleet: FleetArrays, query: PlacementQuery) -> Floats | None:
    return np.array([{seconds} if name == "{worker}" else 0.0 for name in fleet.names])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What is written there counts as a file of `router/placement/terms` once terms are loaded."""
    monkeypatch.setattr(terms, "__path__", [*terms.__path__, str(tmp_path)])
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(f"{terms.__name__}.{path.stem}", None)


def add(folder: Path, monkeypatch: pytest.MonkeyPatch, **filled: str) -> None:
    (folder / "warm.py").write_text(WARM.format(**filled))
    monkeypatch.setattr(choice, "TERMS", terms.load_terms())


@pytest.mark.parametrize(
    ("at", "worker", "pair"),
    [
        ("PREFILL", "p1", ("p0", "d0")),
        ("DECODE", "d0", ("p1", "d1")),
        ("EACH", "p1", ("p0", "d0")),
        ("EACH", "d0", ("p1", "d1")),
        ("ITSELF", "d0", ("p1", "d0")),
    ],
)
def test_a_file_is_all_that_a_term_needs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, at: str, worker: str, pair: tuple[str, str]
) -> None:
    fleet = two_and_two()
    asked = query(fleet, 1000, p1=500, d0=500)
    without = cheapest(fleet, asked)
    assert (without.prefill_worker, without.decode_worker) == ("p1", "d0")
    add(folder, monkeypatch, at=at, seconds="9.0", worker=worker)
    conforms(choice.TERMS["warm"])
    chosen = cheapest(fleet, asked)
    assert (chosen.prefill_worker, chosen.decode_worker) == pair
    slot = entry_of(fleet, worker).slot
    for candidate in ranked(asked, fleet.arrays, 100):
        is_local = candidate.prefill_slot is None
        there = {
            "PREFILL": candidate.prefill_slot == slot
            or (is_local and candidate.decode_slot == slot),
            "DECODE": candidate.decode_slot == slot,
            "ITSELF": is_local and candidate.decode_slot == slot,
        }
        there["EACH"] = there["PREFILL"] or there["DECODE"]
        assert candidate.terms_s["warm"] == (9.0 if there[at] else 0.0)
        assert candidate.cost_s == pytest.approx(sum(candidate.terms_s.values()))
        assert "ms warm" in candidate.reason


@pytest.mark.parametrize("at", ["PREFILL", "DECODE", "EACH"])
def test_a_worker_for_which_a_term_says_infinity_is_never_chosen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    add(folder, monkeypatch, at=at, seconds="np.inf", worker="d1" if at == "DECODE" else "p1")
    fleet = two_and_two()
    everything = ranked(query(fleet, 1000), fleet.arrays, 100)
    workers = {name for one in everything for name in (one.prefill_worker, one.decode_worker)}
    assert workers - {""} == {"p0", "p1", "d0", "d1"} - {"d1" if at == "DECODE" else "p1"}
    monkeypatch.setattr(choice, "TERMS", {**terms.TERMS, "warm": everybody_is_out(At[at])})
    assert choose(query(fleet, 1000), fleet.arrays, random.Random(0)) is None


def everybody_is_out(at: At) -> Term:
    return SimpleNamespace(AT=at, of=lambda fleet, _: np.full(len(fleet.names), np.inf))
