"""Real workers without a model, for the router's tests: they speak the worker protocol
honestly and fail on command.

KV "moves" through a `Fabric` the workers share.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from baton.errors import InvalidRequestError
from baton.link.frames import Method
from baton.link.worker_end import CallContext, Served, answers, streams
from baton.status import abort
from baton.v1 import common_pb2, control_pb2, worker_pb2
from kv_transfer.block_hash import SHARED_BY_ALL, CacheScope, chain_hashes, chain_root
from tests.identities import WORKER
from tests.link_stub import WorkerPort
from tests.router.scripted_tokens import Running, known_tokens, logprobs_of


@dataclass
class Faults:
    """Own what is still to go wrong; each count is used up one by one."""

    fail_prefills: int = 0
    not_for_us: list[str] = field(default_factory=list)  # reasons to refuse a prompt with
    refuse_prefills: int = 0
    fail_handoffs: int = 0
    handoff_reason: str = "TIMEOUT"  # of those
    hang_handoffs: int = 0  # after the first token
    hang_prefills: int = 0  # until `unhang`
    late_prefills: int = 0  # they find their lease fenced by its owner
    lose_moves: int = 0  # attached by another router, the former one does not learn of it
    reject: list[tuple[int, int]] = field(default_factory=list)  # (RejectReason, retry ms)
    hang_reservations: int = 0
    hang_attaches: int = 0
    end_sessions: int = 0  # as soon as they are opened
    end_early: int = 0  # prefill streams that end after the first token

    def use(self, fault: str) -> bool:
        """Whether this one is to go wrong; one less is left then."""
        left: int = getattr(self, fault)
        if left:
            setattr(self, fault, left - 1)
        return bool(left)


BLOCK_SIZE = 4


class ScriptedKv:
    """Own the blocks a worker claims to hold, and who follows them."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.held: list[bytes] = []
        self.text_files = dict[str, bytes]()
        self.queues: list[asyncio.Queue[worker_pb2.SubscribeKvResponse | None]] = []
        """One per subscriber; None: this message is lost on the way."""

    async def follow(
        self, request: worker_pb2.SubscribeKvRequest, context: CallContext
    ) -> AsyncIterator[worker_pb2.SubscribeKvResponse]:
        queue: asyncio.Queue[worker_pb2.SubscribeKvResponse | None] = asyncio.Queue()
        self.queues.append(queue)
        sequence = 1
        yield worker_pb2.SubscribeKvResponse(
            incarnation=self.incarnation,
            sequence=sequence,
            snapshot=True,
            stored=[worker_pb2.BlockStored(hashes=chain) for chain in self.held],
        )
        while True:
            message = await queue.get()
            sequence += 1
            if message is not None:
                message.sequence, message.incarnation = sequence, self.incarnation
                yield message

    async def read_tokenizer(
        self, request: worker_pb2.ReadTokenizerRequest, context: CallContext
    ) -> AsyncIterator[worker_pb2.ReadTokenizerResponse]:
        for name, data in self.text_files.items():
            yield worker_pb2.ReadTokenizerResponse(name=name, data=data)

    def hold(
        self, kv_fingerprint: bytes, tokens: Sequence[int], scope: CacheScope = SHARED_BY_ALL
    ) -> None:
        """A prompt's blocks became shareable here."""
        ids = np.asarray(tokens, dtype=np.uint32)
        chain = chain_hashes(chain_root(kv_fingerprint), scope, ids, BLOCK_SIZE)
        self.held.append(chain)
        for queue in self.queues:
            stored = [worker_pb2.BlockStored(hashes=chain)]
            queue.put_nowait(worker_pb2.SubscribeKvResponse(stored=stored))


FINGERPRINT = b"f" * 16
MODEL = "tiny"
MAX_MODEL_LEN = 512


class Fabric:
    """Own who can be reached for a handoff: decode workers by id."""

    def __init__(self) -> None:
        self.workers: dict[str, ScriptedWorker] = {}


