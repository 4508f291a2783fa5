"""Why a request can run nowhere, in words for its client."""

from __future__ import annotations

from baton.errors import NoCapacityError, NotResumableError, UnavailableError
from router.cohorts import Cohort
from router.config import RouterConfig
from router.fleet import Fleet
from router.placement import Reach
from router.ticket import Refusal, Ticket


def hopeless(ticket: Ticket, fleet: Fleet, policy: RouterConfig) -> Refusal | None:
    """Of a request that nobody can serve, however long it waits."""
    return _too_large(ticket, fleet, policy) or _unreadable(ticket, fleet)


def _too_large(ticket: Ticket, fleet: Fleet, policy: RouterConfig) -> NoCapacityError | None:
    """Of a request that no worker of the fleet takes, be it usable now or not."""
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


def _unreadable(ticket: Ticket, fleet: Fleet) -> Refusal | None:
    """Of a request that cannot be read with the text of any cohort that there is, or may be once
    its workers come, or of its own if it is bound. One whose text is not read may yet take it; one
    whose tokenizer is not that of its token ids never does. A stream that has begun here is read
    with no other; nor does anybody know what one's text is whose cohort is not told of."""
    if not ticket.refusals or ticket.keeps_text:
        return None
    if ticket.is_bound and not fleet.texts.knows(ticket.cohort or ""):
        return None
    cohorts = {ticket.cohort or ""} if ticket.is_bound else fleet.known_cohorts()
    are_all_its = ticket.is_bound or not ticket.is_of_ids
    texts = {
        text
        for text in map(fleet.texts.of, cohorts)
        if text is None or are_all_its or fleet.texts.have_the_same_ids(text, ticket.text)
    }
    if not texts <= ticket.refusals.keys():
        return None
    return next((error for text, error in ticket.refusals.items() if text in texts), None)


def stranded(
    ticket: Ticket, within_reach: Reach, fleet: Fleet
) -> UnavailableError | NotResumableError:
    """Of a request that no usable worker, of its cohort and model if it is bound, took for long
    enough. One whose cohort's workers are to come back may go on then."""
    if ticket.is_bound:
        if not ticket.keeps_text and ticket.cohort in fleet.texts.unread:
            message = f"this router has not read the text of cohort {ticket.cohort!r}"
            return UnavailableError(message, retry_after_s=1.0)
        return cut_off(ticket.cohort, fleet)
    total_tokens, num_tokens = ticket.num_tokens, len(ticket.prompt)
    longest = int(within_reach.request_tokens.max(initial=0.0))
    unread = [cohort for cohort in fleet.kinds.cohorts if fleet.texts.of(cohort) is None]
    if not longest:
        message = "no decode worker is live"
    elif len(unread) == len(fleet.kinds.cohorts):
        message = "this router has not read the text of the model that is live"
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


def cut_off(cohort: Cohort | None, fleet: Fleet) -> UnavailableError | NotResumableError:
    """Of a stream that has begun."""
    wants = f"the model that its tokens come from, of its cohort, {cohort!r}"
    if fleet.stopped.lacks(cohort):
        message = f"no worker that can go on with the request is live yet: it takes {wants}"
        return UnavailableError(message, retry_after_s=1.0)
    return NotResumableError(
        f"no worker that can go on with the request is left: it takes {wants};"
        " ask anew under a new id",
        field="cohort",
    )
