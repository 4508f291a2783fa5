"""One model's text side: tokenizer, chat template, end-of-sequence ids, sampling defaults.

All of it is read once from a Hugging Face model's files, and checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from baton.errors import ConfigError, InvalidRequestError
from baton.model_files import read_json
from router.text.chat_template import ChatTemplate, Conversation
from router.text.detokenizer import BytesDecoder, TextDecoder, WindowDecoder
from router.text.encoder import SegmentEncoder
from router.text.reasoning import CLOSE, OPEN, ReasoningSplitter
from router.text.template_probe import check_template
from router.text.token_bytes import DecodeRules, TokenBytes
from router.text.tools import MARKERS, ToolFormat, tool_format_of

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")

_TAIL_TOKENS = 8  # that hold `<think>` and the white space after it

_Named = Mapping[str, Path]


@dataclass(frozen=True)
class SamplingDefaults:
    """What the model's own generation_config.json asks for where a request says nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class TextModel:
    """Encodes prompts and decodes answers of one model. Immutable; safe to share among threads."""

    def __init__(
        self, files: Iterable[Path], tool_calls: str = "auto", reasoning: str = "auto"
    ) -> None:
        """Read a model's text files, as `find_text_files` finds them. `tool_calls` and `reasoning`
        are the router's settings.

        Raises ConfigError naming what is wrong with them.
        """
        named = {path.name: path for path in files}
        if "tokenizer.json" not in named:
            raise ConfigError("tokenizer.json: missing", field="tokenizer")
        tokenizer_config = _read_json(named, "tokenizer_config.json")
        config = _read_json(named, "config.json")
        text_config = config.get("text_config")
        if isinstance(text_config, dict):
            config = {**config, **text_config}
        generation = _read_json(named, "generation_config.json")
        special_tokens = _special_tokens(named, tokenizer_config)
        template = _chat_template(named, tokenizer_config)
        tokenizer = self._tokenizer = _read_tokenizer(named["tokenizer.json"])
        self._encoder = SegmentEncoder(tokenizer)
        self._template: ChatTemplate | None = None
        if template is not None:
            check_template(
                source=template,
                special_tokens=special_tokens,
                guarded_tokens=self._encoder.special_tokens,
            )
            self._template = ChatTemplate(template, special_tokens, self._encoder.special_tokens)
        self._template_text = template or ""
        self.tool_format: ToolFormat | None
        """How the model writes calls; None: not known, or it makes none."""
        self.tool_format = tool_format_of(template or "")
        if tool_calls != "auto":
            self.tool_format = next((name for name in MARKERS if name == tool_calls), None)
        self.reasons = OPEN in (template or "") if reasoning == "auto" else reasoning == "think"
        """Whether the model thinks between `<think>` and `</think>` before it answers."""
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        """Ids of what the tokenizer reads as one token wherever it stands. Any other text is spelt.
        """
        rules = DecodeRules.read(tokenizer)
        self._token_bytes = (
            None if rules is None else TokenBytes(tokenizer, rules, shown=self._markers)
        )
        self.vocab_size: int = _size(config, "vocab_size") or tokenizer.get_vocab_size()
        self.max_model_len = _size(config, "max_position_embeddings")
        self.sampling_defaults = _sampling_defaults(generation)
        eos = generation.get("eos_token_id")
        if eos is None:  # null counts as absent, as in the engine
            eos = config.get("eos_token_id")
        eos_token = special_tokens.get("eos_token")
        own = None if eos_token is None else tokenizer.token_to_id(eos_token)
        self.eos_token_ids = _token_ids(eos) | (frozenset() if own is None else {own})

    def encode(self, text: str, *, is_bare: bool = False) -> list[int]:
        """Encode a plain prompt as the model's tokenizer does, with its own special tokens unless
        `is_bare`. Special tokens written in the text are parsed as such."""
        return self._encoder.encode_rendered(text, None) if is_bare else self._encoder.encode(text)

    def encode_within(self, text: str) -> list[int]:
        """Encode a part of a text, without the special tokens that begin or end one."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @property
    def _markers(self) -> frozenset[str]:
        """The special tokens that an answer's text keeps, since they say what it is."""
        tools = MARKERS[self.tool_format] if self.tool_format else ()
        return frozenset((*tools, *((OPEN, CLOSE) if self.reasons else ())))

    def encode_chat(self, conversation: Conversation) -> list[int]:
        """Encode a chat by the template, up to where the assistant begins. Special tokens written
        in it are encoded as ordinary text.

        Raises InvalidRequestError when there is no template, or it refuses the chat.
        """
        if self._template is None:
            raise InvalidRequestError(
                "the model has no chat template; send a plain text prompt", field="chat"
            )
        return self._encoder.encode_rendered(*self._template.render(conversation))

    def token_text(self, token_id: int) -> bytes:
        """Return what a token is by itself; a special token is its name."""
        if self._token_bytes is not None and (shown := self._token_bytes[token_id]):
            return shown
        name: str | None = self._tokenizer.id_to_token(token_id)
        return (name or "").encode()

    def is_in_template(self, text: str) -> bool:
        return text in self._template_text

    def thinks_after(self, token_ids: Sequence[int]) -> bool:
        """Whether an answer to the prompt begins within its reasoning."""
        return self.reasons and self._tail(token_ids).endswith(OPEN)

    def thought_before(self, token_ids: Sequence[int]) -> bool:
        """Whether the prompt has the answer's thoughts, as templates do it with thinking off."""
        return self.reasons and self._tail(token_ids).endswith(CLOSE)

    def _tail(self, token_ids: Sequence[int]) -> str:
        ids = [int(each) for each in token_ids[-_TAIL_TOKENS:]]
        tail: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return tail.rstrip()

    def new_splitter(self, prompt: Sequence[int]) -> ReasoningSplitter | None:
        """Make a splitter for the answer to a chat's prompt; None: the model does not think."""
        return ReasoningSplitter(is_open=self.thinks_after(prompt)) if self.reasons else None

    def decode(self, token_ids: Sequence[int], *, shows_special: bool = False) -> str:
        """Return the text of a whole answer, made token by token: one call of the library's for all
        would hold the interpreter's lock."""
        decoder = self.new_decoder(shows_special=shows_special)
        return "".join(map(decoder.push, token_ids)) + decoder.finish()

    def new_decoder(self, *, after_text: bool = False, shows_special: bool = False) -> TextDecoder:
        """`after_text=True` where the answer continues a text: tokenizers of the SentencePiece kind
        otherwise drop the space at its beginning. `shows_special`: special tokens are text."""
        if self._token_bytes is None:
            return WindowDecoder(self._tokenizer, shows_special)
        token_bytes = self._token_bytes
        if shows_special:
            names = self._encoder.special_tokens
            token_bytes = TokenBytes(self._tokenizer, token_bytes.rules, shown=names)
        return BytesDecoder(token_bytes, after_text=after_text)


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _read_text(named: _Named, name: str) -> str | None:
    """Read a text; None where there is no such file."""
    path = named.get(name)
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _read_json(named: _Named, name: str) -> dict[str, Any]:
    """Read a JSON object; empty where there is no such file."""
    return read_json(named[name]) if name in named else {}


def _chat_template(named: _Named, tokenizer_config: Mapping[str, Any]) -> str | None:
    if (text := _read_text(named, "chat_template.jinja")) is not None:
        return text
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named ones
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = next((e.get("template") for e in entries if e.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ConfigError("tokenizer_config.json: chat_template: text is expected")
    return template


def _special_tokens(named: _Named, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for source in (_read_json(named, "special_tokens_map.json"), tokenizer_config):
        for name in SPECIAL_TOKEN_NAMES:
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                tokens[name] = value
    return tokens


def _token_ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int and 0 <= item < 1 << 32 for item in values):
        raise ConfigError(f"eos_token_id: token ids are expected, not {value!r}")
    return frozenset(values)


def _size(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"config.json: {name}: a number is expected, not {value!r}")
    return value


def _sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    base = SamplingDefaults()
    values: dict[str, Any] = {}
    path = "generation_config.json"
    for name, default in vars(base).items():
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{path}: {name}: a number is expected, not {value!r}")
        if not 0 <= value < 1 << 31:
            raise ConfigError(f"{path}: {name}: a number from 0 on is expected, not {value!r}")
        values[name] = type(default)(value)
    if generation.get("do_sample") is False:
        values["temperature"] = 0.0
    return replace(base, **values)
