"""Tables of a part: printed as they come, kept for the files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.table import markdown


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        return f"### {self.title}\n\n{markdown(self.header, self.rows)}\n"


@dataclass
class Report:
    """What one part found. `add` and `leave_out` print at once."""

    part: str
    machine: str
    tables: list[Table] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What could not be run, and why."""
    failed: bool = False

    def add(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(title, tuple(header), tuple(tuple(row) for row in rows))
        self.tables.append(table)
        print(f"\n{table.text()}", flush=True)

    @contextmanager
    def table(self, title: str, header: Sequence[str]) -> Iterator[list[Sequence[str]]]:
        """Rows to be filled in; what is there counts also when an error ends them."""
        rows: list[Sequence[str]] = []
        try:
            yield rows
        finally:
            if rows:
                self.add(title, header, rows)

    def leave_out(self, why: str) -> None:
        self.left_out.append(why)
        print(f"left out: {why}", flush=True)

    def write(self, folder: Path) -> None:
        """`PART.json` and `PART.md`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.part}.json").write_text(json.dumps(asdict(self), indent=1))
        lines = [f"# bench.gpu: {self.part}", "", self.machine, ""]
        lines += [table.text() for table in self.tables]
        lines += [f"left out: {why}" for why in self.left_out]
        (folder / f"{self.part}.md").write_text("\n".join(lines).rstrip() + "\n")
