"""How many workers the load of one moment asks of a pool, role by role, as a real number.

Prefill: enough for the tokens that arrive, so that the mean wait for a worker fits into what the
TTFT target leaves beside one prompt's own prefill, and to work off what has waited too long.
Decode: enough for the KV and streams that are there and wait, and for the ITL target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.config.planner import PlannerConfig
from cluster.planner.itl_curve import ItlCurve
from cluster.planner.measure import Demand, PoolMeasure
from cluster.pools.role_plan import Role

_WORTH_TELLING = 0.1  # share of the ITL target
_LEAST_WAIT = 0.1  # share of the TTFT target that a wait may always take, however long a prompt


@dataclass(frozen=True)
class Need:
    """Workers' worth of each role, at one moment."""

    prefill: float = 0.0
    decode: float = 0.0
    """Of a prefill pool: what the KV of its prompts needs."""

    def workers(self, role: Role) -> float:
        """How many workers that makes: in a mixed pool both roles take of the same."""
        return self.prefill + self.decode if role is Role.MIXED else max(self.prefill, self.decode)


@dataclass(frozen=True)
class NeedRange:
    """The need where something is unknown: `least` is what is sure, for scale-out; `most` takes
    workers that are not heard of for as busy as is planned with, for scale-in."""

    least: Need
    most: Need


@dataclass(frozen=True)
class PoolLoad:
    """What one pool has to carry."""

    role: Role
    measure: PoolMeasure
    demand: Demand
    prefill_share: float
    """Of the prompts that arrive and wait, which this pool computes."""
    decode_share: float
    """Of the streams that wait."""
    prefill_tokens_per_s: float | None
    """Of one of its workers, as last known."""
    itl_curve: ItlCurve
    extra_s: float
    """Of each gap that clients see, which its workers' decode steps are not."""

    def made_up_s(self, config: PlannerConfig) -> float:
        """By how much decode steps are to be shorter than the target, for gaps to be within it.

        It is half at most of the room that one stream alone leaves of the target: near its end each
        millisecond takes more workers than all before it. Of what more workers cannot mend at all
        it is ever less, and nothing from half a room beyond on: then steps alone are kept within
        the target, since fewer workers would make gaps longer still. There is no jump anywhere:
        near one, figures that come and go would have workers come and go.
        """
        room_s = config.itl_target_s - self.itl_curve.least_s
        return max(0.0, min(self.extra_s, room_s / 2, 1.5 * room_s - self.extra_s))


def need_of(load: PoolLoad, config: PlannerConfig) -> tuple[NeedRange, str] | None:
    """The need, and in words what it comes from, with its numbers. None: prompts are to be
    computed, and nothing tells how fast a worker is."""
    measure = load.measure
    most_prefill = least_prefill = 0.0
    words = []
    if load.role is not Role.DECODE:
        prefill = _Prefill.of(load, config)
        if prefill is None:
            return None
        least_prefill = prefill.workers(1.0)
        most_prefill = prefill.workers(load.demand.unheard_factor)
        words.append(prefill.words())
    if load.role is Role.PREFILL:
        least_decode = measure.kv_fill / config.max_kv_use
        if least_decode > least_prefill:
            words.append(
                f"KV fills {measure.kv_fill:.1f} of {measure.num_live} workers, which needs "
                f"{least_decode:.1f}"
            )
        most_decode = least_decode
    else:
        decode = _Decode.of(load, 1.0, config)
        least_decode = decode.workers
        most_decode = _Decode.of(load, load.demand.unheard_factor, config).workers
        words.append(decode.words())
    if measure.num_unheard:
        words.append(f"{measure.num_unheard} of {measure.num_live} workers not heard of")
    need = NeedRange(
        least=Need(least_prefill, least_decode),
        most=Need(most_prefill, most_decode + measure.num_unheard),
    )
    return need, ", ".join(words)


