"""The output of one request, without its worker."""

from __future__ import annotations

import random

from baton.clock import ManualClock
from baton.v1 import router_pb2
from router.fleet.registry import RegistryAccess
from router.report.metrics import RouterMetrics
from router.request.request_output import RequestOutput
from router.request.run_parts import ServedModel
from router.request.validate import RequestLimits
from router.units.router import Router
from tests.identities import ROUTER
from tests.router.deployment import QUICK, default_model
from tests.router.scripted_worker import MODEL
from tests.router.text_fixtures import parse


def output_for(
    clock: ManualClock, request: router_pb2.GenerateRequest
) -> tuple[Router, RequestOutput]:
    router = Router(
        RegistryAccess("127.0.0.1:1", QUICK, ROUTER),
        ServedModel(MODEL, default_model()),
        RouterMetrics(),
        on_fault=lambda task: None,
        clock=clock,
        rng=random.Random(0),
    )
    parsed = parse(request, default_model(), RequestLimits(512), (MODEL,), clock.now_s())
    return router, RequestOutput(parsed, router.parts, 0.0)
