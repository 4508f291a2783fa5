"""How many workers one moment's load needs from a pool, per role, as a real number.

Prefill: enough for the tokens that arrive, so that the mean wait fits into the TTFT target beside
one prompt's own prefill, plus enough to work off what has waited too long. Decode: enough for the
KV and streams that run and wait, and for the ITL target.

`PlannerState` is what the planner remembers between calls. The caller keeps it. If it is lost,
nothing shrinks until a stable window has passed again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.config.planner import PlannerConfig
from baton.fleet import Role
from cluster.planner.measure import Demand, ItlCurve, PoolMeasure
from cluster.planner.signals import PoolSignals
from cluster.role_plan import RolePlan

_WORTH_NAMING = 0.1  # share of the ITL target
_LEAST_WAIT = 0.1  # share of the TTFT target that a wait may always take, even for long prompts


@dataclass(frozen=True)
class Need:
    """The need of each role at one moment, in workers."""

    prefill: float = 0.0
    decode: float = 0.0
    """The need for streams; in a prefill pool, for its prompts' KV."""

    def workers(self, role: Role) -> float:
        """The need of a pool of this role. In a mixed pool both roles share the workers."""
        return self.prefill + self.decode if role is Role.MIXED else max(self.prefill, self.decode)


@dataclass(frozen=True)
class NeedRange:
    """The need when some figures are missing. `least` counts what is certain, for scale-out. `most`
    counts silent workers as fully used, for scale-in."""

    least: Need
    most: Need


@dataclass(frozen=True)
class PoolLoad:
    """The load on one pool."""

    role: Role
    measure: PoolMeasure
    demand: Demand
    prefill_share: float
    """Share of the arriving and waiting prompts that this pool computes."""
    decode_share: float
    """Share of the waiting streams."""
    memory: PoolMemory

    @property
    def extra_s(self) -> float:
        """Seconds of each gap that clients see beyond the decode step."""
        return self.memory.extra.of_gap_s if self.memory.extra else 0.0

    def made_up_s(self, config: PlannerConfig) -> float:
        """Seconds by which decode steps must be shorter than the target, to correct for `extra_s`.

        The room is the target less a single stream's step. The correction takes at most half of it,
        because the last milliseconds need the most workers. It fades to zero as the excess exceeds
        what more workers could fix; then only the steps themselves are kept within the target. It
        has no jump, since figures that vary around one would add and remove workers.
        """
        room_s = config.itl_target_s - self.memory.itl_curve.least_s
        return max(0.0, min(self.extra_s, room_s / 2, 1.5 * room_s - self.extra_s))


