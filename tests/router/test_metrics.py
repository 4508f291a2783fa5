"""What a router tells Prometheus of its requests, whichever way they end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton.clock import ManualClock
from baton.config.router import MetricsConfig
from baton.errors import BatonError, InvalidRequestError, OverloadedError, ShuttingDownError
from baton.finish_reason import FinishReason
from baton.v1 import router_pb2
from router.report.metrics import Gauges, RouterMetrics
from tests.router.answers import PROMPT, ask_for, refusal
from tests.router.deployment import Deployment, deployment
from tests.router.request_outputs import output_for
from tests.router.scripted_worker import MODEL

OF_VLLM = """time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket prompt_tokens_total
generation_tokens_total num_requests_running num_requests_waiting kv_cache_usage_perc
request_prompt_tokens_bucket request_generation_tokens_bucket request_success_total
request_queue_time_seconds_sum request_prefill_time_seconds_sum request_decode_time_seconds_sum
prefix_cache_hits_total prefix_cache_queries_total"""
"""What dashboards of vLLM ask for, without `vllm:`."""


def samples(registry: CollectorRegistry, name: str, **labels: str) -> list[float]:
    """Of one series in all its labels' values, but for those that are named."""
    return [
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def told(d: Deployment, name: str, **labels: str) -> float:
    return sum(samples(d.router.metrics.registry, name, **labels))


async def test_a_stutter_is_among_the_gaps() -> None:
    clock = ManualClock(100.0)
    router, output = output_for(clock, ask_for("prompt", 40))
    output.emit([97], [], None)
    for gap_s in (0.015,) * 20 + (0.8,) + (0.015,) * 10:
        clock.advance(gap_s)
        output.emit([97], [], None)
    clock.advance(0.4)
    output.emit([97, 97, 97], [], FinishReason.STOP)  # come together: one gap
    output.finish()
    (gaps,) = router.metrics.itl.children.values()
    assert dict(zip(gaps.bounds, gaps.counts)) == dict.fromkeys(gaps.bounds, 0) | {
        **{0.02: 30, 0.5: 1, 1.0: 1}
    }
    took_s = 30 * 0.015 + 0.8 + 0.4
    assert gaps.total == pytest.approx(took_s)
    for stage, expected in (("decode", took_s), ("tpot", took_s / 34)):
        (found,) = samples(router.metrics.registry, f"baton_{stage}_seconds_sum")
        assert found == pytest.approx(expected)


def test_a_histogram_s_buckets_hold_all_up_to_their_bound() -> None:
    metrics = RouterMetrics("m")
    for length in (1, 4, 5, 10**7):
        metrics._of_end["num_prompt_tokens"].labels("m", "t", "stop").observe(length)
    value = metrics.registry.get_sample_value
    labels = {"model": "m", "tenant": "t", "end": "stop"}
    for bound, up_to in (("1.0", 1), ("4.0", 2), ("16.0", 3), ("+Inf", 4)):
        bucket = labels | {"le": bound}
        assert value("baton_request_prompt_tokens_bucket", bucket) == up_to
    assert value("baton_request_prompt_tokens_sum", labels) == 10 + 10**7
    assert value("baton_request_prompt_tokens_count", labels) == 4


async def test_requests_count_once_however_they_end() -> None:
    async with deployment() as d:
        await d.client.ask(ask_for(PROMPT, tenant="a"))
        await refusal(d.client, ask_for(PROMPT, tenant="a", model="another"))
        d.worker("p0").faults.fail_prefills = 9
        await refusal(d.client, ask_for(PROMPT, tenant="a"))
        d.worker("p0").faults.fail_prefills = 0
        d.worker("d0").may_decode.clear()
        running = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id="stopped")))
        await d.until(lambda: bool(d.worker("d0").runs))
        await d.client.stub.Abort(router_pb2.AbortRequest(request_id="stopped"))
        await running
        ends = {key[1:] for key in d.router.metrics.requests.children}
        assert ends == {
            ("a", "length"),
            ("a", "NOT_FOUND"),
            ("a", "KV_TRANSFER_FAILED"),
            ("", "aborted"),
        }
        for _, tenant, end in d.router.metrics.requests.children:
            of_it = {"tenant": tenant, "end": end, "model": MODEL}
            assert told(d, "baton_requests_total", **of_it) == 1
            ran = end != "NOT_FOUND"
            for stage in ("e2e_seconds", "queue_seconds", "request_prompt_tokens"):
                assert told(d, f"baton_{stage}_count", **of_it) == ran