class ScriptedWorker:
    """A worker of one role, or both, with a port of its own."""

    identity = WORKER

    def __init__(self, worker_id: str, role: int, fabric: Fabric, incarnation: int = 1) -> None:
        self.worker_id, self.role, self.fabric = worker_id, role, fabric
        self.incarnation = incarnation
        self.pool = common_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()  # type: ignore[arg-type]
        self.faults = Faults()
        self.address = ""
        self.step_s = 0.001
        self.weights = 0
        self.kv_bytes_per_token = 64 << 10
        self.max_num_seqs = 16
        self.num_blocks = 1000
        self.max_model_len = MAX_MODEL_LEN
        self.max_request_tokens = self.max_held_tokens = 0
        self.kv_fingerprint = FINGERPRINT
        self.state = control_pb2.WORKER_STATE_LIVE
        self.load = worker_pb2.WorkerLoad()
        self.active_role = common_pb2.WORKER_ROLE_UNSPECIFIED
        self.on_token: Callable[[Running], None] = lambda running: None
        self.on_reserve: Callable[[], None] = lambda: None
        self.may_decode = asyncio.Event()
        self.may_decode.set()
        self.may_prefill = asyncio.Event()
        self.may_prefill.set()
        self.may_send_first = asyncio.Event()  # else the handoff overtakes the first token
        self.may_send_first.set()
        self.unhang = asyncio.Event()
        self.served: set[str] = set()  # leases
        self.runs: dict[str, Running] = {}
        self.finished: dict[str, Running] = {}
        self.last_attempt: dict[str, int] = {}
        self.sessions: dict[str, asyncio.Queue[worker_pb2.SessionResponse]] = {}
        self.session_calls: dict[str, asyncio.Task[Any]] = {}
        self.cancels: list[tuple[str, int]] = []
        self.num_prefills = self.num_prefilling = self.num_reserves = 0
        self.num_decode_steps = self.num_attaches = self.num_attaching = 0
        self.prefilled_at: list[int] = []  # len(token_ids) of every Prefill
        self.kv = ScriptedKv(incarnation)
        self._leases = 0
        self._port: WorkerPort | None = None

    # --- life ----------------------------------------------------------------------------------

    async def start(self, port: int = 0) -> ScriptedWorker:
        methods = {
            Method.FOLLOW_KV: streams(self.kv.follow),
            Method.READ_TOKENIZER: streams(self.kv.read_tokenizer),
        }
        if self.role != common_pb2.WORKER_ROLE_DECODE:
            methods[Method.PREFILL] = streams(self.prefill)
        if self.role != common_pb2.WORKER_ROLE_PREFILL:
            methods |= {Method.SESSION: Served(self.session), Method.ATTACH: answers(self.attach)}
            methods[Method.CANCEL] = answers(self.cancel)
        self._port = WorkerPort(methods, self.identity, f"{self.worker_id}/{self.incarnation}")
        self.address = await self._port.start(port)
        self.fabric.workers[self.worker_id] = self
        return self

    def die(self) -> asyncio.Task[None]:
        """At once, in the middle of whatever it does: nothing more is computed or said."""
        self.forget_runs()
        if self.fabric.workers.get(self.worker_id) is self:
            del self.fabric.workers[self.worker_id]
        port, self._port = self._port, None
        assert port is not None
        return asyncio.ensure_future(port.stop())

    async def stop(self) -> None:
        if self._port is not None:
            await self.die()

    def forget_runs(self) -> None:
        """Every request is lost; the worker itself lives on."""
        for running in list(self.runs.values()):
            if running.task is not None:
                running.task.cancel()
        self.runs.clear()

    def drop_sessions(self) -> None:
        """The worker ends its sessions plainly; the requests run on as orphans."""
        for task in list(self.session_calls.values()):
            task.cancel()

    def info(self) -> control_pb2.FleetWorker:
        ref = common_pb2.WorkerRef(worker_id=self.worker_id, incarnation=self.incarnation)
        info = control_pb2.WorkerInfo(
            ref=ref,
            pool=self.pool,
            role=self.role,
            address=self.address,
            model=MODEL,
            kv_fingerprint=self.kv_fingerprint,
            tp_size=1,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=512,
            vocab_size=257,
            kv_bytes_per_token=self.kv_bytes_per_token,
            max_request_tokens=self.max_request_tokens,
            max_held_tokens_per_request=self.max_held_tokens,
        )
        return control_pb2.FleetWorker(
            info=info, state=self.state, load=self.load, active_role=self.active_role
        )

    # --- prefill -------------------------------------------------------------------------------

    async def prefill(
        self, request: worker_pb2.PrefillRequest, context: CallContext
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        self.num_prefills += 1
        self.num_prefilling += 1
        self.prefilled_at.append(len(request.spec.token_ids) // 4)
        try:
            if request.lease.lease_id in self.served:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "served already")
            self.served.add(request.lease.lease_id)
            if self.faults.use("late_prefills"):
                owner = self.fabric.workers[request.lease.owner.worker_id]
                asyncio.get_running_loop().call_soon(owner.give_up, request.lease)
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "fenced or over")
            await self.may_prefill.wait()
            if self.faults.use("hang_prefills"):
                await self.unhang.wait()
            if self.faults.use("fail_prefills"):
                await context.abort(grpc.StatusCode.INTERNAL, "scripted failure")
            if self.faults.use("refuse_prefills"):
                refusal = InvalidRequestError("scripted refusal", field="sampling.top_k")
                await abort(context, refusal)
            if self.faults.not_for_us:
                refused = worker_pb2.HandoffFailed(reason=self.faults.not_for_us.pop())
                yield worker_pb2.PrefillResponse(handoff_failed=refused)
                return
            async for response in self._prefill(request):
                yield response
        finally:
            self.num_prefilling -= 1

    async def _prefill(
        self, request: worker_pb2.PrefillRequest
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        spec = request.spec
        assert request.lease.writer.worker_id == self.worker_id
        run = Running(spec, None, known_tokens(spec), weights=self.weights)
        finished = run.next()
        first = worker_pb2.FirstToken(id=run.tokens[-1], prefill_ms=1.0, finished=finished)
        for known in logprobs_of(spec, run.tokens[-1:]):
            first.logprobs.CopyFrom(known)
        is_late = not self.may_send_first.is_set()
        owner = self.fabric.workers.get(request.lease.owner.worker_id)
        if finished and owner is not None:  # whether or not its caller is there to hear of it
            asyncio.get_running_loop().call_soon(owner.give_up, request.lease)
        if finished or not is_late:
            await self.may_send_first.wait()
            yield worker_pb2.PrefillResponse(first_token=first)
        if finished or self.faults.use("end_early"):
            return
        self.kv.hold(self.kv_fingerprint, known_tokens(spec))
        if self.faults.use("hang_handoffs"):
            await asyncio.Event().wait()
        if self.faults.use("fail_handoffs"):
            reason = self.faults.handoff_reason
            failed = worker_pb2.HandoffFailed(reason=reason, message="scripted")
            yield worker_pb2.PrefillResponse(handoff_failed=failed)
            return
        if owner is None or not owner.admit(request.lease, run.tokens[-1]):
            failed = worker_pb2.HandoffFailed(reason="FENCED", message="no such lease")
            yield worker_pb2.PrefillResponse(handoff_failed=failed)
            return
        if is_late:
            await self.may_send_first.wait()
            yield worker_pb2.PrefillResponse(first_token=first)
        done = worker_pb2.HandoffDone(
            num_bytes=len(run.tokens) * self.kv_bytes_per_token, num_blocks=1, put_ms=0.5
        )
        yield worker_pb2.PrefillResponse(handoff_done=done)

    # --- decode --------------------------------------------------------------------------------

    async def session(
        self, requests: AsyncIterator[worker_pb2.SessionRequest], context: CallContext
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        first = await anext(requests)
        if self.faults.use("end_sessions"):
            return
        router_id = first.open.router_id
        outbox = self.sessions[router_id] = asyncio.Queue()
        reader = asyncio.ensure_future(self._read(router_id, requests))
        self.session_calls[router_id] = reader
        reader.add_done_callback(lambda _: outbox.put_nowait(None))  # type: ignore[arg-type]
        try:
            while (response := await outbox.get()) is not None:
                yield response
        finally:
            reader.cancel()
            if self.sessions.get(router_id) is outbox:
                del self.sessions[router_id]
                for running in self.runs.values():
                    if running.router_id == router_id:
                        running.router_id = None

    async def _read(
        self, router_id: str, requests: AsyncIterator[worker_pb2.SessionRequest]
    ) -> None:
        async for request in requests:
            if request.HasField("reserve"):
                self._reserve(router_id, request.reserve)
            elif request.HasField("cancel"):
                self._cancel(request.cancel.request_id, request.cancel.attempt)

    def send(self, router_id: str | None, **parts: Any) -> None:
        if router_id in self.sessions:
            self.sessions[router_id].put_nowait(worker_pb2.SessionResponse(**parts))

    def _reserve(self, router_id: str, reserve: worker_pb2.Reserve) -> None:
        spec = reserve.spec
        self.num_reserves += 1
        self.on_reserve()
        if self.faults.use("hang_reservations"):
            return
        if self.faults.reject:
            reason, retry_ms = self.faults.reject.pop(0)
            self._reject(router_id, spec, reason, retry_ms)
            return
        if spec.kv_fingerprint != self.kv_fingerprint:
            self._reject(router_id, spec, worker_pb2.REJECT_REASON_FINGERPRINT, 0)
            return
        if spec.num_prompt_tokens + spec.sampling.max_tokens > self.max_model_len:
            self._reject(router_id, spec, worker_pb2.REJECT_REASON_INVALID, 0)
            return
        if spec.attempt <= self.last_attempt.get(spec.request_id, 0):
            self._reject(router_id, spec, worker_pb2.REJECT_REASON_STALE_ATTEMPT, 0)
            return
        self.last_attempt[spec.request_id] = spec.attempt
        former = self.runs.pop(spec.request_id, None)
        if former is not None and former.task is not None:
            former.task.cancel()
        running = self.runs[spec.request_id] = Running(
            spec, router_id, known_tokens(spec), weights=self.weights
        )
        running.router = router_id.rsplit("/", 1)[0]
        reserved = worker_pb2.Reserved(request_id=spec.request_id, attempt=spec.attempt)
        if reserve.HasField("writer"):
            self._leases += 1
            running.lease_id = f"{self.worker_id}:{self.incarnation}:{self._leases}"
            owner = common_pb2.WorkerRef(worker_id=self.worker_id, incarnation=self.incarnation)
            reserved.lease.CopyFrom(
                worker_pb2.Lease(
                    lease_id=running.lease_id, lease_epoch=1, owner=owner, writer=reserve.writer
                )
            )
            running.reserved = reserved
        else:
            running.task = asyncio.ensure_future(self.decode(running))
        self.send(router_id, reserved=[reserved])

    def _reject(
        self, router_id: str | None, spec: worker_pb2.RequestSpec, reason: int, retry_ms: int
    ) -> None:
        rejected = worker_pb2.Rejected(
            request_id=spec.request_id,
            attempt=spec.attempt,
            reason=reason,
            message="scripted",
            retry_after_ms=retry_ms,
            field="token_ids" if reason == worker_pb2.REJECT_REASON_INVALID else "",
        )
        self.send(router_id, rejected=[rejected])

    def _cancel(self, request_id: str, attempt: int) -> None:
        self.cancels.append((request_id, attempt))
        running = self.runs.get(request_id)
        if running is not None and running.spec.attempt <= attempt:
            del self.runs[request_id]
            if running.task is not None:
                running.task.cancel()

    def admit(self, lease: worker_pb2.Lease, first_token: int) -> bool:
        """What the transfer layer does with `done`; False: the lease is fenced."""
        for running in self.runs.values():
            if running.lease_id == lease.lease_id and running.task is None:
                running.tokens.append(first_token)
                spec = running.spec
                admitted = worker_pb2.HandoffAdmitted(
                    request_id=spec.request_id, attempt=spec.attempt
                )
                first = [self.tokens_of(running, 0)] if running.was_attached else []
                self.send(running.router_id, admitted=[admitted], tokens=first)
                scope = CacheScope(spec.tenant, spec.cache_salt, spec.num_public_tokens)
                self.kv.hold(self.kv_fingerprint, known_tokens(spec), scope)
                running.task = asyncio.ensure_future(self.decode(running))
                return True
        return False

    def give_up(self, lease: worker_pb2.Lease) -> None:
        """The lease's writer says that nothing will come."""
        for request_id, running in list(self.runs.items()):
            if running.lease_id == lease.lease_id:
                del self.runs[request_id]
                reason = worker_pb2.REJECT_REASON_HANDOFF_FAILED
                self._reject(running.router_id, running.spec, reason, 0)

    async def decode(self, running: Running) -> None:
        while not running.finished:
            await asyncio.sleep(self.step_s)
            await self.may_decode.wait()
            running.finished = running.next()
            self.num_decode_steps += 1
            self.send(running.router_id, tokens=[self.tokens_of(running, len(running.output) - 1)])
            self.on_token(running)
        self.runs.pop(running.spec.request_id, None)
        self.finished[running.spec.request_id] = running

    def tokens_of(self, running: Running, index: int) -> worker_pb2.RequestTokens:
        return worker_pb2.RequestTokens(
            request_id=running.spec.request_id,
            attempt=running.spec.attempt,
            index=index,
            ids=running.output[index:],
            logprobs=logprobs_of(running.spec, running.output[index:]),
            finished=running.finished,
            error=running.error,
        )

    async def cancel(
        self, request: worker_pb2.Cancel, context: CallContext
    ) -> worker_pb2.CancelResponse:
        running = self.runs.get(request.request_id)
        if running is not None:
            running.finished = common_pb2.FINISH_REASON_ABORTED
            running.error = "cancelled"
            at = len(running.output)
            self.send(running.router_id, tokens=[self.tokens_of(running, at)])
            self._cancel(request.request_id, request.attempt)
        return worker_pb2.CancelResponse(found=running is not None)

    async def attach(
        self, request: worker_pb2.AttachRequest, context: CallContext
    ) -> worker_pb2.AttachResponse:
        if self.faults.use("hang_attaches"):
            self.num_attaching += 1
            await asyncio.Event().wait()
        wanted = request.request_id
        running = self.runs.get(wanted) or self.finished.get(wanted)
        if running is None or running.spec.tenant != request.tenant:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not here")
        if request.body_digest and request.body_digest != running.spec.body_digest:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "another body")
        if request.HasField("seed") and request.seed != running.spec.seed:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "another seed")
        if request.HasField("attempt") and request.attempt != running.spec.attempt:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "another attempt")
        router = request.router_id.rsplit("/", 1)[0]
        if request.HasField("attempt") and router != running.router and wanted in self.runs:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "another router's")
        if request.router_id not in self.sessions:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no such session")
        self.num_attaches += 1
        former, running.router_id, running.router = running.router_id, request.router_id, router
        if former not in (None, request.router_id) and not self.faults.use("lose_moves"):
            moved = worker_pb2.Moved(request_id=wanted, attempt=running.spec.attempt)
            self.send(former, moved=[moved])
        if running.reserved is not None and running.task is None:
            running.was_attached = True
            self.send(request.router_id, reserved=[running.reserved])
        return worker_pb2.AttachResponse(spec=running.spec, tokens=self.tokens_of(running, 0))
