"""Whether a new cohort serves worse than the serving one did in the same time. Pure.

What clients bring about, and routers could not leave out, both cohorts have alike: which requests a
cohort gets is drawn by their ids. So a rate of failures says nothing by itself, and neither does a
difference that chance alone may make.

Requests that their clients gave up on, after these had stood still for far too long, are failures
beside those of the serving cohort only: with nothing to compare them with it may be the clients, or
a load that is too much for any version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from deploy.api.serving_cluster import CohortRollout

MIN_REQUESTS = 10
"""Of fewer nothing is said: a single failure would be many percent."""
_CHANCE = 1e-3
"""A difference that two equal cohorts show less often than this is one."""


@dataclass(frozen=True)
class Figures:
    """What became of a cohort's requests since the step began; counts come from rates, so they
    need not be whole."""

    num_requests: float = 0.0
    """Without those that their clients cancelled, or let no time to serve them."""
    num_failures: float = 0.0
    """Those that are not their clients' fault."""
    itl_s: float | None = None
    """None: no gap between tokens was seen."""
    num_abandoned: float = 0.0
    """Beside `num_requests`: those that stood still for so long that their clients ended them."""
    itl_before_s: float | None = None
    """In a step before, while more of this one is to come."""

    @property
    def with_abandoned(self) -> Figures:
        """As failures."""
        lost = self.num_abandoned
        return Figures(self.num_requests + lost, self.num_failures + lost, self.itl_s)

    @property
    def failed_percent(self) -> float:
        return 100 * self.num_failures / self.num_requests if self.num_requests else 0.0


@dataclass(frozen=True)
class Watched:
    """What was seen of a step."""

    seconds: float
    """Without those in which nobody looked."""
    figures: Mapping[str, Figures]
    """By cohort."""


class Failures(StrEnum):
    FEW = "few"
    """As far as is known: no more than allowed beyond the serving cohort's, or by chance."""
    IN_DOUBT = "in doubt"
    """Too many, of too few requests, or beside too few of the serving cohort's."""
    MANY = "many"


def compared(new: Figures, serving: Figures) -> tuple[Figures, Figures]:
    """With what both lost by their clients' patience, where there is anything of `serving`."""
    beside = serving.with_abandoned
    return (new.with_abandoned, beside) if round(beside.num_requests) else (new, serving)


def failures(new: Figures, serving: Figures, rollout: CohortRollout) -> Failures:
    """Of `new`, beside those of `serving`: none, where nothing was seen of it."""
    new, serving = compared(new, serving)
    if new.failed_percent - serving.failed_percent <= rollout.max_error_percent:
        return Failures.FEW
    if new.num_requests < MIN_REQUESTS:
        return Failures.IN_DOUBT
    if not round(serving.num_requests) or chance(new, serving) < _CHANCE:
        return Failures.MANY
    return Failures.IN_DOUBT if serving.num_requests < MIN_REQUESTS else Failures.FEW


def is_in_doubt(new: Figures, serving: Figures, rollout: CohortRollout) -> bool:
    """Whether something looks wrong, of which more has to be seen."""
    if failures(new, serving, rollout) is Failures.IN_DOUBT:
        return True
    if serving.itl_s is None:  # all that runs may be the new one's: slow requests last
        return bool(slowness(new, replace(serving, itl_s=serving.itl_before_s), rollout))
    return new.num_requests < MIN_REQUESTS and bool(slowness(new, serving, rollout))


def slowness(new: Figures, serving: Figures, rollout: CohortRollout) -> str:
    """What to say of tokens that come too slowly; empty: they do not. The first requests of a
    version, whose workers are cold, may be slow: it is one of ten requests at least."""
    if new.itl_s is None or not serving.itl_s:
        return ""
    if new.itl_s <= rollout.max_itl_factor * serving.itl_s:
        return ""
    return (
        f"{1000 * new.itl_s:.1f} ms between its tokens, {1000 * serving.itl_s:.1f} ms between the "
        f"old one's: maxItlFactor is {rollout.max_itl_factor:g}"
    )


def chance(new: Figures, serving: Figures) -> float:
    """How likely it is that of the failures of both, fallen on their requests blindly, as many as
    here or more fall on the new one's (Fisher's exact test, one-sided)."""
    num_new, num_serving = round(new.num_requests), round(serving.num_requests)
    failed_new = min(num_new, round(new.num_failures))
    failed = failed_new + min(num_serving, round(serving.num_failures))
    whole = _log_choices(num_new + num_serving, failed)
    return math.fsum(
        math.exp(_log_choices(num_new, k) + _log_choices(num_serving, failed - k) - whole)
        for k in range(failed_new, min(num_new, failed) + 1)
        if failed - k <= num_serving
    )


def _log_choices(count: int, chosen: int) -> float:
    return math.lgamma(count + 1) - math.lgamma(chosen + 1) - math.lgamma(count - chosen + 1)