def need_of(load: PoolLoad, config: PlannerConfig) -> tuple[NeedRange, str] | None:
    """The need, and a text that explains it with its numbers. None: prompts arrive, but no worker's
    prefill rate is known."""
    measure = load.measure
    most_prefill = least_prefill = 0.0
    words = []
    if load.role is not Role.DECODE:
        prefill = PrefillLoad.of(load, config)
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
class PrefillLoad:
    """The prefill load of a pool; `baton size` asks for one that does not run yet."""

    requests_per_s: float
    tokens_per_s: float
    queued_tokens: float
    wait_s: float
    """Typical wait at the queue's head: a single odd request does not count."""
    rate: float
    """Tokens/s of one worker; infinite if nothing has to be computed."""
    config: PlannerConfig

    @classmethod
    def of(cls, load: PoolLoad, config: PlannerConfig) -> PrefillLoad | None:
        demand, share = load.demand, load.prefill_share
        queue = demand.for_prefill
        tokens_per_s = share * demand.tokens_per_s
        queued_tokens = share * queue.num_tokens + load.measure.num_queued_tokens
        rate = load.memory.prefill_tokens_per_s
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
        """Seconds of one prompt's own prefill."""
        return self.tokens_per_s / self.requests_per_s / self.rate if self.requests_per_s else 0.0

    def workers(self, factor: float) -> float:
        """Workers for `factor` times what arrives."""
        config, load = self.config, factor * self.tokens_per_s / self.rate
        left_s = max(config.ttft_target_s - self.service_s, _LEAST_WAIT * config.ttft_target_s)
        steady = _workers_within(left_s, load, self.service_s, config.max_utilisation)
        return max(steady, load + self._backlog(load))

    def _backlog(self, load: float) -> float:
        """Workers for what has waited too long: the share of a queue's tokens that is older than
        the target. At most as much as what arrives plus one worker, because workers that still
        start were requested for the same queue."""
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
    """The fewest workers that keep the mean wait within `wait_s`, at a load of `load` workers.

    At least what `max_utilisation` allows for the load, and finite: every worker shortens the wait.
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
    """Mean wait of an M/M/c queue by the approximation of Sakasegawa (1977), "An approximation
    formula Lq = a * rho^b / (1 - rho)"."""
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
    """The decode load of a pool."""

    tokens_per_s: float
    """Demand: what running streams get or what arrives, whichever is more, plus what waits."""
    room: float
    """Workers needed for the streams' KV or their number."""
    itl: float
    """Workers needed for the ITL target; 0 if it is out of reach."""
    load: PoolLoad
    config: PlannerConfig

    @classmethod
    def of(cls, load: PoolLoad, factor: float, config: PlannerConfig) -> _Decode:
        """The load of `factor` times what arrives."""
        measure, curve = load.measure, load.memory.itl_curve
        running = float(measure.num_streams)
        kv_of_stream = measure.fill / config.max_kv_use / running if running else 0.0
        if measure.itl is None:  # nothing runs, or only on workers that have just started
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
        made_up_s, curve = self.load.made_up_s(self.config), self.load.memory.itl_curve
        if not curve.reaches(target_s):
            return said + " also for one stream alone: more workers cannot mend that"
        if made_up_s < extra_s or extra_s >= _WORTH_NAMING * target_s:
            said += f", {1000 * extra_s:.1f} ms of it beside decode steps"
        if made_up_s < extra_s:
            can = "hardly" if curve.reaches(target_s - extra_s) else "cannot"
            said += f": more workers {can} mend that, steps of {1000 * (target_s - made_up_s):.3g}"
            return f"{said} ms need {self.itl:.1f} workers"
        return said + f" needs {self.itl:.1f} workers"


def _wanted_tokens_per_s(
    load: PoolLoad, factor: float, now_per_s: float, config: PlannerConfig
) -> float:
    """Demand in output tokens/s. Waiting requests at most double it, because workers that still
    start were requested for the same requests."""
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


# --- memory -------------------------------------------------------------------------------------

_EXTRA_OVER_S = 60.0  # time constant for the excess over decode steps, which varies a lot
_HELD_UP_S = 6.0  # longest pause between calls without a gap in the samples
_SEEN_S = 10.0  # routers report on the last 10 s


@dataclass(frozen=True)
class Sample:
    """The need at one moment, and its mean over the panic window before it."""

    at_s: float
    need: NeedRange
    mean: NeedRange


@dataclass(frozen=True)
class Extra:
    """Seconds by which clients' gaps exceed the workers' decode steps, smoothed."""

    of_gap_s: float
    at_s: float
    """When it was last known."""

    def then(self, newest: Extra) -> Extra:
        """Blend in a newer value, weighted by the time that it covers."""
        seen_s = min(newest.at_s - self.at_s, _SEEN_S)
        weight = 1 - math.exp(-seen_s / _EXTRA_OVER_S)
        return Extra(self.of_gap_s + weight * (newest.of_gap_s - self.of_gap_s), newest.at_s)