# --- prefill ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Prefill:
    """A pool's prompts."""

    requests_per_s: float
    tokens_per_s: float
    queued_tokens: float
    wait_s: float
    """Of a request that is typical for the queue's head: one odd request says nothing of it."""
    rate: float
    """Tokens/s of one worker; infinite where nothing has to be computed."""
    config: PlannerConfig

    @classmethod
    def of(cls, load: PoolLoad, config: PlannerConfig) -> _Prefill | None:
        demand, share = load.demand, load.prefill_share
        queue = demand.for_prefill
        tokens_per_s = share * demand.tokens_per_s
        queued_tokens = share * queue.num_tokens + load.measure.num_queued_tokens
        rate = load.prefill_tokens_per_s
        if rate is None:
            if tokens_per_s > 0 or queued_tokens > 0:
                return None
            rate = math.inf
        at_workers_s = load.measure.num_queued_tokens / rate / max(1, load.measure.num_live)
        wait_s = min(queue.oldest_wait_s, 2 * queue.median_wait_s) + at_workers_s
        requests_per_s = share * demand.requests_per_s
        return cls(requests_per_s, tokens_per_s, queued_tokens, wait_s, rate, config)

    @property
    def service_s(self) -> float:
        """One prompt's own prefill."""
        return self.tokens_per_s / self.requests_per_s / self.rate if self.requests_per_s else 0.0

    def workers(self, factor: float) -> float:
        """Enough for `factor` times what arrives."""
        config, load = self.config, factor * self.tokens_per_s / self.rate
        left_s = max(config.ttft_target_s - self.service_s, _LEAST_WAIT * config.ttft_target_s)
        steady = _workers_within(left_s, load, self.service_s, config.max_utilisation)
        return max(steady, load + self._backlog(load))

    def _backlog(self, load: float) -> float:
        """For what has waited too long: of a queue's tokens the share that came before the target's
        time. It asks for as much again as what arrives at most, and one worker: workers that are
        still to come were asked for because of the same queue."""
        if self.wait_s <= self.config.ttft_target_s:
            return 0.0
        late_tokens = self.queued_tokens * (1 - self.config.ttft_target_s / self.wait_s)
        return min(late_tokens / self.rate / self.config.catch_up_s, load + 1)

    def words(self) -> str:
        target_s = self.config.ttft_target_s
        over = "over" if self.wait_s > target_s else "within"
        said = f"queue wait {self.wait_s:.1f} s {over} target {target_s:g} s"
        if self.tokens_per_s <= 0:
            return said + ", no prompts arrive"
        said += (
            f", {self.tokens_per_s:,.0f} uncached tokens/s need {self.workers(1.0):.1f} workers "
            f"at {self.rate:,.0f} tokens/s"
        )
        if self.service_s >= target_s:
            said += f" (a prompt alone takes {self.service_s:.2g} s: more workers cannot mend that)"
        return said


def _workers_within(wait_s: float, load: float, service_s: float, max_utilisation: float) -> float:
    """The fewest workers that keep the mean wait within `wait_s`, at `load` workers' worth of work.

    More than the load allows for at `max_utilisation`, and finite: waits shrink with every worker.
    """
    low = load / max_utilisation
    if _mean_wait_s(low, load, service_s) <= wait_s:
        return low
    high = 2 * low + 1
    while _mean_wait_s(high, load, service_s) > wait_s:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        if _mean_wait_s(middle, load, service_s) > wait_s:
            low = middle
        else:
            high = middle
    return high


def _mean_wait_s(workers: float, load: float, service_s: float) -> float:
    """Of one queue before several workers, arrivals and services memoryless: the approximation of
    Sakasegawa (1977), "An approximation formula Lq = a * rho^b / (1 - rho)"."""
    if load <= 0 or service_s <= 0:
        return 0.0
    busy = load / workers
    if busy >= 1:
        return math.inf
    queued = busy ** (math.sqrt(2 * (workers + 1)) - 1)
    return float(service_s * queued / (workers * (1 - busy)))


