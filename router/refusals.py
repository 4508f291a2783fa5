"""Why a request can run nowhere, in words for its client."""

from __future__ import annotations

from baton.config.router import RouterConfig
from baton.errors import NoCapacityError, UnavailableError
from router.fleet import Fleet
from router.placement import Reach
from router.ticket import Ticket


def too_large(ticket: Ticket, fleet: Fleet, policy: RouterConfig) -> NoCapacityError | None:
    """Return why no worker of the fleet takes the request, usable now or not; None: one does."""
    num_tokens, least_new_tokens = len(ticket.prompt), ticket.least_new_tokens
    longest = fleet.longest_request
    if longest is not None and num_tokens + least_new_tokens > longest:
        return NoCapacityError(
            f"{num_tokens} tokens and {least_new_tokens} more exceed what every decode worker takes"
            f" ({longest} tokens)"
        )
    longest = fleet.longest_prompt
    if policy.local_prefill == "never" and longest is not None and num_tokens > longest:
        return NoCapacityError(
            f"{num_tokens} tokens exceed what every prefill worker takes ({longest} tokens)"
        )
    return None


def stranded(ticket: Ticket, within_reach: Reach) -> UnavailableError:
    """Return why the request ends that no usable worker took for long enough."""
    total_tokens, num_tokens = ticket.num_tokens, len(ticket.prompt)
    longest = int(within_reach.request_tokens.max(initial=0.0))
    if not longest:
        message = "no decode worker is live"
    elif total_tokens > longest:
        message = f"no decode worker that takes {total_tokens} tokens is live"
    elif not within_reach.prompt_tokens.any():
        message = "no prefill worker is live, or quarantine leaves nobody any room"
    else:
        message = (
            f"no prefill worker that takes {num_tokens} tokens is live, or quarantine leaves them"
            " no room"
        )
    return UnavailableError(message, retry_after_s=1.0)
