"""Engines of which a test sees the plans, and the field for which they refuse a request."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidRequestError
from engine.request import HandoffId, RequestSpec, SampledToken, StepPlan
from engine.run.core import EngineCore
from tests.engine.fakes import FakeEngine, fake_config, pool_is_whole


class Watched:
    """Remembers the plans of an engine's runner."""

    def __init__(self, engine: FakeEngine) -> None:
        self.plans: list[StepPlan] = []
        runner = engine.core._runner
        run = runner.run

        def remember(plan: StepPlan, *given: Any) -> list[SampledToken]:
            self.plans.append(plan)
            return run(plan, *given)

        runner.run = remember  # type: ignore[method-assign]

    def last(self) -> list[tuple[str, int, bool]]:
        """(request, tokens, samples) of the last step."""
        return [(s.request_id, len(s.token_ids), s.samples) for s in self.plans[-1].seqs]


def watched(num_blocks: int = 400, **changes: object) -> tuple[EngineCore, Watched]:
    engine = FakeEngine(fake_config(num_blocks, **changes))
    return engine.core, Watched(engine)


def refused_field(core: EngineCore, spec: RequestSpec) -> str:
    fields = set()
    for way_in in (core.add, core.reserve, lambda s: core.add_prefill(s, HandoffId("h"), 0)):
        with pytest.raises(InvalidRequestError) as caught:
            way_in(spec)
        fields.add(caught.value.field)
    assert not core.has_work()
    pool_is_whole(core)
    (field,) = fields
    return field
