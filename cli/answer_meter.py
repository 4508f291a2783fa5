"""What one answer cost and where it ran, gathered from its events."""

from __future__ import annotations

from rich.text import Text

from baton import render
from baton.client.events import Event, Finished, HandedOff, Migrated, Prefilled, Routed, Tokens

_COLUMNS = (
    ("prefilled by", 14),
    ("decoded by", 14),
    (">prompt", 9),
    (">cached", 9),
    (">TTFT", 9),
    (">KV moved", 10),
    (">at", 10),
    (">ITL", 9),
    (">speed", 14),
)


class AnswerMeter:
    """Feed it a request's events as they come; `lines()` says what they cost."""

    def __init__(self) -> None:
        self._routed: Routed | None = None
        self._prefilled: Prefilled | None = None
        self._handed_off: HandedOff | None = None
        self._finished: Finished | None = None
        self._num_migrations = 0
        self.num_tokens = 0

    def add(self, event: Event) -> None:
        match event:
            case Routed():
                self._routed = event
            case Prefilled():
                self._prefilled = event
            case HandedOff():
                self._handed_off = event
            case Migrated():
                self._num_migrations += 1
            case Tokens():
                self.num_tokens += len(event.ids)
            case Finished():
                self._finished = event

    @property
    def num_cached_tokens(self) -> int:
        if self._finished is not None:
            return self._finished.usage.num_cached_tokens
        return self._prefilled.num_cached_tokens if self._prefilled is not None else 0

    @property
    def tokens_per_s(self) -> float:
        """1 / TPOT, by the router's clock: output tokens after the first one over the seconds from
        the first token to the end. 0 before the end, and for fewer than two tokens.

        TPOT (time per output token, the first excluded) is vLLM's (e2e - ttft) / (n - 1): every gap
        after the first token counts, also the one that the handoff is in. When tokens arrive here
        says nothing: a late reader gets many at once.
        """
        if self._finished is None:
            return 0.0
        timings, num_tokens = self._finished.timings, self._finished.usage.num_output_tokens
        decode_s = (timings.e2e_ms - timings.ttft_ms) / 1e3
        return (num_tokens - 1) / decode_s if num_tokens > 1 and decode_s > 0 else 0.0

    def lines(self) -> Text:
        """Names above values, aligned from answer to answer."""
        names = [name.removeprefix(">") for name, _ in _COLUMNS]
        values = self._values()
        text = Text()
        for style, cells in (("dim", names), ("cyan", values)):
            text.append("  ")
            for (name, width), cell in zip(_COLUMNS, cells):
                text.append(cell.rjust(width) if name.startswith(">") else cell.ljust(width), style)
            text.append("\n")
        text.rstrip()
        return text

    def _values(self) -> list[str]:
        routed, handed_off, finished = self._routed, self._handed_off, self._finished
        ttft_ms = finished.timings.ttft_ms if finished else 0.0
        if not ttft_ms and self._prefilled is not None:
            ttft_ms = self._prefilled.ttft_ms
        decoder = routed.decode_worker if routed else "-"
        return [
            (routed.prefill_worker or decoder) if routed else "-",
            decoder,
            f"{routed.num_prompt_tokens} tok" if routed else "-",
            f"{self.num_cached_tokens} tok",
            render.milliseconds(ttft_ms) if ttft_ms else "-",
            render.num_bytes(handed_off.kv_bytes) if handed_off else "-",
            render.bandwidth(handed_off.kv_bytes, handed_off.put_ms) if handed_off else "-",
            render.milliseconds(finished.timings.itl_ms)
            if finished and self.num_tokens > 1
            else "-",
            render.rate(self.tokens_per_s, "tok/s"),
        ]
