"""What a request holds is counted before it is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequestError
from baton.v1 import router_pb2
from router.request.counting import AT_ONCE_BYTES, check_json, check_message

GENERATE = router_pb2.GenerateRequest.DESCRIPTOR
TEXT = st.text(st.sampled_from('a1"\\,:{[.e é'), max_size=50)


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(TEXT, max_size=9), is_ascii=st.booleans())
def test_what_stands_in_texts_does_not_count(texts: list[str], is_ascii: bool) -> None:
    body: dict[str, Any] = {"a": texts * 300, "b": "x" * AT_ONCE_BYTES}
    check_json(json.dumps(body, ensure_ascii=is_ascii).encode())
    body["b"] = [""] * 50_000
    with pytest.raises(InvalidRequestError, match=r"^b: more than 50,000 values"):
        check_json(json.dumps(body, ensure_ascii=is_ascii).encode())


@pytest.mark.parametrize(
    "item", ["{}", "[]", '""', "1.5", '{"a":1}', "9" * 20, "true", "[1,2]", "1234567"]
)
def test_too_many_values_name_the_member_that_holds_them(item: str) -> None:
    many = f'{{"model":"x","prompt":[{",".join([item] * 301_000)}],"n":1}}'
    with pytest.raises(InvalidRequestError, match=r"^prompt: more than 50,000 values"):
        check_json(many.encode())


def test_what_clients_send_passes() -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(50)}}
    for body in (
        {"prompt": ['{"a": [1, 2, 3]}, ' * 1700] * 128},
        {"messages": [{"role": "user", "content": "\\ é\n" * 200}] * 4096},
        {"prompt": [list(range(2000))] * 128},
        {"messages": [{"role": "user"}] * 4096, "tools": [{"parameters": schema}] * 40},
        {"prompt": [1234567] * 299_000},
    ):
        check_json(json.dumps(body).encode())
    request = router_pb2.GenerateRequest()
    for number in range(4096):
        request.chat.messages.add(role="user", content="x" * 100).tool_calls.add(name=str(number))
    ids = router_pb2.GenerateRequest(token_ids={"ids": range(200_000)})
    for fine in (request, ids, router_pb2.GenerateRequest(text="x" * 4_000_000)):
        check_message(fine.SerializeToString(), GENERATE)
        check_message(fine.SerializeToString()[:-1], GENERATE)  # cut off: its reader says so
    check_message(b"\xff" * 4_000_000, GENERATE)  # a number without end


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"\x22\x80\xad\xe2\x04" + b"\x0a\x00" * 5_000_000, "chat.messages"),
        (b"\x22\x84\xad\xe2\x04\x0a\xff\xac\xe2\x04" + b"\x1a\x00" * 5_000_000,
         "chat.messages.parts"),  # cut off at its end
        (b"\x22\x00\x1a\x00" * 100_000, "chat"),  # one of two prompts, again and again
        (b"\xc2\x01\x02\x0a\x00" * 100_000, "choice"),
        (b"\x48\x01" * 100_000, "stop_token_ids"),
    ],
)  # fmt: skip
def test_too_many_fields_of_a_message_are_told_on_the_wire(data: bytes, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: more than") as caught:
        check_message(data, GENERATE)
    assert caught.value.field == field
