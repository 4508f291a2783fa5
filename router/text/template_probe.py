"""Whether a chat template ends, before any request meets it.

A template is a program that came with the model. It is compiled and rendered for sample chats in a
child process first, with bounded time and memory. `python -m router.text.template_probe` is that
child: it reads {"source", "special_tokens", "guarded_tokens"} and writes what is wrong, if anything.
"""

from __future__ import annotations

import functools
import json
import resource
import signal
import subprocess
import sys
from typing import Any

from baton.errors import ConfigError, InvalidRequestError
from router.text.chat_template import ChatTemplate, Conversation

CPU_S, MEMORY_BYTES = 2.0, 1 << 30
_WITHIN_S = 60.0  # on a busy machine, too

_TURNS = [{"role": role, "content": "Some words. " * 20} for role in ("user", "assistant")]
_SYSTEM = {"role": "system", "content": "Be brief."}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Finds a town.",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
        },
    }
    for name in ("find", "look")
]
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call12345", "type": "function", "function": {"name": "find", "arguments": {"a": 1}}}
    ],
}
_RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "find", "content": "Rome"}
_SAMPLES = (
    Conversation(_TURNS[:1]),
    Conversation([_SYSTEM, *_TURNS * 20, _TURNS[0]]),
    Conversation(_TURNS[:1], _TOOLS),
    Conversation([_SYSTEM, _TURNS[0], _CALL, _RESULT, _TURNS[0]], _TOOLS),
)


@functools.lru_cache(16)
def _problem(message: str) -> str:
    try:
        ended = subprocess.run(
            [sys.executable, "-m", __name__],
            input=message,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            timeout=_WITHIN_S,
        )
    except subprocess.TimeoutExpired:
        return f"it has not ended after {_WITHIN_S:g} s"
    if ended.returncode == -signal.SIGPROF:
        return f"it takes more than {CPU_S:g} s"
    if ended.returncode:
        return f"the process that tried it ended with status {ended.returncode}"
    return ended.stdout


def check_template(**template: Any) -> None:
    """`template`: the arguments of `ChatTemplate`. Raises ConfigError."""
    if problem := _problem(json.dumps(template)):
        raise ConfigError(f"chat template: {problem} for a short chat", field="model")


def main() -> None:
    template = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        made = ChatTemplate(**template)
        for sample in _SAMPLES:
            try:
                made.render(sample)
            except InvalidRequestError as error:  # one may refuse tools, or a system message
                if isinstance(error.__cause__, MemoryError):
                    raise error.__cause__ from None
    except ConfigError:
        pass  # whoever makes it next says so
    except MemoryError:
        print(f"it takes more than {MEMORY_BYTES >> 30} GiB", end="")


if __name__ == "__main__":
    main()
