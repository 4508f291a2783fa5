"""What a worker registers of itself, and the kinds of workers in a fleet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.v1 import common_pb2

NO_BOUND = 1 << 30  # tokens: the length is not known


@dataclass(frozen=True)
class KvClass:
    """What workers must share for KV to be handed over between them."""

    kv_fingerprint: bytes
    block_size: int


@dataclass(frozen=True)
class WorkerFacts:
    """What never changes in one incarnation of a worker."""

    worker_id: str
    incarnation: int
    can_prefill: bool
    can_decode: bool
    address: str
    model: str
    kv_fingerprint: bytes
    block_size: int
    num_blocks: int
    max_model_len: int
    max_request_tokens: int
    max_held_tokens: int
    """Tokens that one request holds at once where windows free blocks; 0: its whole length."""
    max_num_seqs: int
    kv_bytes_per_token: int
    ref: common_pb2.WorkerRef = field(compare=False)
    """Passed on unread: it names the writer of a lease."""
    pool: str = ""

    @property
    def identity(self) -> tuple[str, int]:
        """Worker id and incarnation. Its slot goes to another worker once it has left."""
        return (self.worker_id, self.incarnation)

    @property
    def kv_tokens(self) -> int:
        """Tokens of one request that KV memory can hold; 0: memory does not bound its length."""
        if self.max_request_tokens or self.max_held_tokens:
            return self.max_request_tokens
        return self.num_blocks * self.block_size  # a worker that reports neither

    @property
    def longest_request(self) -> int:
        """Prompt plus output tokens that the worker accepts: the last token has no KV."""
        if not self.kv_tokens:
            return self.max_model_len or NO_BOUND
        return min(self.max_model_len or NO_BOUND, self.kv_tokens + 1)

    @property
    def is_bound_by_memory(self) -> bool:
        """It accepts less than its model's context."""
        return 0 < self.kv_tokens <= self.max_model_len

    def held(self, num_tokens: int) -> int:
        """Tokens of KV that a request of this length takes at most."""
        return min(num_tokens, self.max_held_tokens or num_tokens)

    @property
    def kv_class(self) -> KvClass:
        return KvClass(self.kv_fingerprint, self.block_size)


@dataclass(frozen=True)
class WorkerKinds:
    """What the workers of a fleet have in common."""

    classes: Sequence[tuple[KvClass, int]] = ()
    """Each with its number."""
    longest_request: int | None = None
    """Prompt plus output tokens that some decode worker accepts; None without one."""
    longest_prompt: int | None = None
    """Prompt tokens that some prefill worker accepts; None without one."""

    @classmethod
    def of(cls, workers: Iterable[WorkerFacts], numbers: Mapping[KvClass, int]) -> WorkerKinds:
        workers = list(workers)
        here = {worker.kv_class for worker in workers}
        decodes = [worker.longest_request for worker in workers if worker.can_decode]
        prefills = [worker.longest_request - 1 for worker in workers if worker.can_prefill]
        return cls(
            classes=tuple(each for each in numbers.items() if each[0] in here),
            longest_request=max(decodes, default=None),
            longest_prompt=max(prefills, default=None),
        )
