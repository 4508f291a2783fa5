"""From documents to rows of token ids: trains the tokenizer, encodes, packs.

A row holds whole documents, the first at its start; what is left is padding that does not count.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from documents import Document, long_document, short_document
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>")
PAD_ID = SPECIAL_TOKENS.index("<|pad|>")
OPEN_ROWS = 12  # rows a document may still fall into, so that little of a row is left over

Make = Callable[[random.Random], Document]
Encoded = tuple[list[int], list[bool]]  # token ids, and which of them are to be predicted


@dataclass(frozen=True)
class Rows:
    """Packed documents: ids uint16 and counted bool, both [num_rows, length + 1]."""

    ids: npt.NDArray[np.uint16]
    counted: npt.NDArray[np.bool_]

    @property
    def length(self) -> int:
        return int(self.ids.shape[1]) - 1


def train_tokenizer(seed: int, vocab_size: int, num_documents: int = 6000) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocab_size` entries."""
    rng = random.Random(seed)
    texts = (
        "".join(text for text, _ in short_document(rng).segments()) for _ in range(num_documents)
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[Document]) -> list[Encoded]:
    """Token ids of documents, piece by piece, so that the counted part is exact."""
    pieces = [document.segments() for document in documents]
    flat = tokenizer.encode_batch(
        [text for segments in pieces for text, _ in segments], add_special_tokens=False
    )
    encoded = iter(flat)
    out: list[Encoded] = []
    for segments in pieces:
        ids: list[int] = []
        counted: list[bool] = []
        for _, counts in segments:
            piece = next(encoded).ids
            ids += piece
            counted += [counts] * len(piece)
        out.append((ids, counted))
    return out


def encoded_stream(
    tokenizer: Tokenizer, make: Make, rng: random.Random, limit: int, *, cut: bool
) -> Iterator[Encoded]:
    """Endless documents; those of more than `limit` tokens are cut there or left out."""
    while True:
        for ids, counted in encode(tokenizer, [make(rng) for _ in range(500)]):
            if len(ids) <= limit or (cut and any(counted[:limit])):
                yield ids[:limit], counted[:limit]


def pack(tokenizer: Tokenizer, make: Make, seed: int, num_rows: int, length: int) -> Rows:
    """`num_rows` rows of `length` predictions each, of the documents that `make` makes.

    Rows of long documents are filled up with short ones. More rows begin with the same rows.
    """
    rng = random.Random(seed)
    long = make is long_document
    first = encoded_stream(tokenizer, make, rng, length + 1, cut=long)
    fill = encoded_stream(tokenizer, short_document, rng, length + 1, cut=False) if long else first
    done: list[Encoded] = []
    open_rows: list[Encoded] = [next(first) for _ in range(OPEN_ROWS)]
    while len(done) < num_rows:
        ids, counted = next(fill)
        room = [row for row in open_rows if len(row[0]) + len(ids) <= length + 1]
        if room:
            fullest = max(room, key=lambda row: len(row[0]))
            fullest[0].extend(ids)
            fullest[1].extend(counted)
            continue
        fullest = max(open_rows, key=lambda row: len(row[0]))
        open_rows.remove(fullest)
        done.append(fullest)
        open_rows.append(next(first) if long else (ids, counted))
    table = np.full((num_rows, length + 1), PAD_ID, dtype=np.uint16)
    mask = np.zeros((num_rows, length + 1), dtype=np.bool_)
    for index, (ids, counted) in enumerate(done):
        table[index, : len(ids)] = ids
        mask[index, : len(counted)] = counted
    return Rows(table, mask)
