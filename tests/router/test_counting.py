"""What a request holds is counted before it is read."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequestError
from baton.v1 import router_pb2
from router.request import counting
from router.request.counting import MAX_VALUES, check_json, check_message

GENERATE = router_pb2.GenerateRequest.DESCRIPTOR
_CHARS = st.text(st.sampled_from('a1"\\,:{[.e \u00e9'), max_size=12)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats() | _CHARS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(_CHARS, inner, max_size=6),
)


def cost_of(text: str) -> int:
    """As `check_json` has it, one character after the other; runs of digits aside."""
    cost, is_text, is_escaped, last = 0, False, False, ""
    for char in text:
        if is_text:
            is_text = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            is_text = True
        elif char == "," and last.isdigit():
            cost += 1
        else:
            cost += 8 if char in "{,.eE" else 16 if char in "[:" else 0
        last = char
    return cost


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.lists(_VALUES), slice_bytes=st.integers(2, 40), is_ascii=st.booleans())
def test_values_are_counted_wherever_a_text_is_cut(
    monkeypatch: pytest.MonkeyPatch, value: object, slice_bytes: int, is_ascii: bool
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    monkeypatch.setattr(counting, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(counting, "_SLICE_BYTES", slice_bytes)
    most = cost_of(text)
    # A cut after a digit makes the comma beyond it dear; digits in a row may cost one more each 8.
    slack = 7 * (len(text) // (slice_bytes - 1) + 1) + len(text)
    monkeypatch.setattr(counting, "_MAX_COST", most + slack)
    check_json(text.encode())
    monkeypatch.setattr(counting, "_MAX_COST", most - 1)
    with pytest.raises(InvalidRequestError):
        check_json(text.encode())


def test_too_many_values_name_their_field_and_what_clients_send_passes() -> None:
    for item in ("{}", "[]", '""', "1.5", '{"a":1}', "9" * 20, "true"):
        many = f'{{"model":"x","prompt":[{",".join([item] * 150_000)}],"n":1}}'
        with pytest.raises(InvalidRequestError, match="^prompt: more than 50,000 values"):
            check_json(many.encode())
    with pytest.raises(InvalidRequestError, match="^JSON: more than"):
        check_json(b"[" * 100_000)
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(50)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for body in (
        {"prompt": ['{"a": [1, 2, 3]}, ' * 1700] * 128},
        {"prompt": [[100_000 + n for n in range(3000)]] * 128},
        {"prompt": list(range(131_072))},
        {"messages": [{"role": "user", "content": "\\ \u00e9\n" * 200}] * 4096},
        {"tools": [tool] * 128},
    ):
        check_json(json.dumps(body).encode())


def test_too_many_fields_of_a_message_are_told_on_the_wire() -> None:
    request = router_pb2.GenerateRequest()
    empty = b"\x0a\x00" * 5_000_000  # chat.messages
    chat = b"\x22\x80\xad\xe2\x04" + empty
    parts = router_pb2.GenerateRequest()
    message = parts.chat.messages.add()
    for _ in range(60_000):
        message.parts.add()
    for data, field in (
        (chat, "chat.messages"),
        (b"\x22\x00\x1a\x00" * 100_000, "chat"),  # one of two prompts, again and again
        (b"\xc2\x01\x02\x0a\x00" * 100_000, "choice"),
        (parts.SerializeToString(), "chat.messages.parts"),
    ):
        with pytest.raises(InvalidRequestError, match=f"^{field}: more than") as caught:
            check_message(data, GENERATE)
        assert caught.value.field == field
    request.token_ids.ids.extend(range(MAX_VALUES * 4))
    for number in range(4096):
        parts.chat.messages.add(role="user", content="x" * 100).tool_calls.add(name=str(number))
    del parts.chat.messages[0]
    for fine in (request, parts, router_pb2.GenerateRequest(text="x" * 4_000_000)):
        check_message(fine.SerializeToString(), GENERATE)
    check_message(chat[:40_000], GENERATE)  # cut off: its reader says so