@pytest.mark.parametrize(
    ("shape", "prefill", "decode", "kind"),
    [
        ({}, "prefill", "decode", "remote"),
        (
            {"prefill": 0, "decode": 0, "mixed": 1, "placement": {"local_prefill": "auto"}},
            *("mixed", "mixed", "local"),
        ),
    ],
)
async def test_stages_are_told_by_the_pool_that_they_were_at(
    shape: dict[str, Any], prefill: str, decode: str, kind: str
) -> None:
    async with deployment(**shape) as d:
        await d.client.ask(ask_for(PROMPT))
        for stages, pool in (
            (("ttft_seconds", "ttft_predicted_ratio", "prefill_seconds"), prefill),
            (("itl_seconds",), decode),
        ):
            for stage in stages:
                name = f"baton_{stage}_count"
                assert told(d, name, pool=pool) == told(d, name) > 0, stage
        handoffs = told(d, "baton_handoff_seconds_count", pool=decode)
        assert handoffs == (kind == "remote")
        assert told(d, "baton_placements_total", prefill=kind) == 1
        assert told(d, "baton_placements_total") == 1


async def test_tokens_are_wasted_by_attempts_and_clients() -> None:
    async with deployment(prefill=2) as d:
        d.worker("p0").faults.fail_handoffs = d.worker("p1").faults.fail_handoffs = 1
        answer = await d.client.ask(ask_for(PROMPT))
        retries = told(d, "baton_wasted_tokens_total", cause="retry")
        assert retries >= len(PROMPT) - answer.num_cached_tokens
        assert not told(d, "baton_wasted_tokens_total", cause="abort")
        d.worker("d0").may_decode.clear()
        await d.client.ask(ask_for(PROMPT[::-1]), until=lambda answer: bool(answer.ids))
        await d.check_empty()
        assert told(d, "baton_wasted_tokens_total", cause="abort") == len(PROMPT) + 1


@pytest.mark.parametrize(
    ("gaps_s", "error", "fields", "expected"),
    [
        ([0.5, 0.1, 0.1], None, {}, ["met"]),
        ([2.1, 0.1], None, {}, ["missed"]),
        ([0.5, 0.05, 0.5], None, {}, ["missed"]),  # a stutter that no median shows
        ([2.1, 0.5], None, {"ttft_target_ms": 3000, "itl_target_ms": 500}, ["met"]),
        ([0.5], BatonError("lost"), {}, ["missed"]),
        ([], OverloadedError("full"), {}, ["missed"]),
        ([], InvalidRequestError("what"), {}, []),
        ([0.5], ShuttingDownError("next", has_begun=True), {}, []),
    ],
)
async def test_a_request_is_good_that_ends_well_within_its_targets_or_the_router_s(
    gaps_s: Sequence[float],
    error: BatonError | None,
    fields: dict[str, Any],
    expected: list[str],
) -> None:
    clock = ManualClock(100.0)
    router, output = output_for(clock, ask_for("prompt", 10, **fields))
    for gap_s in gaps_s:
        clock.advance(gap_s)
        output.emit([97], [], None)
    output.finish() if error is None else output.fail(error)
    assert [result for _, _, result in router.metrics.goodput.children] == expected


def test_tenants_beyond_the_bound_are_one() -> None:
    metrics = RouterMetrics("m", MetricsConfig(tenants=2))
    assert [metrics.of(tenant)[1] for tenant in "abca"] == ["a", "b", "other", "a"]


@pytest.mark.parametrize("is_wanted", [False, True])
async def test_dashboards_of_vllm_have_their_names_where_they_are_wanted(is_wanted: bool) -> None:
    async with deployment(metrics={"vllm_names": is_wanted}) as d:
        await d.client.ask(ask_for(PROMPT))
        await refusal(d.client, ask_for(PROMPT, model="another"))
        metrics = d.router.metrics
        metrics.gauges = [d.router.gauges()]
        text = generate_latest(metrics.registry).decode()
        assert f'baton_model_info{{max_model_len="512",model="{MODEL}"' in text
        assert ("vllm:" in text) == is_wanted
        for name in OF_VLLM.split():
            found = samples(metrics.registry, f"vllm:{name}", model_name=MODEL)
            assert bool(found) == is_wanted, name
        if is_wanted:
            for ours, theirs in (("ttft", "time_to_first_token"), ("itl", "inter_token_latency")):
                assert told(d, f"vllm:{theirs}_seconds_sum") == told(d, f"baton_{ours}_seconds_sum")
            ends = told(d, "vllm:request_success_total"), told(d, "baton_requests_total")
            assert ends == (1, 2)


def test_gauges_are_sums_over_units() -> None:
    metrics = RouterMetrics("m")
    metrics.gauges = [Gauges(1, 3, 10, 0, ["live"], "a/1"), Gauges(2, 4, 20, 1, ["live"], "b/2")]
    value = metrics.registry.get_sample_value
    assert value("baton_queue_length") == 3
    assert value("baton_fleet_workers", {"state": "live"}) == 2
    assert len(samples(metrics.registry, "baton_model_info")) == 2
    metrics.gauges = []
    assert value("baton_fleet_workers", {"state": "live"}) is None
