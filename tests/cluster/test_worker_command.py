"""`python -m cluster.worker.process`: a mistake is told before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.worker import process as worker_process


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pools: {a: {role: mixed}, b: {role: decode}}", "no pool 'decod'; there are: a, b"),
        ("modle: fake", "modle: unknown key; did you mean 'model'?"),
    ],
)
def test_a_pool_that_is_not_there_or_a_wrong_file_is_told_in_a_line(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "cluster.yaml").write_text(text)
    options = ["--config", str(file), "--pool", "decod", "--control", "127.0.0.1:1"]
    assert worker_process.main(options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(told)
