"""What each parameter of a request's body means, in a sentence, for the OpenAPI document.

Types and ranges are told by `gateway.api.request_types`; a test holds the names here to the fields there.
"""

PARAMETER_TEXTS = {
    "add_generation_prompt": "False: the conversation ends without what comes before an answer.",
    "add_special_tokens": "Put before a text what the tokenizer puts there, such as its first token.",
    "best_of": "Only as n: there is no choosing among more answers than are given back.",
    "cache_salt": "Only requests of the same salt share cached prefixes.",
    "chat_template_kwargs": "Variables of the model's chat template, such as enable_thinking.",
    "continue_final_message": "The answer goes on where the last message ends, which is an assistant's.",
    "echo": "Give back the prompt before the answer; not with logprobs.",
    "frequency_penalty": "Taken from a token's logit as often as the answer has it already.",
    "guided_choice": "The answer is one of these.",
    "guided_grammar": "The answer is in this context-free grammar, in Lark's or llama.cpp's notation.",
    "guided_json": "The answer is a JSON document of this schema.",
    "guided_regex": "The whole answer matches this regular expression.",
    "ignore_eos": "Go on after the model's end tokens.",
    "logit_bias": "Added to logits, by token id.",
    "logprobs": "In chats: whether the answer has its tokens' log probabilities. In text completions: of how "
    "many of the most probable tokens, too.",
    "max_completion_tokens": "The answer's greatest length; the newer name of max_tokens.",
    "max_tokens": "The answer's greatest length. Without it a chat answers as long as the context has room, "
    "a text completion with 16 tokens.",
    "messages": "The conversation, the oldest first.",
    "min_p": "Keep tokens at least that probable, seen from the most probable one.",
    "min_tokens": "Neither end tokens nor stops end the answer before; not where it is held to a form.",
    "model": "The name of the served model.",
    "n": "Answers to each prompt. Prompts times n are at most 1024.",
    "parallel_tool_calls": "Whether one answer may hold several calls.",
    "presence_penalty": "Taken from the logit of every token that the answer has already.",
    "priority": "A higher one goes first under pressure. The header x-priority says the same.",
    "prompt": "A text, token ids, or a list of either; each is answered.",
    "repetition_penalty": "Divides the logits of tokens that prompt or answer have already.",
    "response_format": "The form that the answer is held to.",
    "return_token_ids": "Give the answer's token ids, too.",
    "return_token_strs": "Give the tokens as strings, too.",
    "seed": "The same request with the same seed gets the same answer.",
    "skip_special_tokens": "False: special tokens are part of the answer's text.",
    "stop": "The answer ends before the first of these; not one that is held to a form.",
    "stop_token_ids": "The answer ends at any of these, and at the model's end tokens; one that is held "
    "to a form at those alone.",
    "stream": "Send the answer in pieces, as server-sent events.",
    "stream_options": "Only with stream.",
    "structured_outputs": "vLLM's way to name one form that the answer is held to.",
    "tbt_ms_max": "Refuse the request where the time between tokens would be longer. The header x-slo-tbt-ms "
    "says the same.",
    "temperature": "0 takes the most probable token.",
    "tokens": "Ids of tokens.",
    "tool_choice": "Whether a tool is to be called: none, auto, required, or a function by name.",
    "tools": "The functions that the model may call.",
    "top_k": "Draw from that many of the most probable tokens; 0 or -1: from all.",
    "top_logprobs": "Of how many of the most probable tokens log probabilities are given; needs logprobs.",
    "top_p": "Draw from the most probable tokens that together have this probability.",
    "ttft_ms_max": "Refuse the request where its first token would come later. The header x-slo-ttft-ms says "
    "the same.",
    "safety_identifier": "Whom the request is for; nothing depends on it.",
    "prompt_cache_key": "Taken; nothing depends on it: prompts that begin alike share their beginning.",
    "metadata": "Of the client's own; nothing depends on it.",
    "user": "Whom the request is for, in the client's words.",
}
