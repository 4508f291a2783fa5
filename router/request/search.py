"""Find a request that runs at a decode worker, which keeps it for a while: one that another router
started, or one whose session was lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc

from baton.errors import AlreadyExistsError, NotResumableError, UnavailableError
from baton.link.frames import LinkError
from baton.v1 import worker_pb2
from router.fleet.fleet_links import FleetLinks
from router.fleet.session import AttemptHandler, Report, SessionLostError
from router.fleet.worker_link import WorkerLink
from router.request.client_request import ClientRequest, RequestHead
from router.request.validate import ParsedRequest

log = logging.getLogger(__name__)

Sought = ClientRequest | ParsedRequest
"""A request that a decode worker may keep."""
_NO_ANSWER = {
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.FAILED_PRECONDITION,
}


class Probe:
    """Keeps what a decode worker sends of a request while it is asked for it: tokens may come
    before the answer that leads up to them. An `AttemptHandler` of the worker's session."""

    number = None  # messages of every attempt

    def __init__(self, wire_id: str, on_lost: Callable[[str], None] | None = None) -> None:
        """`on_lost`: is told of a lost session; None, and `lost` says so."""
        self.wire_id, self.lost = wire_id, ""
        self._on_lost = on_lost
        self._tokens: list[worker_pb2.RequestTokens] = []
        self._reports: list[Report] = []

    def replay(self, handler: AttemptHandler) -> None:
        """Hand over what was kept of the handler's attempt, tokens first."""
        for tokens in self._tokens:
            if tokens.attempt == handler.number:
                handler.on_tokens(tokens)
        for report in self._reports:
            if report.attempt == handler.number:
                handler.on_report(report)

    def on_tokens(self, tokens: worker_pb2.RequestTokens) -> None:
        self._tokens.append(tokens)

    def on_report(self, report: Report) -> None:
        self._reports.append(report)

    def on_session_lost(self, message: str) -> None:
        self.lost = message
        if self._on_lost is not None:
            self._on_lost(message)


@dataclass(frozen=True)
class Running:
    """A request that a decode worker keeps, and that now belongs to this router's session."""

    link: WorkerLink
    probe: Probe
    response: worker_pb2.AttachResponse

    def leave(self) -> None:
        self.link.session.leave(self.probe)


def check_resumable(head: RequestHead) -> None:
    """Check that a request which no decode worker keeps can be run again.

    Raises NotResumableError when its client has seen tokens, and nobody knows the seed that they
    were drawn with.
    """
    if head.resume_from_index and head.seed is None:
        raise NotResumableError(
            "no decode worker keeps the request, and without its seed it cannot be run again;"
            " send the seed from Routed",
            field="seed",
        )


async def is_kept(sought: Sought, links: FleetLinks, timeout_s: float) -> bool:
    """Ask whether a decode worker keeps the request. Raises what `find_running` does."""
    await links.wait_tried(timeout_s)
    asked = links.with_open_session()
    asking = (_attach(link, sought, timeout_s) for link in asked)
    answers = await asyncio.gather(*asking, return_exceptions=True)
    if any(isinstance(answer, worker_pb2.AttachResponse) for answer in answers):
        return True
    _check_nowhere(sought, links, dict(zip(asked, answers, strict=True)))
    return False


async def find_running(sought: Sought, links: FleetLinks, timeout_s: float) -> Running | None:
    """Ask every decode worker; of several attempts the newest is taken, the others are cancelled.

    Raises AlreadyExistsError when the id runs only with another body or seed, which is left alone.
    If the request itself runs too, it is followed: asking has moved it here. Raises
    UnavailableError when tokens are out and a worker that may keep them has yet to answer: run
    again they would be sampled again.
    """
    await links.wait_tried(timeout_s)
    asked = {
        link: asyncio.create_task(_ask(link, sought, timeout_s))
        for link in links.with_open_session()
    }
    try:
        answers = await asyncio.gather(*asked.values(), return_exceptions=True)
    except asyncio.CancelledError:
        for task in asked.values():
            has_answer = task.done() and not task.cancelled() and not task.exception()
            if has_answer and (one := task.result()) is not None:
                one.leave()
        raise
    found = [answer for answer in answers if isinstance(answer, Running)]
    found.sort(key=lambda one: one.response.spec.attempt)
    for older in found[:-1]:
        older.leave()
        older.link.session.cancel(sought.head.wire_id, older.response.spec.attempt)
    if found:
        return found[-1]
    _check_nowhere(sought, links, dict(zip(asked, answers, strict=True)))
    return None


