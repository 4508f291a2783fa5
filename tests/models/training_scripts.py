"""The demo model's training scripts, each run in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TRAINING = Path(__file__).resolve().parents[2] / "models" / "demo_training"


def run(script: str, *arguments: str) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=TRAINING,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout
