"""Turns of the loop."""

from __future__ import annotations

import asyncio

from router.door.sharing import Turns


async def test_those_with_much_to_read_take_turns_and_others_work_between_the_rounds() -> None:
    done, left = list[str](), {"a": 4, "b": 4, "c": 1}
    turns = Turns(lambda: 0.003 * len(done))  # s a piece; 0.004 s a round

    def turn(name: str) -> bool:
        done.append(name)
        left[name] -= 1
        return left[name] > 0

    for name in "abc":
        turns.take(lambda own=name: turn(own))
    rounds = []
    while any(left.values()):
        before = len(done)
        await asyncio.sleep(0)
        rounds.append(len(done) - before)
    assert "".join(done) == "aabcababb"
    assert max(rounds) <= 2
