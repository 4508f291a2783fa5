"""What the command line prints."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from baton.render import print_table


def test_a_table_that_is_too_wide_says_how_many_columns_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console(file=(shown := io.StringIO()), width=60)
    monkeypatch.setattr("baton.render.out", lambda: console)
    for columns in (["name"] * 3, ["a name of thirty letters, so it"] * 3):
        print_table("Pools", columns, [columns])
    assert shown.getvalue().count("(2 more columns do not fit)") == 1
