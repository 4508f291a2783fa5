"""A process's log: what its lines hold, and how a file changes them while it runs."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.process.log import LOG_VARIABLE, SETTINGS_VARIABLE, LogSettings, set_up_logging

log = logging.getLogger("cluster.worker")
RANK_1 = {"worker": "decode-0", "rank": "1", "pool": "decode", "model": "demo"}
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(autouse=True)
def root() -> Iterator[None]:
    yield
    logging.basicConfig(handlers=[logging.NullHandler()], level="WARNING", force=True)


def test_a_line_says_when_who_and_what_as_text_and_as_json(tmp_path: Path) -> None:
    for written_as in ("text", "json"):
        set_up_logging(LogSettings("info", written_as), {}, tmp_path / written_as, **RANK_1)  # type: ignore[arg-type]
        try:
            raise ValueError("wrong")
        except ValueError:
            log.exception("lease %s", "ended", extra={"fields": {"request_id": "r-1"}})
    text, *raised = (tmp_path / "text").read_text().splitlines()
    said = r'ERROR decode-0\.r1 cluster\.worker: lease ended \{"request_id": "r-1"\}'
    assert re.fullmatch(f"{TIME} {said}", text)
    line = json.loads((tmp_path / "json").read_text())
    assert re.fullmatch(TIME, line.pop("time"))
    assert line.pop("exception").splitlines() == raised
    known = {"level": "error", "logger": "cluster.worker", "message": "lease ended"}
    assert line == known | RANK_1 | {"request_id": "r-1"}


def test_the_followed_files_settings_count_as_soon_as_it_changes(tmp_path: Path) -> None:
    settings, written = tmp_path / "cluster.yaml", tmp_path / "log"
    pod = {LOG_VARIABLE: str(written), SETTINGS_VARIABLE: str(settings)}
    followed = set_up_logging(LogSettings("warning"), pod, tmp_path / "unused")
    log.info("not yet")
    settings.write_text("of_a_later_release: {a: 1}\nlog_level: debug\nlog_format: json\n")
    followed.look()
    log.debug("now")
    settings.write_text("log_level: loud\n")
    followed.look()
    log.debug("still")
    lines = list(map(json.loads, written.read_text().splitlines()))
    assert [line["message"] for line in lines if line["logger"] == log.name] == ["now", "still"]
    assert "log_level: must be one of" in written.read_text(), "the log says what is wrong"