def _check_nowhere(sought: Sought, links: FleetLinks, answers: Mapping[WorkerLink, object]) -> None:
    """Raise the reason why a request that no worker is known to keep cannot run again.

    With tokens out that is UnavailableError while a worker may keep it: one that may answer in a
    moment, or one that a silent or just started registry may yet report.
    """
    heard = {k: answer for k, answer in answers.items() if not isinstance(answer, _NoAnswerError)}
    if sought.head.resume_from_index:
        if not links.are_all_known:
            message = "the registry has yet to report which workers may keep the request"
            raise UnavailableError(message, retry_after_s=1.0)
        for link in links:
            if link not in heard and link.may_be_heard_again:
                worker_id = link.entry.facts.worker_id
                message = f"{worker_id} has yet to answer whether it keeps the request"
                raise UnavailableError(message, retry_after_s=1.0)
    for answer in heard.values():
        if isinstance(answer, BaseException):
            raise answer


class _NoAnswerError(Exception):
    """A worker did not say whether it keeps the request."""


async def _ask(link: WorkerLink, sought: Sought, timeout_s: float) -> Running | None:
    """The probe listens before the worker is asked, so that no token falls between."""
    probe = Probe(sought.head.wire_id)
    try:
        link.session.listen(probe)
    except SessionLostError as error:
        raise _NoAnswerError from error
    response = None
    try:
        response = await _attach(link, sought, timeout_s)
    finally:
        if response is None:
            link.session.leave(probe)
    return None if response is None else Running(link, probe, response)


async def _attach(
    link: WorkerLink, sought: Sought, timeout_s: float
) -> worker_pb2.AttachResponse | None:
    """None: the worker does not keep the request. Raises AlreadyExistsError, _NoAnswerError."""
    head = sought.head
    try:
        return await link.attach(
            worker_pb2.AttachRequest(
                request_id=head.wire_id,
                tenant=head.tenant,
                body_digest=sought.body_digest,
                seed=head.seed,
            ),
            timeout_s,
        )
    except LinkError as error:
        if error.code() is grpc.StatusCode.ALREADY_EXISTS:
            raise AlreadyExistsError(
                f"request {head.request_id!r} runs with another body or seed",
                field="request_id",
            ) from None
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            log.warning("attach at %s: %s", link.entry.facts.worker_id, error.code().name)
        if error.code() in _NO_ANSWER:
            raise _NoAnswerError from error
        return None


class NotAttachedError(Exception):
    """The request is not there any more, or the worker did not come back in time."""


class TakenOverError(Exception):
    """Another router has attached the request since, or has begun a newer attempt of it."""


async def attach_again(
    link: WorkerLink, spec: worker_pb2.RequestSpec, probe: Probe, timeout_s: float
) -> worker_pb2.AttachResponse:
    """Attach to the attempt that `spec` began, in the session that comes next; again whenever the
    connection breaks under way. The worker has continued it, or kept its output, for the router
    that followed it last.

    Raises NotAttachedError, TakenOverError.
    """
    asked = worker_pb2.AttachRequest(
        request_id=spec.request_id,
        tenant=spec.tenant,
        body_digest=spec.body_digest,
        seed=spec.seed,
        attempt=spec.attempt,
    )
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                await link.session.wait_open()
                link.session.listen(probe)
                try:
                    return await link.attach(asked, timeout_s)
                except LinkError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
    except LinkError as error:
        if error.code() is grpc.StatusCode.ALREADY_EXISTS:
            raise TakenOverError(error.details()) from None
        raise NotAttachedError(error.details()) from None
    except (TimeoutError, SessionLostError) as error:
        raise NotAttachedError(str(error) or "no answer") from None
