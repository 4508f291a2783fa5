"""A completion's choice that tells of its prompt: `echo` and `prompt_logprobs`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from baton.finish_reason import FinishReason
from baton.v1 import common_pb2
from router.door.api.api import Opened
from router.door.http.openai.bodies import CompletionBody, prompts_of
from router.door.http.openai.choices import Delta, TextChoice
from router.request.output import Event, Finished, TokenRun


class EchoChoice(TextChoice):
    """With `echo`, text and log-probabilities begin with the prompt's. `prompt_logprobs` are as
    vLLM has them. Of `max_tokens: 0` nothing follows."""

    def __init__(self, index: int, opened: Opened, body: CompletionBody) -> None:
        super().__init__(index, opened, body)
        self._asked, self._echoed = body, list(map(int, self._prompt))
        self._told: Delta = {}
        self._shown: str | None = None  # the prompt, special tokens included

    async def events(self) -> list[Event]:
        """Before the first ones, decode the prompt, off the loop: it may be long."""
        if self._shown is None and self._asked.echo:
            decode = partial(self._model.decode, self._echoed, shows_special=True)
            self._shown = await asyncio.to_thread(decode)
        return await super().events()

    def take(self, events: Sequence[Event]) -> list[Delta]:
        made: list[Delta] = []
        for event in events:
            if isinstance(event, TokenRun) and event.index == 0 and event.ids:
                made += self._of_prompt(event.logprobs[0].prompt if event.logprobs else ())
            if self._asked.max_tokens != 0:
                made += super().take([event])
            elif isinstance(event, Finished):  # the one token that was computed is left out
                event = replace(event, reason=FinishReason.LENGTH, num_output_tokens=0)
                made += super().take([event])
        return made

    def whole(self) -> Delta:
        return super().whole() | self._told

    def _of_prompt(self, known: Sequence[common_pb2.Logprobs]) -> list[Delta]:
        unknown = common_pb2.Logprobs()  # nothing comes before the first token
        known = [*known, *[unknown] * (len(self._echoed) - 1 - len(known))]
        if self._asked.prompt_logprobs is not None:
            ranked = map(self._ranked, self._echoed[1:], known)
            self._told = {"prompt_logprobs": [None, *ranked]}
        if not self._asked.echo:
            return []
        shown = self._shown or ""
        came = prompts_of(self._asked.prompt)[self.index // self._asked.num_choices]
        text = came if isinstance(came, str) and shown.endswith(came) else shown
        decoder, self._decoder = self._decoder, self._model.new_decoder(shows_special=True)
        self._offset = len(text) - len(shown)  # what the tokenizer puts before it is not shown
        made = self._tokens(TokenRun(0, self._echoed, text, [unknown, *known]))
        self._decoder, self._offset = decoder, len(text)
        for name in ("token_logprobs", "top_logprobs") if self._has_logprobs else ():
            self._logprobs[0][name] = made[0]["logprobs"][name][0] = None
        return made

    def _ranked(self, token_id: int, known: common_pb2.Logprobs) -> Delta:
        ranked = {each.id: (rank, each.logprob) for rank, each in enumerate(known.top, 1)}
        ranked[token_id] = known.rank, known.logprob
        return {
            str(each): {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": self._model.token_text(each).decode(errors="replace"),
            }
            for each, (rank, logprob) in ranked.items()
        }
