"""Find a request that another router started: its decode worker keeps it for a while."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

import grpc
import grpc.aio

from baton.errors import AlreadyExistsError, NotResumableError, UnavailableError
from baton.v1 import worker_pb2
from router.fleet.fleet_links import FleetLinks
from router.fleet.session import SessionLostError
from router.fleet.worker_link import WorkerLink
from router.request.attempt import Attempt
from router.request.run_parts import Sought
from router.request.validate import ParsedRequest

log = logging.getLogger(__name__)

# The last one: of a worker that has not yet read that there is a session.
_NO_ANSWER = {
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.FAILED_PRECONDITION,
}


@dataclass(frozen=True)
class Found:
    link: WorkerLink
    attempt: Attempt
    response: worker_pb2.AttachResponse


def check_resumable(parsed: ParsedRequest) -> None:
    """Check that a request which no decode worker keeps can be run again.

    Raises NotResumableError when its client has seen tokens, and nobody knows the seed that they
    were drawn with.
    """
    if parsed.resume_from_index and parsed.seed is None:
        raise NotResumableError(
            "no decode worker keeps the request, and without its seed it cannot be run again;"
            " send the seed from Routed",
            field="seed",
        )


async def is_kept(sought: Sought, links: FleetLinks, timeout_s: float) -> bool:
    """Whether a decode worker keeps the request. Raises what `find_running` does."""
    await links.wait_tried(timeout_s)
    asked = links.with_open_session()
    asking = (_attach(link, sought, timeout_s) for link in asked)
    answers = await asyncio.gather(*asking, return_exceptions=True)
    if any(isinstance(answer, worker_pb2.AttachResponse) for answer in answers):
        return True
    _check_nowhere(sought, links, dict(zip(asked, answers, strict=True)))
    return False


async def find_running(
    sought: Sought,
    links: FleetLinks,
    make_attempt: Callable[[WorkerLink], Attempt],
    timeout_s: float,
) -> Found | None:
    """Ask every decode worker; of several attempts the newest is taken, the others are cancelled.

    Raises AlreadyExistsError when the id runs only with another body or seed, which is left alone.
    If the request itself runs too, it is followed: asking has moved it here. Raises
    UnavailableError when tokens are out and a worker that may keep them has yet to answer: run
    again they would be sampled again.
    """
    await links.wait_tried(timeout_s)
    asked = {
        link: asyncio.create_task(_ask(link, make_attempt(link), sought, timeout_s))
        for link in links.with_open_session()
    }
    try:
        answers = await asyncio.gather(*asked.values(), return_exceptions=True)
    except asyncio.CancelledError:
        _abandon(asked.values())
        raise
    found = [answer for answer in answers if isinstance(answer, Found)]
    found.sort(key=lambda one: one.response.spec.attempt)
    for older in found[:-1]:
        older.attempt.abandon()
        older.link.session.cancel(sought.wire_id, older.response.spec.attempt)
    if found:
        return found[-1]
    _check_nowhere(sought, links, dict(zip(asked, answers, strict=True)))
    return None


def _check_nowhere(sought: Sought, links: FleetLinks, answers: Mapping[WorkerLink, object]) -> None:
    """No worker that answered keeps the request. Raise the reason why it cannot run again."""
    heard = {k: answer for k, answer in answers.items() if not isinstance(answer, _NoAnswerError)}
    if sought.resume_from_index:
        _check_all_heard(links, heard.keys())
    for answer in heard.values():
        if isinstance(answer, BaseException):
            raise answer


def _abandon(asked: Iterable[asyncio.Task[Found | None]]) -> None:
    for task in asked:
        if task.done() and not task.cancelled() and task.exception() is None:
            one = task.result()
            if one is not None:
                one.attempt.abandon()


def _check_all_heard(links: FleetLinks, heard: Set[WorkerLink]) -> None:
    """Raises UnavailableError while a worker may keep the request: one that may answer in a moment,
    or one that a silent or just started registry may yet report."""
    if not links.are_all_known:
        message = "the registry has yet to report which workers may keep the request"
        raise UnavailableError(message, retry_after_s=1.0)
    for link in links:
        if link not in heard and link.may_be_heard_again:
            worker_id = link.entry.facts.worker_id
            message = f"{worker_id} has yet to answer whether it keeps the request"
            raise UnavailableError(message, retry_after_s=1.0)


class _NoAnswerError(Exception):
    """A worker did not say whether it keeps the request."""


async def _ask(
    link: WorkerLink, attempt: Attempt, sought: Sought, timeout_s: float
) -> Found | None:
    """The attempt listens before the worker is asked, so that no token falls between."""
    try:
        attempt.listen()
    except SessionLostError as error:
        attempt.abandon()
        raise _NoAnswerError from error
    response = None
    try:
        response = await _attach(link, sought, timeout_s)
    finally:
        if response is None:
            attempt.abandon()
    return None if response is None else Found(link, attempt, response)


async def _attach(
    link: WorkerLink, sought: Sought, timeout_s: float
) -> worker_pb2.AttachResponse | None:
    """None: the worker does not keep the request. Raises AlreadyExistsError, _NoAnswerError."""
    try:
        return await link.attach(
            sought.wire_id, sought.tenant, sought.body_digest, sought.seed, timeout_s
        )
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.ALREADY_EXISTS:
            raise AlreadyExistsError(
                f"request {sought.request_id!r} runs with another body or seed",
                field="request_id",
            ) from None
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            log.warning("attach at %s: %s", link.entry.facts.worker_id, error.code().name)
        if error.code() in _NO_ANSWER:
            raise _NoAnswerError from error
        return None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return None  # it has left the fleet while it was asked
