"""What `baton demo` asks: a model's own prompts.yaml, or a few prompts for any chat model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from baton.config import settings
from baton.errors import ConfigError


@dataclass(frozen=True)
class Turn:
    role: str
    content: str


@dataclass(frozen=True)
class DemoPrompt:
    """One request; the last message is the question, what comes before is its context."""

    name: str
    messages: tuple[Turn, ...]
    max_tokens: int = 128
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("messages must not be empty")

    @property
    def question(self) -> str:
        return self.messages[-1].content

    @property
    def context(self) -> tuple[Turn, ...]:
        return self.messages[:-1]


_NOTES = (
    "Here is the village newspaper. At the old mill, Rosa bought seven apples for three coins. "
    "Tom found a blue lantern under the bridge. Box 42 belongs to Clara. In it there is a silver "
    "flute. On Monday, Peter painted a fence at the school. Nora is nine years old. She lives near "
    "the lake. She has a grey cat called Pebble. On Friday, Emma flew a kite at the market. "
    "Box 17 belongs to Oscar. In it there is a red drum. Ben likes pears and the colour green. "
    "His best friend is Lucy."
)

FOR_ANY_MODEL = (
    DemoPrompt("story", (Turn("user", "Tell me a short story about a lost key."),), 160),
    DemoPrompt("box", (Turn("system", _NOTES), Turn("user", "Whose box is number 42?")), 48),
    DemoPrompt("cat", (Turn("system", _NOTES), Turn("user", "What is Nora's cat called?")), 48),
)


def read_prompts(model: str | Path) -> tuple[DemoPrompt, ...]:
    """Raises ConfigError when the model's prompts.yaml is wrong."""
    path = Path(model) / "prompts.yaml"
    if not path.is_file():
        return FOR_ANY_MODEL
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{path}: a list of prompts is expected")
    return tuple(
        settings.parse(DemoPrompt, entry, source=str(path), key=f"[{index}]")
        for index, entry in enumerate(value)
    )
