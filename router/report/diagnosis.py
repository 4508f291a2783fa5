"""Why first tokens come late, gaps grow, memory is full or caching does not help: causes, the
likeliest first, with what to do. `diagnose` is a pure function of two snapshots of a router's
figures, which `router.units.snapshots` takes.

A cause's score is how many times a target it takes by itself, so that causes of late first tokens
and of long gaps compare. A root, such as one slow worker, scores above what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from router.report.metrics import GAPS, SECONDS, TOKENS

FULL, NOT_SMALL = 0.85, 0.6  # a pool that is busier than this is too small for more than bursts
CLUMPED, LEAST_REQUESTS = 3.0, 10  # variance over mean of a second's arrivals: 1 if by chance
UNEVEN, SLOW = 3.0, 2.0  # mean length of prompts over their median; a worker over its peers
LOCAL, MANY_HITS, FEW_HITS, WORTH_CACHING = 0.2, 0.5, 0.1, 256
ACTIONS = {
    "bursts": "keep room: `baton scale {pool} {more}`, or a higher min_replicas for the planner",
    "decode full": "`baton scale {pool} {more}`; or a higher max_num_seqs while gaps stay short",
    "prefill behind": "`baton scale {pool} {more}`",
    "long before short": "`baton scale {pool} {more}`: short prompts find a free worker",
    "long prompts": "not more workers: a higher tensor_parallel of {pool}, or shorter prompts",
    "slow worker": "look at its log and its machine, then `baton drain` it",
    "KV full": "`baton scale {pool} {more}`, more kv_memory_bytes, or less largest_max_tokens",
    "lost prefix": "see what changed where prompts begin: a date, an id; put what differs last",
    "no shared prefix": "if prompts should share one, put what differs (dates, ids) last",
    "decode batches": "`baton scale {pool} {more}`, or lower its max_num_seqs",
    "prefill beside decode": "scale prefill, lower max_itl_factor, or local_prefill: never",
    "slow handoffs": "test the network between the pools (`kubectl baton preflight`)",
    "slow steps": "a higher tensor_parallel of {pool}; look for other work on its machines",
}


Snapshot = Mapping[str, Sequence[float]]
"""Sums since the router's start; a histogram's are its counts, then its sum. `pace/POOL/WORKER` is
as now: learned seconds of a decode step, or of a prompt token where it does not decode."""
Diagnosis = tuple[float, Sequence[tuple[str, str]], Sequence[tuple[str, str, str]]]
"""Seconds, figures, and cause, what shows it, what to do; none of these: nothing is wrong."""
Found = tuple[str, float, str, str]  # cause, score, what shows it, pool


def diagnose(before: Snapshot, after: Snapshot, ttft_s: float, itl_s: float) -> Diagnosis:
    """Find what is wrong. `ttft_s`, `itl_s`: targets of 95th percentiles (first tokens, gaps)."""
    w, told = _Window(before, after, ttft_s, itl_s), []
    rules = (_late_first_tokens, _long_gaps, _slow_workers, _memory_and_cache)
    for cause, _, says, pool in sorted((f for rule in rules for f in rule(w)), key=lambda f: -f[1]):
        num = sum(name.startswith(f"pace/{pool}/") for name in after)
        more = w.enough(cause, num)
        told.append((cause, says, ACTIONS[cause].format(pool=pool, more=more)))
    return w.total("seconds"), w.figures(), told


class _Window:
    """Own what two snapshots differ in."""

    def __init__(self, before: Snapshot, after: Snapshot, ttft_s: float, itl_s: float) -> None:
        self.before, self.after, self.ttft_s, self.itl_s = before, after, ttft_s, itl_s
        num_first = max(1.0, self.num("ttft_seconds"))
        waits_s = [self.total(f"{role}_waits_s") for role in ("prefill", "decode")]
        # Requests that are still in line are in the looks' sums alone.
        waited_s = sum(waits_s) / max(num_first, _share(sum(waits_s), self.total("seconds")))
        line_s = max(self.mean("queue_seconds"), waited_s)
        self.prefill, self.decode = self.fullest("busy"), self.fullest("running")
        # Between two looks room for one comes and goes.
        is_decode_full = self.decode[0] >= FULL and self.prefill[0] < NOT_SMALL
        self.for_decode_s = line_s * (is_decode_full or _share(waits_s[1], sum(waits_s)))
        at_worker_s = self.total("worker_queue_seconds") / num_first
        self.for_prefill_s = line_s - self.for_decode_s + at_worker_s
        self.prefill_s = self.total("prefill_seconds") / num_first
        self.first_s, self.gap_s = self.p("ttft_seconds", SECONDS), self.p("itl_seconds", GAPS)
        self.late, self.long_gap = max(self.first_s, line_s) / ttft_s, self.gap_s / itl_s
        self.hits = _share(*(self.total(f"{it}_prompt_tokens") for it in ("cached", "prefilled")))
        local, remote = (self.total(f"placements/{where}") for where in ("local", "remote"))
        self.local, self.length = _share(local, local + remote), self.mean("request_prompt_tokens")

    def of(self, name: str) -> Sequence[float]:
        after, before = self.after.get(name, ()), self.before.get(name, ())
        return [one - other for one, other in zip(after, before or [0.0] * len(after))]

    def total(self, name: str) -> float:
        return sum(self.of(name)[-1:])

    def num(self, name: str) -> float:
        return sum(self.of(name)[:-1])

    def mean(self, name: str) -> float:
        return _share(self.total(name), self.num(name))

    def p(self, name: str, bounds: Sequence[float], share: float = 0.95) -> float:
        """Return a histogram's percentile, evenly within its bucket; 0: it is empty."""
        left, least = share * self.num(name), 0.0
        for bound, count in zip(bounds, self.of(name)):
            if count and left <= count:
                return least + (bound - least) * left / count
            left, least = left - count, bound
        return least if left else 0.0

    def fullest(self, what: str) -> tuple[float, str]:
        """Return the highest mean of a pool, over its workers and the looks, and its name."""
        pools = [name.partition("/")[2] for name in self.after if name.startswith(f"{what}/")]
        means = (_share(self.total(f"{what}/{it}"), self.total(f"workers/{it}")) for it in pools)
        return max(zip(means, pools), default=(0.0, ""))

    def enough(self, cause: str, num: int) -> int:
        """Return how many workers `num` should be, for those in line beside those at work (Little's
        law); at most four times as many, since a line can grow without end."""
        wait_s, work_s = {
            "decode full": (self.for_decode_s, self.mean("decode_seconds")),
            "prefill behind": (self.for_prefill_s, self.prefill_s),
        }.get(cause, (0.0, 0.0))
        return max(num + 1, min(4 * num, math.ceil(num * (1 + _share(wait_s, work_s)))))

    def is_burst(self, use: float) -> bool:
        looks, num = max(1.0, self.total("looks")), self.total("arrivals")
        variance = self.total("squared_arrivals") / looks - (num / looks) ** 2
        return num >= LEAST_REQUESTS and variance >= CLUMPED * num / looks and use < NOT_SMALL

    def figures(self) -> list[tuple[str, str]]:
        met, missed = (self.total(f"goodput_requests/{result}") for result in ("met", "missed"))
        return [
            ("requests/s", f"{_share(self.total('arrivals'), self.total('seconds')):.1f}"),
            ("within targets", f"{_share(met, met + missed):.0%}"),
            ("first token, p95", _time(self.first_s)),
            ("gap, p95", _time(self.gap_s)),
            ("waits for prefill", _time(self.for_prefill_s)),
            ("waits for decode", _time(self.for_decode_s)),
            ("prefill", _time(self.prefill_s)),
            ("handoff", _time(self.mean("handoff_seconds"))),
            ("found cached", f"{self.hits:.0%}"),
            ("prefilled where decoded", f"{self.local:.0%}"),
            ("wasted tokens", f"{self.total('wasted_tokens'):.0f}"),
        ]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


