"""Fields of OpenAI's, vLLM's and SGLang's requests that no body serves: passed or refused. One
within a message, a part or a tool has the name of what holds it before its own."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

from pydantic import BaseModel

from baton.errors import InvalidRequestError
from router.door.http.server.errors import GIVEN

_EMPTY: tuple[object, ...] = (False, 0, "", [], {})
_TABLE: tuple[tuple[tuple[object, ...] | None, str], ...] = (
    # Values beside null that change nothing of what an answer says (None: all), and the fields.
    (None, """custom_labels guided_decoding_backend metadata prompt_cache_key prompt_cache_options
        prompt_cache_retention return_mm_kwargs return_token_offsets rid safety_identifier store
        service_tier spaces_between_special_tokens stream_interval user
        content.annotations content.cache_control content.caller content.citations content.data
        content.is_error content.logprobs content.signature function.cache_control function.strict
        input.id input.phase input.status input.summary json_schema.description json_schema.name
        json_schema.strict messages.annotations messages.cache_control system.cache_control
        stream_options.include_obfuscation tool_calls.index tool_calls.type tools.cache_control"""),
    (_EMPTY, """audio bootstrap_host bootstrap_port bootstrap_room chat_template custom_params task
        custom_logit_processor ec_transfer_params extra_body extra_key format functions grammar
        guided_whitespace_pattern images_config input_ids kv_transfer_params logits_processors
        logprob_token_ids lora_path max_dynamic_patch media_io_kwargs min_dynamic_patch moderation
        mm_processor_kwargs suffix ngram_corpus_id no_stop_trim prediction prompt_embeds reasoning
        repetition_detection
        return_cached_tokens_details return_hidden_states return_meta_info return_prompt_text
        return_prompt_token_ids return_routed_experts return_token_strs return_tokens_as_token_ids
        routed_experts_prompt_start routed_experts_start_len session_params stop_regex vllm_xargs
        structural_tag use_audio_in_video use_beam_search watermarking
        function.defer_loading input.encrypted_content messages.audio messages.function_call
        messages.tools response_format.schema tools.defer_loading
        structured_outputs.disable_additional_properties
        structured_outputs.disable_any_whitespace structured_outputs.structural_tag
        structured_outputs.whitespace_pattern tool_calls.custom"""),
    ((), "data_parallel_rank disagg_prefill_dp_rank routed_dp_rank web_search_options"),
    ((True,), "detokenize include_reasoning separate_reasoning stream_reasoning"),
    ((1,), "best_of length_penalty"),  # `best_of` also as `n`
    ((-1,), "max_thinking_tokens thinking_token_budget"),
    (("auto", "none"), "function_call"),
    ((["text"], []), "modalities"),
    (("left",), "truncation_side"),
    (("medium",), "verbosity"),
)  # fmt: skip
_NEUTRAL = {name: neutral for neutral, names in _TABLE for name in names.split()}
PASSED = {name for name, neutral in _NEUTRAL.items() if neutral is None}
REFUSED = {name: neutral for name, neutral in _NEUTRAL.items() if neutral is not None}

_NAME, _MAX_NAMES, _OTHER = re.compile(r"[A-Za-z0-9_.-]{1,64}"), 16, "other"


def refused(field: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {problem}", field=field)


def ignored(body: BaseModel, chat: BaseModel, elsewhere: Collection[str]) -> list[str]:
    """Name the fields in no table, at most `_MAX_NAMES` and `_OTHER` for the rest. `chat`: what the
    body of another API became, else the body. `elsewhere`: what some endpoint serves. Raises
    InvalidRequestError for a field that is refused."""
    own = type(body).model_fields if body is not chat else ()
    nested = (_unlisted(getattr(body, name), f"{name}.", name) for name in own)
    names = dict[str, None]()
    for name, place, value in chain(_unlisted(chat), *nested):
        if name in REFUSED or name in elsewhere:
            is_zero = name in elsewhere and value == 0 and value is not False
            is_n = name == "best_of" and value == (getattr(chat, "n", None) or 1)
            neutral = is_n or value is None or value in REFUSED.get(name, _EMPTY)
            if is_zero or not neutral:
                field = place if "." in place else GIVEN + place
                raise refused(field, "not served at this endpoint")
        elif value is not None and name not in PASSED:
            is_told = len(names) < _MAX_NAMES and _NAME.fullmatch(name)
            names[name if is_told else _OTHER] = None
    return list(names)


def _unlisted(value: Any, name: str = "", place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the fields within a value that its bodies do not list: name, place and value."""
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for index, each in enumerate(value):
            yield from _unlisted(each, name, f"{place}[{index}]")
    elif isinstance(value, BaseModel):
        within = f"{place}." if place else ""
        for key, each in (value.model_extra or {}).items():
            yield name + key, within + key, each
        for key, each in value.__dict__.items():  # which holds the listed ones
            if isinstance(each, list | BaseModel):
                yield from _unlisted(each, f"{key}.", within + key)
