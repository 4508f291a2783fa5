"""What a client sends over HTTP/2, cut into pieces of whole frames before h2 reads it.

h2 takes 10 to 30 us for the smallest frame. Here each is looked at for a fraction of one: for what
it will cost, and to refuse at once what h2 would keep for long.
"""

from __future__ import annotations

from h2.exceptions import DenialOfServiceError, FrameTooLargeError

MAX_HEADER_BYTES = 64 << 10
_MAX_FRAME_BYTES = 16 << 10  # what h2 announces
_MAX_SETTINGS_BYTES = 1 << 10  # of a frame: h2 takes a millisecond for them
_HEAD_BYTES = 9
_PIECE_COST = 32  # about a millisecond
_DATA, _HEADERS, _SETTINGS, _CONTINUATION, _ACK = 0, 1, 4, 9, 1
_COSTS = {_HEADERS: 8, _SETTINGS: 16}


class H2Input(bytearray):
    """Input that came and was not read yet."""

    has_more = False
    """Whether there may be another piece."""
    _preface_left = 24
    _header_bytes = 0

    def piece(self) -> tuple[bytes, int]:
        """Take the next frames, and their cost in small ones. Raises ProtocolError for what is too
        long, as soon as a frame's head says so."""
        at, cost, end = 0, 0, len(self)
        if self._preface_left:
            at = min(self._preface_left, end)
            self._preface_left -= at
        while cost < _PIECE_COST and at + _HEAD_BYTES <= end:
            length, kind = self[at] << 16 | self[at + 1] << 8 | self[at + 2], self[at + 3]
            if length > _MAX_FRAME_BYTES:
                raise FrameTooLargeError(f"a frame of {length} bytes")
            if at + _HEAD_BYTES + length > end:
                break
            cost += 1 if kind == _DATA else self._cost(kind, self[at + 4], length)
            at += _HEAD_BYTES + length
        self.has_more = cost >= _PIECE_COST
        piece = bytes(self) if at == end else bytes(self[:at])
        del self[:at]
        return piece, cost

    def _cost(self, kind: int, flags: int, length: int) -> int:
        if kind in (_HEADERS, _CONTINUATION):
            self._header_bytes = length + (kind == _CONTINUATION and self._header_bytes)
            if self._header_bytes > MAX_HEADER_BYTES:
                raise DenialOfServiceError("headers without end")
        if kind == _SETTINGS and length > _MAX_SETTINGS_BYTES:
            raise DenialOfServiceError("settings without end")
        if kind == _SETTINGS and flags & _ACK:
            return 1
        return _COSTS.get(kind, 1) + (length >> 10)