# --- rules ----------------------------------------------------------------------------------------


def _late_first_tokens(w: _Window) -> Iterator[Found]:
    stages_s = w.for_prefill_s + w.prefill_s + w.for_decode_s
    least_s = max(stages_s / 4, w.ttft_s / 10) if w.late > 1 else float("inf")
    use, pool = w.prefill
    if w.for_prefill_s > least_s:
        half, cause = w.p("request_prompt_tokens", TOKENS, 0.5), "prefill behind"
        says = f"prompts wait {_time(w.for_prefill_s)} for {pool}, which is {use:.0%} busy"
        says += f" and found {w.hits:.0%} of their tokens cached"
        if w.is_burst(use):
            cause = "bursts"
        elif w.length > UNEVEN * half:
            cause = "long before short"
            says += f"; half have up to {half:.0f} tokens, the mean {w.length:.0f}"
        yield cause, w.for_prefill_s / w.ttft_s, says, pool
    if w.prefill_s > least_s:
        says = f"a prefill takes {_time(w.prefill_s)}, a prompt has {w.length:.0f} tokens"
        yield "long prompts", w.prefill_s / w.ttft_s, says, pool
    use, pool = w.decode
    if w.for_decode_s > least_s and w.fullest("kv")[0] < FULL:
        says = f"prompts wait {_time(w.for_decode_s)} for {pool}, whose streams are {use:.0%} taken"
        cause = "bursts" if w.is_burst(use) else "decode full"
        yield cause, w.for_decode_s / w.ttft_s, says, pool


