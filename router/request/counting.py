"""How much a request holds, told before it is read.

Reading holds the interpreter's lock, on a thread as well, and with it the event loop: about as long
as there are values, however few bytes each has.
"""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pydantic_core
from google.protobuf.descriptor import Descriptor

from baton.errors import InvalidRequestError

AT_ONCE_BYTES = 32 << 10
"""What has no more is read on the event loop, and not counted."""
MAX_VALUES = 50_000
"""Of JSON, where whole numbers in a row count as an eighth each; fields of a protobuf message."""

_SLICE_BYTES = 256 << 10
_COSTS = np.zeros(256, np.int64)  # of the characters that part JSON's values, in eighths of one
_COSTS[[ord(char) for char in "{,.eE"]] = 8
_COSTS[[ord(char) for char in "[:"]] = 16  # a list costs the garbage collector, a key a hash
_MAX_COST = 8 * MAX_VALUES


def check_json(data: bytes, field: str | None = None) -> None:
    """Raise InvalidRequestError for too much JSON. It names `field`, or the member of the object.

    Takes 5 ms a MB, most of them without the lock.
    """
    start, spent, is_text = 0, 0, False
    while start < len(data) > AT_ONCE_BYTES:
        piece = data[start : start + _SLICE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and len(piece) > 1:
            piece = piece[:-1]  # no escape is cut in two
        plain = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        chars = np.frombuffer(plain, np.uint8)
        inside = np.logical_xor.accumulate(chars == ord('"')) ^ is_text
        costs = np.where(inside, 0, _COSTS[chars])
        is_digit = (chars - ord("0") < 10) & ~inside
        costs[1:][(chars[1:] == ord(",")) & is_digit[:-1]] = 1
        eights = is_digit[: len(chars) // 8 * 8].view(np.uint64) == 0x0101010101010101
        costs[: len(eights)] += 8 * eights  # no token id is that long
        if spent + int(costs.sum()) > _MAX_COST:
            end = start + int(np.searchsorted(np.cumsum(costs), _MAX_COST - spent))
            raise _too_many(field or _last_member(data[:end]) or "JSON")
        start, spent, is_text = start + len(piece), spent + int(costs.sum()), bool(inside[-1])


def _last_member(data: bytes) -> str | None:
    """The member of an object in whose midst its JSON is cut off."""
    try:
        known = pydantic_core.from_json(data, allow_partial=True)
    except ValueError:
        return None
    return next(reversed(known), "")[:64] if isinstance(known, dict) else None


def check_message(data: bytes, kind: Descriptor) -> None:
    """Raise InvalidRequestError for a protobuf message of too many fields, at any depth. It names
    the most frequent one. Packed numbers are one field."""
    counts = Counter[str]()
    left = MAX_VALUES
    within = [(0, len(data), kind, "")] if len(data) > AT_ONCE_BYTES else []
    try:
        while within:
            at, end, kind, path = within.pop()
            fields = _fields(kind)
            while at < end:
                key, at = _varint(data, at)
                name, inner = fields.get(key >> 3, ("", None))
                counts[path + name] += 1
                left -= 1
                if left < 0:
                    raise _too_many(counts.most_common(1)[0][0] or "message")
                match key & 7:
                    case 0:
                        _, at = _varint(data, at)
                    case 1:
                        at += 8
                    case 2:
                        length, start = _varint(data, at)
                        at = start + length
                        if inner is not None:
                            within.append((start, min(at, end), inner, f"{path}{name}."))
                    case 5:
                        at += 4
    except IndexError:
        return  # it is cut off, as its reader will say


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and where it ends. Raises IndexError."""
    value = shift = 0
    while (byte := data[at]) > 0x7F:
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
    return value | byte << shift, at + 1


@functools.cache
def _fields(kind: Descriptor) -> dict[int, tuple[str, Descriptor | None]]:
    """Name and message of each field, by its number."""
    return {field.number: (field.name, field.message_type) for field in kind.fields}


def _too_many(field: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: more than {MAX_VALUES:,} values", field=field)
