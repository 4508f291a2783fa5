"""How many retries the fleet, and each tenant, may still ask of the workers."""

from __future__ import annotations

from collections import OrderedDict

from baton.clock import NowS
from baton.config.router import RouterConfig

MAX_TENANTS = 4096  # the longest unused is forgotten, and with it starts from a full bucket


class TokenBucket:
    """`burst` tokens at first, refilled at `per_s` up to `burst`."""

    def __init__(self, burst: float, per_s: float, now_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._level, self._at_s = float(burst), now_s

    def level(self, now_s: float) -> float:
        self._level = min(self._burst, self._level + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return self._level

    def take(self) -> None:
        self._level -= 1


class RetryBudget:
    """Own the fleet's bucket and one per tenant: a retry draws on both or on neither."""

    def __init__(self, config: RouterConfig, clock: NowS) -> None:
        self._config, self._clock = config, clock
        self._fleet = TokenBucket(config.retry_burst, config.retry_per_s, clock())
        self._tenants: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, tenant: str) -> bool:
        """True when the retry may go ahead."""
        now = self._clock()
        bucket = self._tenants.get(tenant)
        if bucket is None:
            config = self._config
            bucket = TokenBucket(config.tenant_retry_burst, config.tenant_retry_per_s, now)
            self._tenants[tenant] = bucket
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        if self._fleet.level(now) < 1 or bucket.level(now) < 1:
            return False
        self._fleet.take()
        bucket.take()
        return True
