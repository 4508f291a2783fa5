"""Fields of OpenAI's, vLLM's and SGLang's requests that no body serves: passed or refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from baton.errors import InvalidRequestError

_EMPTY: tuple[object, ...] = (False, 0, "", [], {})
_TABLE: tuple[tuple[tuple[object, ...] | None, str], ...] = (
    # Values beside null that change nothing of what an answer says (None: all), and the fields.
    (None, """custom_labels guided_decoding_backend metadata prompt_cache_key prompt_cache_options
        prompt_cache_retention return_mm_kwargs return_token_offsets rid safety_identifier store
        service_tier spaces_between_special_tokens stream_interval user"""),
    (_EMPTY, """audio bootstrap_host bootstrap_port bootstrap_room chat_template custom_params task
        custom_logit_processor ec_transfer_params extra_key functions guided_whitespace_pattern
        images_config input_ids kv_transfer_params logits_processors logprob_token_ids lora_path
        max_dynamic_patch media_io_kwargs min_dynamic_patch mm_processor_kwargs moderation suffix
        ngram_corpus_id no_stop_trim prediction prompt_embeds reasoning repetition_detection
        return_cached_tokens_details return_hidden_states return_meta_info return_prompt_text
        return_prompt_token_ids return_routed_experts return_token_strs return_tokens_as_token_ids
        routed_experts_prompt_start routed_experts_start_len session_params stop_regex vllm_xargs
        structural_tag use_audio_in_video use_beam_search watermarking"""),
    ((), "data_parallel_rank disagg_prefill_dp_rank routed_dp_rank web_search_options"),
    ((True,), "detokenize include_reasoning separate_reasoning stream_reasoning"),
    ((1,), "best_of length_penalty"),
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


def ignored(given: Mapping[str, Any], elsewhere: Collection[str]) -> list[str]:
    """Name the fields in no table, at most `_MAX_NAMES` and `_OTHER` for the rest. `elsewhere`:
    what some endpoint serves. Raises InvalidRequestError for a field that is refused."""
    names = dict[str, None]()
    for name, value in given.items():
        if name in REFUSED or name in elsewhere:
            if value is not None and value not in REFUSED.get(name, _EMPTY):
                raise InvalidRequestError(f"{name}: not served at this endpoint", field=name)
        elif value is not None and name not in PASSED:
            is_told = len(names) < _MAX_NAMES and _NAME.fullmatch(name)
            names[name if is_told else _OTHER] = None
    return list(names)
