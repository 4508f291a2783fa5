"""What a planner section may hold."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from typing import Any

import pytest

from baton.config import settings
from baton.config.planner import PlannerConfig, PlannerTargets, PlannerTuning


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttft_target_s", 0.0),
        ("itl_target_s", float("nan")),
        ("catch_up_s", float("inf")),
        ("panic_window_s", -1.0),
        ("stable_window_s", 10.0),
        ("stale_after_s", 0.0),
        ("scale_in_hold_s", -1.0),
        ("role_hold_s", float("inf")),
        ("warm_up_s", -0.1),
        ("max_utilisation", 1.1),
        ("max_kv_use", 0.0),
        ("tolerance", 1.0),
        ("consolidation_margin", -0.1),
        ("max_step_out", 0),
        ("max_step_in", 0),
        ("scale_to_zero_after_s", 299.0),
        ("min_prefill_per_decode", 0.0),
        ("max_prefill_per_decode", float("inf")),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must "):
        PlannerConfig(**{field: value})


def test_ratio_bounds_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^min_prefill_per_decode must not be above .* \(1\)"):
        PlannerConfig(min_prefill_per_decode=2.0, max_prefill_per_decode=1.0)


def test_a_section_of_a_file_reads_back_as_what_was_written() -> None:
    config = PlannerConfig(scale_to_zero_after_s=900.0, min_prefill_per_decode=0.5)
    written = settings.dump(config, base=PlannerConfig())
    assert written == {"scale_to_zero_after_s": 900.0, "min_prefill_per_decode": 0.5}
    assert settings.parse(PlannerConfig, written, source="cluster.yaml") == config


def test_every_setting_says_what_it_means() -> None:
    reported = {
        field.target.id
        for cls in (PlannerTargets, PlannerTuning)
        for body in ast.parse(inspect.getsource(cls)).body
        if isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:])
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }
    assert reported == {field.name for field in dataclasses.fields(PlannerConfig)}
