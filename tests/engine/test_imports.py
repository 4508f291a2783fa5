"""The engine needs torch, numpy and safetensors, and nothing that only serving needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.bare_machine import bare_environment

ROOT = Path(__file__).parents[2]


def test_the_engine_without_its_messages_is_imported_where_nothing_else_is_installed(
    tmp_path: Path,
) -> None:
    files = sorted(set((ROOT / "engine").rglob("*.py")) - {ROOT / "engine" / "wire.py"})  # protobuf
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in files
    ]
    assert len(modules) > 40
    code = f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\n"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=bare_environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
