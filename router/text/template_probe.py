"""Whether a chat template ends, before any request meets it.

It is a program that came with the model. So a child process compiles it first, and renders sample
chats. `python -m router.text.template_probe` is that child.
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

_CPU_S, _MEMORY_BYTES = 2.0, 1 << 30
_WITHIN_S = 60.0  # on a busy machine, too
_OUT_OF_MEMORY = 3
_PROBLEMS = {
    0: "",
    -signal.SIGPROF: f"it takes more than {_CPU_S:g} s",
    _OUT_OF_MEMORY: f"it takes more than {_MEMORY_BYTES >> 30} GiB",
}

_SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
_TURNS: list[dict[str, Any]] = [
    {"role": role, "content": "Some words. " * 20} for role in ("user", "assistant")
]
_CALLED: dict[str, Any] = {"name": "find", "arguments": {"town": "Rome"}}
_CALL = {"id": "call12345", "type": "function", "function": _CALLED}
_CALLING: list[dict[str, Any]] = [
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call12345", "name": "find", "content": "It is there."},
]
_PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}}
_FUNCTION = {"name": "find", "description": "Finds a town.", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_SAMPLES = (
    Conversation(_TURNS[:1]),
    Conversation([_SYSTEM, *_TURNS * 20, _TURNS[0]]),
    Conversation(_TURNS[:1], _TOOLS),
    Conversation([_SYSTEM, _TURNS[0], *_CALLING], _TOOLS),
)


def check_template(**template: Any) -> None:
    """Try a template in a child. `template`: arguments of `ChatTemplate`. Raises ConfigError."""
    if problem := _problem(json.dumps(template)):
        raise ConfigError(f"chat template: {problem} for a short chat", field="model")


@functools.lru_cache(16)
def _problem(template: str) -> str:
    command = [sys.executable, "-m", "router.text.template_probe"]
    try:
        ended = subprocess.run(
            command, input=template.encode(), stderr=subprocess.DEVNULL, timeout=_WITHIN_S
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {_WITHIN_S:g} s"
    failed = f"the process that tries it ended with status {ended.returncode}"
    return _PROBLEMS.get(ended.returncode, failed)


def main() -> int:
    template = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, _CPU_S)
    try:
        made = ChatTemplate(**template)
        for sample in _SAMPLES:
            try:
                made.render(sample)
            except InvalidRequestError as error:  # one may refuse tools, or a system message
                if isinstance(error.__cause__, MemoryError):
                    return _OUT_OF_MEMORY
    except ConfigError as error:  # whoever makes it next says so
        return _OUT_OF_MEMORY if isinstance(error.__cause__, MemoryError) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
