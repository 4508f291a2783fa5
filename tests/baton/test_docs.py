"""What the pages say is what there is: links lead somewhere, named tests exist, cells are short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_WORDS = 30  # of a cell: a longer one is text with a heading


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    wrong = []
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            wrong.append(f"{path}#{anchor}")
    assert wrong == []


def test_every_failure_names_a_test_that_exists() -> None:
    rows = re.findall(r"^\|.*\|$", (ROOT / "docs/failures.md").read_text(), re.MULTILINE)
    rows = [row for row in rows if not row.startswith(("| fault", "| ---"))]
    named = [re.findall(r"`(test_\w+)` \|$", row) for row in rows]
    assert len(named) > 40
    assert [row for row, tests in zip(rows, named, strict=True) if not tests] == []
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    written = set(re.findall(r"def (test_\w+)\(", "\n".join(sources)))
    assert {test for tests in named for test in tests} <= written


@pytest.mark.parametrize("name", ["failures.md", "limits.md"])
def test_a_cell_is_a_phrase(name: str) -> None:
    rows = re.findall(r"^\|(.*)\|$", (ROOT / "docs" / name).read_text(), re.MULTILINE)
    assert rows
    cells = [cell.strip() for row in rows for cell in row.split("|")]
    assert [cell for cell in cells if len(cell.split()) > MOST_WORDS] == []
