"""One model's text side: tokenizer, chat template, end-of-sequence ids, sampling defaults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from baton.errors import ConfigError, InvalidRequestError
from router.text.chat_template import ChatTemplate, Message
from router.text.detokenizer import BytesDecoder, TextDecoder, WindowDecoder
from router.text.encoder import SegmentEncoder
from router.text.model_files import ModelFiles, SamplingDefaults, read_model_files
from router.text.token_bytes import DecodeRules, TokenBytes


class TextModel:
    """Encodes prompts and decodes answers of one model. Immutable; safe to share among threads."""

    def __init__(self, tokenizer: Tokenizer, files: ModelFiles) -> None:
        self._tokenizer = tokenizer
        self._encoder = SegmentEncoder(tokenizer)
        self._template: ChatTemplate | None = None
        if files.chat_template is not None:
            guarded = self._encoder.special_tokens
            self._template = ChatTemplate(files.chat_template, files.special_tokens, guarded)
        rules = DecodeRules.read(tokenizer)
        self._token_bytes = None if rules is None else TokenBytes(tokenizer, rules)
        self.vocab_size: int = files.vocab_size or tokenizer.get_vocab_size()
        self.max_model_len: int | None = files.max_model_len
        self.sampling_defaults: SamplingDefaults = files.defaults
        self.eos_token_ids: frozenset[int] = files.eos_token_ids
        eos_token = files.special_tokens.get("eos_token")
        if eos_token is not None and (eos_id := tokenizer.token_to_id(eos_token)) is not None:
            self.eos_token_ids |= {eos_id}

    @classmethod
    def load(cls, files: Iterable[Path]) -> TextModel:
        """Read a model's text files, as `find_text_files` finds them.

        Raises ConfigError naming what is wrong with them.
        """
        read_files = read_model_files(files)
        try:
            tokenizer = Tokenizer.from_file(str(read_files.tokenizer_path))
        except Exception as error:  # the library raises no narrower class
            raise ConfigError(f"{read_files.tokenizer_path}: cannot be read: {error}") from error
        return cls(tokenizer, read_files)

    def encode(self, text: str) -> list[int]:
        """A plain prompt as the model's tokenizer encodes it, its own special tokens included.
        Special tokens written in the text are parsed as such."""
        return self._encoder.encode(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Messages through the chat template, up to where the assistant begins. Special tokens
        written in a message are encoded as ordinary text.

        Raises InvalidRequestError when there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise InvalidRequestError(
                "the model has no chat template; send a plain text prompt", field="chat"
            )
        return self._encoder.encode_rendered(*self._template.render(messages))

    def decode(self, token_ids: Sequence[int], *, after_text: bool = False) -> str:
        """The text of a whole answer: what a Detokenizer without stop strings emits in total."""
        decoder = self.new_decoder(after_text=after_text)
        return "".join(map(decoder.push, token_ids)) + decoder.finish()

    def new_decoder(self, *, after_text: bool) -> TextDecoder:
        if self._token_bytes is None:
            return WindowDecoder(self._tokenizer)
        return BytesDecoder(self._token_bytes, after_text=after_text)
