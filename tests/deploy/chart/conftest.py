"""helm for the chart's tests. Where there is none they skip, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.chart.chart import NO_HELM, Helm, helm_program


@pytest.fixture
def helm(tmp_path: Path) -> Helm:
    program = helm_program()
    if program is None:
        pytest.skip(NO_HELM)
    return Helm(program, tmp_path)