@dataclass(frozen=True)
class PoolMemory:
    """What the planner remembers about one pool."""

    samples: tuple[Sample, ...] = ()
    """Samples of the stable window, oldest first."""
    known_since_s: float | None = None
    """Since when the samples have no gap; None: there are none."""
    prefill_tokens_per_s: float | None = None
    """Newest known rate of a worker."""
    itl_curve: ItlCurve = field(default_factory=ItlCurve)
    extra: Extra | None = None
    """The newest excess; None: unknown within the stable window."""
    desired_seen: int | None = None
    """The pool's size in the newest signals."""
    shrunk_at_s: float | None = None
    """When the size last became smaller."""
    has_served: bool = False
    """Whether a worker has been live since its size was last 0."""
    wanted_since_s: float | None = None
    """Since when its size has not been 0; None: it is."""
    roles_seen: RolePlan | None = None
    switched_at_s: float | None = None
    """When the role plan last changed."""

    def see(
        self,
        pool: PoolSignals,
        measure: PoolMeasure,
        now_s: float,
        is_new: bool,
        config: PlannerConfig,
    ) -> PoolMemory:
        """Remember the signals. Without `is_new` they were remembered before."""
        shrunk = self.desired_seen is not None and pool.desired_replicas < self.desired_seen
        switched = self.roles_seen is not None and pool.role_plan != self.roles_seen
        is_wanted, since_s = pool.desired_replicas > 0, self.wanted_since_s
        curve = self.itl_curve
        if is_new and measure.itl is not None:
            curve = curve.with_point(measure.itl)
        extra = self.extra
        if extra is not None and now_s - extra.at_s > config.stable_window_s:
            extra = None
        if is_new and measure.extra_s is not None:
            newest = Extra(measure.extra_s, now_s)
            extra = newest if extra is None else extra.then(newest)
        return replace(
            self,
            prefill_tokens_per_s=measure.prefill_tokens_per_s or self.prefill_tokens_per_s,
            itl_curve=curve,
            extra=extra,
            desired_seen=pool.desired_replicas,
            shrunk_at_s=now_s if shrunk else self.shrunk_at_s,
            has_served=is_wanted and (self.has_served or measure.num_live > 0),
            wanted_since_s=(now_s if since_s is None else since_s) if is_wanted else None,
            roles_seen=pool.role_plan,
            switched_at_s=now_s if switched else self.switched_at_s,
        )

    def add(self, need: NeedRange, now_s: float, config: PlannerConfig) -> PoolMemory:
        """Remember a need; it replaces one of the same moment."""
        earlier = [sample for sample in self.samples if sample.at_s < now_s]
        recent = [s.need for s in earlier if now_s - s.at_s < config.panic_window_s]
        sample = Sample(now_s, need, _mean([*recent, need]))
        kept = [s for s in earlier if now_s - s.at_s <= config.stable_window_s]
        gap_s = now_s - earlier[-1].at_s if earlier else 0.0
        is_broken = not earlier or gap_s > 2 * config.panic_window_s + _HELD_UP_S
        return replace(
            self,
            samples=(*kept, sample),
            known_since_s=now_s if is_broken else self.known_since_s,
        )

    def wanted(self, role: Role) -> float:
        """Need for scale-out: the mean of the panic window, in workers."""
        return self.samples[-1].mean.least.workers(role)

    def peak(self, role: Role) -> float:
        """Need for scale-in: the maximum of the stable window and of this moment, in workers."""
        means = max(sample.mean.most.workers(role) for sample in self.samples)
        return max(means, self.samples[-1].need.most.workers(role))


def _mean(needs: list[NeedRange]) -> NeedRange:
    return NeedRange(
        _mean_need([need.least for need in needs]),
        _mean_need([need.most for need in needs]),
    )


def _mean_need(needs: list[Need]) -> Need:
    return Need(
        sum(need.prefill for need in needs) / len(needs),
        sum(need.decode for need in needs) / len(needs),
    )


@dataclass(frozen=True)
class PlannerState:
    """The state of all pools. A new planner begins with `PlannerState()`."""

    at_s: float | None = None
    """Time of the newest signals."""
    busy_at_s: float | None = None
    """When there last was a request anywhere, or it was unknown."""
    pools: Mapping[str, PoolMemory] = field(default_factory=dict)