def _long_gaps(w: _Window) -> Iterator[Found]:
    (use, pool), behind_s = w.decode, w.mean("handoff_seconds") - w.prefill_s
    cause, why = "decode batches" if use >= NOT_SMALL else "slow steps", f"it is {use:.0%} full"
    if w.local >= LOCAL:
        cause, why = "prefill beside decode", f"{w.local:.0%} of prompts are prefilled there"
    elif behind_s > w.itl_s:
        cause, why = "slow handoffs", f"KV arrives {_time(behind_s)} after its prefill"
    if w.long_gap > 1:
        yield cause, w.long_gap, f"one gap in 20 takes {_time(w.gap_s)} at {pool}; {why}", pool


def _slow_workers(w: _Window) -> Iterator[Found]:
    paces = {tuple(name.split("/")[1:]): of[0] for name, of in w.after.items() if "pace/" in name}
    for (pool, worker), pace in paces.items():
        peers = [its for (of, name), its in paces.items() if of == pool and name != worker and its]
        if pace >= SLOW * (usual := median(peers or [pace])) > 0:
            says = f"{worker} takes {_time(pace)}, others of {pool} {_time(usual)}"
            yield "slow worker", pace / usual * max(w.late, w.long_gap), says, pool


def _memory_and_cache(w: _Window) -> Iterator[Found]:
    (use, pool), length = w.fullest("kv"), w.length + w.mean("request_output_tokens")
    if use >= FULL:
        says = f"{pool} uses {use:.0%} of its KV; a stream has about {length:.0f} tokens"
        yield "KV full", use + w.for_decode_s / w.ttft_s, says, pool
    once, num = _Window({}, w.before, w.ttft_s, w.itl_s).hits, w.num("request_prompt_tokens")
    says, cost_s = f"{w.hits:.0%} of prompt tokens are cached", w.for_prefill_s + w.prefill_s
    if once >= MANY_HITS and w.hits < once / 2 and num >= LEAST_REQUESTS:
        yield "lost prefix", 1.5 * cost_s / w.ttft_s, f"{says}, {once:.0%} were before", ""
    elif w.late > 1 and w.hits < FEW_HITS and w.length >= WORTH_CACHING:
        yield "no shared prefix", w.prefill_s / w.ttft_s / 2, says, ""
