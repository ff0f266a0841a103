"""Parameters that other servers have and this one takes only where they ask for nothing. Pure."""

Neutral = dict[str, tuple[object, ...]]
"""Parameters that are not supported, with the values at which they ask for nothing."""

_GENERATION_NEUTRAL: Neutral = {
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "early_stopping": (None, False),
    "guided_decoding_backend": (None, "auto"),
    "guided_whitespace_pattern": (None,),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "prompt_cache_retention": (None,),
    "prompt_logprobs": (None,),
    "request_id": (None,),
    "service_tier": (None, "auto", "default"),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
CHAT_NEUTRAL: Neutral = _GENERATION_NEUTRAL | {
    "audio": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "store": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
COMPLETION_NEUTRAL: Neutral = _GENERATION_NEUTRAL | {"suffix": (None, "")}
TOKENIZE_NEUTRAL: Neutral = {}
DETOKENIZE_NEUTRAL: Neutral = {}
