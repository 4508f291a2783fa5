"""The stages of a request, of which its trace is made when it ends: for nobody, or a collector.

Times are of the router's clock: what a worker measured is counted back from its message, so no two
machines' clocks are compared. Nothing is noted for a token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from baton.clock import Clock
from baton.v1 import worker_pb2

_MAX_STAGES = 512  # of a request: the oldest are forgotten


@dataclass(eq=False)
class Stage:
    name: str
    began_s: float
    ended_s: float | None = None
    """None: it ends with the request."""
    within: Stage | None = None
    fields: dict[str, Any] = field(default_factory=dict)


class Stages:
    """Own one request's stages, each after the one that it is within. From a failed attempt
    until the next first token, they are within that `retry` or `migration`."""

    def __init__(self, clock: Clock, arrived_s: float, tokenize_s: float) -> None:
        self.clock, self.arrived_s, now_s = clock, arrived_s, clock.now_s()
        tokenize = Stage("tokenize", max(arrived_s, now_s - tokenize_s), now_s)
        self.all = deque([tokenize], _MAX_STAGES)
        self._entered: Stage | None = None
        self._again: Stage | None = None
        self._first_step_s = 0.0

    def enter(self, name: str, worker: str = "") -> None:
        """Begin a stage that follows the one before, and lasts until another is entered."""
        self._entered = Stage(name, self.leave(), None, self._again, {"worker": worker})
        self.all.append(self._entered)

    def leave(self) -> float:
        """End the stage that was entered, and return the time."""
        now_s = self.clock.now_s()
        if self._entered is not None:
            self._entered.ended_s = now_s
        self._entered = None
        return now_s

    def begin_again(self, name: str, worker: str, reason: str) -> None:
        self._first_step_s, fields = 0.0, {"worker": worker, "reason": reason}
        if self._again is None:
            self._again = Stage(name, self.clock.now_s(), fields=fields)
            self.all.append(self._again)

    def first_token(self, first: worker_pb2.FirstToken | None, decode: str) -> None:
        """End the prefill. `first` None: its worker reported no times. `decode`: who goes on."""
        prefill, now_s = self._entered, self.leave()
        if self._again is not None:
            self._again.ended_s, self._again = now_s, None
        self.enter("decode", decode)
        if prefill is None or first is None:
            return
        began_s = self._first_step_s = max(prefill.began_s, now_s - first.prefill_ms / 1e3)
        self.all.append(Stage("worker queue", prefill.began_s, began_s, prefill))
        for tokens, *ms in zip(first.chunk_tokens, first.chunk_began_ms, first.chunk_ended_ms):
            step_s, ended_s = (min(now_s, began_s + each / 1e3) for each in ms)
            self.all.append(Stage("chunk", step_s, ended_s, prefill, {"num_tokens": tokens}))

    def handed_off(self, done: worker_pb2.HandoffDone, link: str) -> None:
        """Note a handoff. Each layer's KV is put once computed, from the prompt's first step on."""
        rate = done.num_bytes / done.put_ms * 1e3 if done.put_ms else 0.0
        fields = {"link": link, "num_bytes": done.num_bytes, "bytes_per_s": rate}
        now_s = self.clock.now_s()
        self.all.append(Stage("handoff", self._first_step_s or now_s, now_s, None, fields))
