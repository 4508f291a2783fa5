"""Which unit a request is drawn for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.door.unit import drawn

OLD, NEW = 0, 1
SHARES = st.floats(0, 1)
IDS = [f"request-{number}" for number in range(2000)]


@given(st.text(), SHARES, SHARES)
def test_a_growing_share_moves_requests_to_the_youngest_unit_alone(
    request_id: str, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    before, after = drawn(request_id, [1 - less, less]), drawn(request_id, [1 - more, more])
    assert (before, after) in ((OLD, OLD), (OLD, NEW), (NEW, NEW))


@given(SHARES)
def test_each_unit_gets_its_share(share: float) -> None:
    num_new = sum(drawn(request_id, [1 - share, share]) for request_id in IDS)
    assert abs(num_new / len(IDS) - share) < 0.05


@given(st.text())
def test_a_unit_without_a_share_gets_nothing(request_id: str) -> None:
    assert drawn(request_id, [1.0, 0.0]) == OLD
    assert drawn(request_id, [0.0, 1.0 - 1e-7]) == NEW
    assert drawn(request_id, [1.0]) == OLD
