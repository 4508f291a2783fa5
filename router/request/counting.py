"""How much a request holds, told before it is read.

Reading holds the interpreter's lock, and so the event loop, also on a thread: for as long as there
are values, however few bytes each has.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter

from google.protobuf.descriptor import Descriptor

from baton.errors import InvalidRequestError

AT_ONCE_BYTES = 32 << 10
"""What has no more is read on the event loop, and not counted."""
MAX_VALUES = 50_000
"""Of JSON, where whole numbers in a row count as a sixth each; fields of a protobuf message."""

_KINDS = bytes.maketrans(b"0123456789{.eE[:", b"0000000000vvvvww")


def check_json(data: bytes, field: str | None = None) -> None:
    """Raise InvalidRequestError for JSON of too many values. It names `field`, or the member that
    holds them."""
    if len(data) <= AT_ONCE_BYTES:
        return
    left, depth, text, member = MAX_VALUES * 6, 0, b"", ""
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    for number, piece in enumerate(bare.split(b'"', 2 * MAX_VALUES)):
        if number % 2:
            text = piece
            continue
        if depth == 1 and piece.lstrip().startswith(b":"):
            member = text[:64].decode(errors="replace")
        left -= _cost(piece.translate(_KINDS))
        if left < 0:
            raise _too_many(field or member or "JSON")
        depth += sum(map(piece.count, (b"{", b"["))) - sum(map(piece.count, (b"}", b"]")))


def _cost(kinds: bytes) -> int:
    """Return sixths of a value. A list costs the garbage collector, a key a hash; no token id has
    eight digits."""
    cost = 6 * (kinds.count(b"v") + kinds.count(b",") + kinds.count(b"00000000"))
    return cost + 12 * kinds.count(b"w") - 5 * kinds.count(b"0,")


def check_message(data: bytes, kind: Descriptor) -> None:
    """Raise InvalidRequestError for a protobuf message of too many fields, at any depth. It names
    the most frequent one. Packed numbers are one field."""
    counts, left = Counter[str](), MAX_VALUES
    within = [(0, len(data), kind, "")] if len(data) > AT_ONCE_BYTES else []
    while within:
        at, end, kind, path = within.pop()
        with contextlib.suppress(IndexError):  # it is cut off, as its reader will say in the end
            while at < end:
                key, at = _varint(data, at)
                name, inner = _fields(kind).get(key >> 3, ("", None))
                counts[path + name] += 1
                left -= 1
                if left < 0:
                    raise _too_many(counts.most_common(1)[0][0] or "message")
                if key & 7 == 2:
                    length, start = _varint(data, at)
                    at = start + length
                    if inner is not None:
                        within.append((start, min(at, end), inner, f"{path}{name}."))
                elif key & 7 == 0:
                    _, at = _varint(data, at)
                else:
                    at += {1: 8, 5: 4}.get(key & 7, 0)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number, and where it ends. Raises IndexError where it does not."""
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise IndexError


@functools.cache
def _fields(kind: Descriptor) -> dict[int, tuple[str, Descriptor | None]]:
    """Return name and message of each field, by its number."""
    return {field.number: (field.name, field.message_type) for field in kind.fields}


def _too_many(field: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: more than {MAX_VALUES:,} values", field=field)
