"""A minute of a router's figures, looked at once a second, for `router.report.diagnosis`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from router.report.diagnosis import Diagnosis, Snapshot, diagnose
from router.report.metrics import RouterMetrics
from router.units.router import Router

NUM_KEPT = 61


class Snapshots:
    """Own the last minute's snapshots. What no counter has is summed up here, a look at a time."""

    def __init__(self) -> None:
        self._kept: deque[Snapshot] = deque([{}], maxlen=NUM_KEPT)
        self._last_s: float | None = None

    def look(self, now_s: float, metrics: RouterMetrics, routers: Iterable[Router]) -> None:
        """Take a snapshot."""
        last = self._kept[-1]
        took_s, self._last_s = now_s - (self._last_s or now_s), now_s
        seen = {name: of for name, of in last.items() if not name.startswith("pace/")}
        seen |= metrics.totals()

        def add(name: str, value: float) -> None:
            seen[name] = [float(value) + sum(seen.get(name, ()))]

        add("looks", 1)
        add("seconds", took_s)
        add("squared_arrivals", (sum(seen["arrivals"]) - sum(last.get("arrivals", ()))) ** 2)
        for router in routers:
            a = router.fleet.arrays
            for each in router.admission.waits():
                add("decode_waits_s" if each.for_decode else "prefill_waits_s", took_s)
            for entry in router.fleet:
                slot, it = entry.slot, entry.facts
                pace, known_s = 1 / a.prefill_tokens_per_s[slot], a.prefill_measured_s[slot]
                add(f"workers/{it.pool}", 1)
                if it.can_prefill:
                    add(f"busy/{it.pool}", a.queued_tokens[slot] > 0)
                if it.can_decode:
                    add(f"running/{it.pool}", a.running[slot] / a.max_running[slot])
                    add(f"kv/{it.pool}", router.fleet.kv_use(entry))
                    pace, known_s = a.decode_step_s[slot], a.decode_measured_s[slot]
                seen[f"pace/{it.pool}/{it.worker_id}"] = [float(pace * (known_s > 0))]
        self._kept.append(seen)

    def diagnosis(self, ttft_s: float, itl_s: float) -> Diagnosis:
        """Over the last minute, as far as it is kept. `ttft_s`, `itl_s`: targets."""
        return diagnose(self._kept[0], self._kept[-1], ttft_s, itl_s)
