"""Text on its way in and out: chat template, tokenizer, incremental detokenization, stop strings.

The only place in Baton where text and token ids meet; workers speak token ids. Nothing here knows
gRPC. A `TextModel` is immutable and may be used from several threads; a `Detokenizer` belongs to
one request.
"""

from router.text.chat_template import Conversation
from router.text.detokenizer import Detokenizer
from router.text.text_model import SamplingDefaults, TextModel

__all__ = ["Conversation", "Detokenizer", "SamplingDefaults", "TextModel"]
