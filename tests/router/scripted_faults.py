"""What a scripted worker is told to do wrong."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    lose_moves: int = 0  # attached by another router, the former one is not told
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
