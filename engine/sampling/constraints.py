"""What a request's output must be: which tokens its grammar allows next.

1. `GrammarCompiler.prepare` compiles a grammar, on any thread. Compiled ones are kept.
2. `Constraints.opening` gives a request a matcher of its own, which reads the tokens that earlier
   attempts emitted. So a request that is resumed goes on in the same state.
3. Each step, the sampler computes masks, which depend on earlier tokens alone, once the model's run
   is under way. On a GPU they are there before its logits. The matcher first reads the tokens that
   are new to it, whoever sampled them.
4. A matcher that fails is its request's fault, and ends it alone.

End-of-sequence tokens are allowed where the grammar may end, and are the only ones where it must.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError
from baton.grammar import BROKEN_GRAMMAR, on_deep_stack, parser_limits, short, try_out
from baton.grammar_chains import ChainError, check_grammar
from engine.api import ComputeMasks, Masks
from engine.errors import InvalidRequestError
from engine.request import (
    EngineEvent,
    FinishedEvent,
    NoCapacityEvent,
    PrefilledEvent,
    RequestId,
    RequestSpec,
    StepPlan,
    TokenEvent,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NUM_KEPT = 32  # compiled grammars


class GrammarCompiler:
    """Own the compiled grammars of one model's vocabulary. Thread-safe."""

    def __init__(
        self, find_tokenizer: Callable[[], Path], vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        """`find_tokenizer`: the model's tokenizer.json, read at the first grammar; it may raise
        ConfigError."""
        self._find_tokenizer = find_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._reading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def prepare(self, grammar: str) -> None:
        """Compile a grammar, so that `matcher` has it at once. Takes up to a second, without the
        GIL. Raises InvalidRequestError."""
        with self._lock:
            if grammar in self._compiled:
                return
        try:
            check_grammar(grammar)  # who sends it may have checked nothing
        except ChainError as error:
            raise InvalidRequestError("grammar", short(str(error))) from None
        compiled = on_deep_stack(lambda: self._compile(grammar))
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)

    def matcher(self, grammar: str) -> LLMatcher:
        """A new matcher at the grammar's start. Raises InvalidRequestError."""
        while True:
            self.prepare(grammar)
            with self._lock:
                if grammar in self._compiled:  # others may have pushed it out
                    self._compiled.move_to_end(grammar)
                    return self._compiled[grammar].deep_copy()

    def new_masks(self, count: int) -> npt.NDArray[np.uint8]:
        """Make masks for this many matchers: [count, bytes], all 0."""
        num_words = -(-self._read_tokenizer().vocab_size // 32)  # the library writes whole ones
        return np.zeros((count, num_words * 4), np.uint8)

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        tokenizer = self._read_tokenizer()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        # The first masks are the dearest: later ones know of what these find out, also a copy's.
        if problem := try_out(matcher.deep_copy(), self._eos_token_ids, num_tokens=2):
            raise InvalidRequestError("grammar", problem)
        return matcher

    def _read_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._reading:
            if self._tokenizer is not None:
                return self._tokenizer
            if not self._eos_token_ids:
                raise InvalidRequestError(
                    "grammar", "the model names no end-of-sequence token, which would end it"
                )
            eos = sorted(self._eos_token_ids)
            try:
                path = str(self._find_tokenizer())
                try:
                    self._tokenizer = LLTokenizer(path, self._vocab_size, eos)
                except ValueError:  # some tokenizers have more tokens than their model
                    self._tokenizer = LLTokenizer(path, None, eos)
            except (ConfigError, ValueError) as error:  # the file is missing, or unreadable for it
                raise InvalidRequestError(
                    "grammar", f"constraints need the model's tokenizer: {short(str(error))}"
                ) from error
            return self._tokenizer


@dataclass
class _Followed:
    """A request's matcher, and how many output tokens it has read."""

    matcher: LLMatcher
    num_read: int = 0

    def read(self, output: npt.NDArray[np.uint32]) -> str | None:
        """Read on to the end of `output`, all of the request's output tokens. Returns what is wrong
        with it."""
        new = output[self.num_read :].tolist()
        self.num_read = len(output)
        if not new or self.matcher.consume_tokens(new):
            return None
        return f"the output does not fit the grammar: {short(self.matcher.get_error())}"

    def mask_into(self, row: npt.NDArray[np.uint8]) -> str | None:
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self.matcher.is_error():
            return short(self.matcher.get_error())
        return None if row.any() else "no token of the vocabulary continues the output"


class Constraints:
    """Own the matchers of an engine's requests. Its methods are the engine's thread's."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._followed: dict[RequestId, _Followed] = {}

    def prepare(self, spec: RequestSpec) -> None:
        """Do beforehand, on any thread, what would take long. Raises InvalidRequestError."""
        if spec.grammar is not None:
            self._of_model().prepare(spec.grammar)

    @contextmanager
    def opening(self, spec: RequestSpec) -> Iterator[None]:
        """Follow the request, if what is done within raises nothing. Raises InvalidRequestError
        before that."""
        if spec.grammar is None:
            yield
            return
        followed = _Followed(self._of_model().matcher(spec.grammar))
        if problem := followed.read(_output(spec)):
            raise InvalidRequestError("token_ids", problem)
        yield
        self._followed[spec.request_id] = followed

    def close(self, request_id: RequestId) -> None:
        self._followed.pop(request_id, None)

    def close_ended(self, events: Iterable[EngineEvent]) -> None:
        """Forget the requests that sample no more here."""
        if not self._followed:
            return
        for event in events:
            match event:
                case TokenEvent(finished=None):
                    pass
                case TokenEvent() | FinishedEvent() | PrefilledEvent() | NoCapacityEvent():
                    self.close(event.request_id)

    def masks(self, plan: StepPlan, specs: Mapping[RequestId, RequestSpec]) -> ComputeMasks | None:
        """Compute a step's masks; None where no row has a constraint. `specs` have all tokens known
        now."""
        if not self._followed:
            return None
        ids = [seq.request_id for seq in plan.seqs if seq.samples]
        rows = [
            (row, self._followed[id_], specs[id_])
            for row, id_ in enumerate(ids)
            if specs[id_].grammar is not None
        ]
        return partial(self._compute, rows) if rows else None

    def _compute(self, wanted: Sequence[tuple[int, _Followed, RequestSpec]]) -> Masks:
        bits = self._of_model().new_masks(len(wanted))
        rows, faults = list[int](), dict[int, str]()
        for row, followed, spec in wanted:
            mask = bits[len(rows)]
            problem = followed.read(_output(spec)) or followed.mask_into(mask)
            problem = problem or _narrow(mask, spec)
            if problem is None:
                rows.append(row)
            else:
                faults[row] = f"{BROKEN_GRAMMAR}: {problem}"
        return Masks(tuple(rows), bits[: len(rows)], faults)

    def _of_model(self) -> GrammarCompiler:
        if self._compiler is None:
            raise InvalidRequestError("grammar", "this engine has no tokenizer for constraints")
        return self._compiler


def _narrow(mask: npt.NDArray[np.uint8], spec: RequestSpec) -> str | None:
    """Take away what the request itself does not allow. Returns what is wrong, if nothing is
    left."""
    if allowed := spec.sampling.allowed_tokens:
        mask[: len(allowed)] &= np.frombuffer(allowed, np.uint8)[: len(mask)]
        mask[len(allowed) :] = 0
    for token in spec.sampling.ends_of_bad_words(_output(spec)):
        mask[token // 8] &= 0xFF ^ 1 << token % 8
    return None if mask.any() else "no token that the request allows continues the output"


def _output(spec: RequestSpec) -> npt.NDArray[Any]:
    return spec.token_ids[spec.num_prompt_tokens :]
