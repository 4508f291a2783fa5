"""Continue an attempt in its decode worker's next session.

The worker has continued the request, or kept its output. It gives both to the router that followed
the request last, and to no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio

from baton.v1 import worker_pb2
from router.session import SessionLostError
from router.worker_link import ATTACH_AGAIN_S, WorkerLink


class NotAttachedError(Exception):
    """The request is not there any more, or the worker did not come back in time."""


class TakenOverError(Exception):
    """Another router has attached the request since, or has begun a newer attempt of it."""


async def attach_again(
    link: WorkerLink, spec: worker_pb2.RequestSpec, listen: Callable[[], None], timeout_s: float
) -> worker_pb2.AttachResponse:
    """Attach to the attempt that `spec` began, in the session that comes next.

    `listen` is called before the worker is asked: tokens may come before the answer that leads up
    to them. Raises NotAttachedError, TakenOverError.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _ask(link, spec, listen, timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.ALREADY_EXISTS:
            raise TakenOverError(error.details()) from None
        raise NotAttachedError(error.details()) from None
    except (TimeoutError, SessionLostError) as error:
        raise NotAttachedError(str(error) or "no answer") from None


async def _ask(
    link: WorkerLink, spec: worker_pb2.RequestSpec, listen: Callable[[], None], timeout_s: float
) -> worker_pb2.AttachResponse:
    """Again whenever the connection breaks under way; until cancelled."""
    while True:
        await link.session.wait_open()
        listen()
        try:
            return await link.attach(
                spec.request_id, spec.tenant, spec.body_digest, spec.seed, timeout_s, spec.attempt
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        await asyncio.sleep(ATTACH_AGAIN_S)
