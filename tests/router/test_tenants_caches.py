"""What one tenant asked is no other tenant's hit, neither at a worker nor in the router's index.

Else tenants could find out what others ask by how fast they are answered.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from baton.config.settings import changed
from baton.errors import InvalidRequestError
from baton.fleet import Role
from kv_transfer.block_hash import HASH_BYTES
from router.placement.public_prefix import PublicPrefix
from router.text import Conversation
from router.units.router import Router
from tests.cluster.conftest import ENGINE, nothing_held, running_worker
from tests.router.answers import Client, ask_for
from tests.router.deployment import QUICK
from tests.router.real_workers import SMALL_VOCABULARY, Listed, router_over, until

PUBLIC = "You are a helpful assistant who answers every question in two short sentences."
PRIVATE = " The code of the safe in the cellar is nineteen, seven, eleven and four. Thank you."
NUM_PUBLIC = len(PUBLIC) // ENGINE.block_size
NUM_BLOCKS = (len(PUBLIC + PRIVATE) - 1) // ENGINE.block_size


async def ask(router: Router, client: Client, text: str, tenant: str, salt: str = "") -> list[int]:
    """Leading blocks found cached: expected at the prefill and the decode worker, and found."""
    answer = await client.ask(ask_for(text, 2, model="fake", tenant=tenant, cache_salt=salt))
    (routed,), (prefilled,) = answer.routed, answer.prefilled
    ids = np.array(router.text.encode(text), dtype=np.uint32)
    prompt = router.admission.prompt(ids, tenant, salt)
    ((kv_class, _),) = router.fleet.kinds.classes
    hashes = prompt.hashes(kv_class.kv_fingerprint, kv_class.block_size)
    num_blocks = len(hashes) // HASH_BYTES
    await until(lambda: router.index.lookup(hashes, 2, math.inf).tolist() == [num_blocks] * 2)
    expected = (routed.num_cached_tokens_prefill, routed.num_cached_tokens_decode)
    return [tokens // kv_class.block_size for tokens in (*expected, prefilled.num_cached_tokens)]


async def test_no_tenant_is_answered_from_what_another_asked_but_for_the_public_prefix() -> None:
    config = changed(
        QUICK,
        placement={"local_prefill": "never", "public_prefix": PUBLIC, "prediction_ttl_s": 0.0},
    )
    async with (
        running_worker("p0", Role.PREFILL, SMALL_VOCABULARY) as prefill,
        running_worker("d0", Role.DECODE, SMALL_VOCABULARY) as decode,
    ):
        listed = Listed(prefill, prefill.address), Listed(decode, decode.address)
        async with router_over(*listed, config=config) as (router, client):
            whole = PUBLIC + PRIVATE
            assert await ask(router, client, whole, "one") == [0, 0, 0]
            assert await ask(router, client, whole, "one") == [NUM_BLOCKS] * 3
            assert await ask(router, client, whole, "two") == [NUM_PUBLIC] * 3
            assert await ask(router, client, whole, "two", "salt") == [NUM_PUBLIC] * 3
            assert await ask(router, client, whole, "") == [NUM_PUBLIC] * 3
            for tenant in ("one", "two", ""):
                assert await ask(router, client, PRIVATE, tenant) == [0, 0, 0]
            router.check_integrity()
        await nothing_held(prefill, decode)


def encoded(text: str) -> list[int]:
    """A token for each letter."""
    return list(text.encode())


def encoded_chat(conversation: Conversation) -> list[int]:
    """A message stands between two tokens of its own."""
    return [t for m in conversation.messages for t in (1000, *m["content"].encode(), 1001)]


def no_chat(conversation: Conversation) -> list[int]:
    raise InvalidRequestError("the model has no chat template", field="chat")


@pytest.mark.parametrize(
    ("prompt", "num_public"),
    [
        ([*b"common, and more"], 6),
        ([*b"comedy"], 3),
        ([*b"com"], 3),
        ([1000, *b"common", 1001, 1000, *b"question", 1001], 8),
        ([1000, *b"comedy", 1001], 4),
        ([*b"other"], 0),
    ],
)
def test_what_a_prompt_has_of_the_public_text_is_public(prompt: list[int], num_public: int) -> None:
    ids = np.array(prompt, dtype=np.uint32)
    assert PublicPrefix.of("common", encoded, encoded_chat).num_tokens(ids) == num_public
    assert PublicPrefix.of("", encoded, encoded_chat).num_tokens(ids) == 0


def test_a_model_without_chats_has_public_plain_prompts() -> None:
    prefix = PublicPrefix.of("common", encoded, no_chat)
    assert prefix.num_tokens(np.array([*b"common"], dtype=np.uint32)) == 6
