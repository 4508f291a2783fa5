"""What a planner section may hold."""

from __future__ import annotations

from typing import Any

import pytest

from baton.config.planner import PlannerConfig


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