# --- decode -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Decode:
    """A pool's streams."""

    tokens_per_s: float
    """Wanted: what the streams that run get, or what arrives if that is more; and for what waits.
    """
    room: float
    """Workers that the streams' KV, or their number, needs."""
    itl: float
    """Workers that the ITL target needs: none where it is out of their reach."""
    load: PoolLoad
    config: PlannerConfig

    @classmethod
    def of(cls, load: PoolLoad, factor: float, config: PlannerConfig) -> _Decode:
        """For `factor` times what arrives."""
        measure, curve = load.measure, load.itl_curve
        running = float(measure.num_streams)
        kv_of_stream = measure.fill / config.max_kv_use / running if running else 0.0
        if measure.itl is None:  # nothing runs, or on workers alone that have only just begun
            waiting = load.decode_share * load.demand.for_decode.num_requests
            return cls(0.0, (running + min(waiting, running)) * kv_of_stream, 0.0, load, config)
        now_s = measure.itl.itl_s
        tokens_per_s = _wanted_tokens_per_s(load, factor, running / now_s, config)
        room = curve.workers_for_kv(tokens_per_s, now_s, kv_of_stream)
        step_s = config.itl_target_s - load.made_up_s(config)
        itl = curve.workers_for_itl(tokens_per_s, now_s, step_s)
        return cls(tokens_per_s, room, itl, load, config)

    @property
    def workers(self) -> float:
        return max(self.room, self.itl)

    def words(self) -> str:
        measure, queue = self.load.measure, self.load.demand.for_decode
        said = [_streams_words(measure)]
        if queue.num_requests:
            waiting = _counted(queue.num_requests, "request")
            said.append(f"{waiting} waiting for room, the oldest for {queue.oldest_wait_s:.1f} s")
        if measure.num_streams:
            wanted = f" for {self.tokens_per_s:,.0f} tokens/s" if self.tokens_per_s else ""
            said.append(f"room{wanted} needs {self.room:.1f} workers")
        if measure.itl is not None:
            said.append(self._itl_words(measure.itl.itl_s + self.load.extra_s))
        return ", ".join(said)

    def _itl_words(self, itl_s: float) -> str:
        target_s, extra_s = self.config.itl_target_s, self.load.extra_s
        over = "over" if itl_s > target_s else "within"
        said = f"ITL {1000 * itl_s:.1f} ms {over} target {1000 * target_s:g} ms"
        made_up_s, curve = self.load.made_up_s(self.config), self.load.itl_curve
        if not curve.reaches(target_s):
            return said + " also for one stream alone: more workers cannot mend that"
        if made_up_s < extra_s or extra_s >= _WORTH_TELLING * target_s:
            said += f", {1000 * extra_s:.1f} ms of it beside decode steps"
        if made_up_s < extra_s:
            can = "hardly" if curve.reaches(target_s - extra_s) else "cannot"
            said += f": more workers {can} mend that, steps of {1000 * (target_s - made_up_s):.3g}"
            return f"{said} ms need {self.itl:.1f} workers"
        return said + f" needs {self.itl:.1f} workers"


def _wanted_tokens_per_s(
    load: PoolLoad, factor: float, now_per_s: float, config: PlannerConfig
) -> float:
    """Output tokens. What waits asks for as much again at most: workers that are still to come
    were asked for because of the same requests."""
    demand, share = load.demand, load.decode_share
    waiting = share * demand.for_decode.num_requests
    if demand.output_tokens is None:
        running = load.measure.num_streams
        return now_per_s * (1 + min(waiting / running, 1.0))
    arriving_per_s = factor * share * demand.requests_per_s * demand.output_tokens
    late_per_s = waiting * demand.output_tokens / config.catch_up_s
    return max(now_per_s, arriving_per_s) + min(late_per_s, arriving_per_s)


def _streams_words(measure: PoolMeasure) -> str:
    if not measure.num_streams:
        return "no streams run"
    streams = _counted(measure.num_streams, "stream")
    workers = _counted(measure.num_live, "worker")
    return f"{streams} fill {measure.fill / max(1, measure.num_live):.0%} of {workers}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
